# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The ordered commits: series/series.toml and series/NNNN-*.toml."""

import os
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from .edits import PLACES, Edit
from .errors import ForkError


@dataclass(frozen=True)
class Commit:
    """One commit of the series.

    Attributes:
        source: File that declares it, relative to the repository.
        title: First line of the message.
        message: The reason, for the reviewer.
        files: Globs over repository paths; `*` also matches "/".
        edits: Declared edits of upstream files.

    """

    source: str
    title: str
    message: str
    files: tuple[str, ...]
    edits: tuple[Edit, ...]

    def owns(self, path: str) -> bool:
        """Whether a repository path belongs to this commit."""
        return any(fnmatchcase(path, glob) for glob in self.files)


@dataclass(frozen=True)
class Series:
    """The whole series.

    Attributes:
        title: Subject of the cover letter.
        message: Body of the cover letter.
        roots: Folders that lie at upstream paths.
        fork_only: Globs of files below them that upstream never sees.
        commits: In order.

    """

    title: str
    message: str
    roots: tuple[str, ...]
    fork_only: tuple[str, ...]
    commits: tuple[Commit, ...]

    def edits(self) -> dict[str, list[Edit]]:
        """All edits by upstream path, in the order of the commits."""
        found: dict[str, list[Edit]] = {}
        for commit in self.commits:
            for edit in commit.edits:
                found.setdefault(edit.file, []).append(edit)
        return found

    def is_fork_only(self, path: str) -> bool:
        """Whether a repository path is not part of the series."""
        return any(fnmatchcase(path, glob) for glob in self.fork_only)

    def files(self, root: Path) -> list[str]:
        """Repository paths that belong to the series, sorted."""
        paths = list_files(root, self.roots)
        return [path for path in paths if not self.is_fork_only(path)]


def list_files(root: Path, folders: Iterable[str]) -> list[str]:
    """Source files below `folders`, relative to `root`, sorted, with "/"."""
    paths = []
    for folder in folders:
        for parent, folders_here, names in os.walk(root / folder):
            folders_here[:] = [
                name
                for name in folders_here
                if name != "__pycache__" and not name.startswith(".")
            ]
            for name in names:
                if not name.startswith(".") and not name.endswith((".pyc", ".so")):
                    path = Path(parent, name).relative_to(root)
                    paths.append(path.as_posix())
    return sorted(paths)


def load_series(root: Path) -> Series:
    """Reads the declarations below `root`/series.

    Raises:
        ForkError: If a declaration lacks a key or names an unknown place.

    """
    folder = root / "series"
    head = tomllib.loads((folder / "series.toml").read_text(encoding="utf-8"))
    commits = tuple(_load_commit(root, path) for path in sorted(folder.glob("0*.toml")))
    return Series(
        title=head["title"],
        message=head["message"],
        roots=tuple(head["roots"]),
        fork_only=tuple(head["fork_only"]),
        commits=commits,
    )


def _load_commit(root: Path, path: Path) -> Commit:
    text = path.read_text(encoding="utf-8")
    source = path.relative_to(root).as_posix()
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ForkError(f"{source}: {error}") from error
    # tomllib keeps no positions; the n-th table header is the n-th edit.
    headers = [
        number
        for number, line in enumerate(text.splitlines(), start=1)
        if line.strip() == "[[edit]]"
    ]
    edits = []
    for number, entry in zip(headers, data.get("edit", []), strict=True):
        where = f"{source}:{number}"
        missing = {"file", "anchor", "place", "text"} - entry.keys()
        if missing:
            raise ForkError(f"{where}: the edit lacks {', '.join(sorted(missing))}")
        if entry["place"] not in PLACES:
            raise ForkError(
                f"{where}: place is {entry['place']!r}; allowed are {', '.join(PLACES)}"
            )
        lines = tuple(entry["text"].removesuffix("\n").split("\n"))
        edits.append(Edit(entry["file"], entry["anchor"], entry["place"], lines, where))
    missing = {"title", "message"} - data.keys()
    if missing:
        raise ForkError(f"{source}: lacks {', '.join(sorted(missing))}")
    return Commit(
        source=source,
        title=data["title"],
        message=data["message"].strip(),
        files=tuple(data.get("files", ())),
        edits=tuple(edits),
    )


def owners(series: Series, paths: Iterable[str]) -> dict[str, list[str]]:
    """For each path, the sources of the commits that own it."""
    return {
        path: [commit.source for commit in series.commits if commit.owns(path)]
        for path in paths
    }
