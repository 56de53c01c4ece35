# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The source tree of vLLM, with and without the series."""

import tarfile
from collections.abc import Iterable
from pathlib import Path

from .edits import Edit, apply_edits
from .errors import ForkError
from .series import Series


def unpack_sdist(archive: Path, target: Path) -> None:
    """Unpacks an sdist so that its top folder becomes `target`.

    Raises:
        ForkError: If `target` exists and is not empty.

    """
    if target.exists() and any(target.iterdir()):
        raise ForkError(f"{target} exists and is not empty")
    target.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as tar:
        top = archive.name.removesuffix(".tar.gz") + "/"
        members = []
        for member in tar:
            if member.name.startswith(top):
                member.name = member.name.removeprefix(top)
                members.append(member)
        tar.extractall(target, members, filter="data")


def edit_source(tree: Path, edits: Iterable[Edit]) -> None:
    """Applies edits to files of an unpacked tree.

    Raises:
        ForkError: If a file does not exist or an anchor is not found once.

    """
    for edit in edits:
        path = tree / edit.file
        if not path.is_file():
            raise ForkError(f"{edit.where}: {edit.file} is not in the upstream tree")
        text = path.read_bytes().decode("utf-8")
        path.write_bytes(apply_edits(text, [edit]).encode("utf-8"))


def copy_files(root: Path, tree: Path, files: Iterable[str]) -> None:
    """Copies files of the repository to their places in a tree."""
    for name in files:
        target = tree / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((root / name).read_bytes())
        target.chmod((root / name).stat().st_mode & 0o777)


def lay_series(root: Path, tree: Path, series: Series) -> None:
    """Turns a pristine tree into the fork's, all commits at once.

    Raises:
        ForkError: As for `edit_source`.

    """
    copy_files(root, tree, series.files(root))
    for commit in series.commits:
        edit_source(tree, commit.edits)
