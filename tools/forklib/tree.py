# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""tools/fork tree and tools/fork series: the fork as commits and as patches."""

import tempfile
from pathlib import Path

from .errors import ForkError
from .fetch import fetch
from .git import git
from .pins import load_upstream
from .series import Series, load_series
from .source import copy_files, edit_source, unpack_sdist

BASE = "upstream"
BRANCH = "ovis"


def make_tree(root: Path, target: Path, cache: Path, version: str | None = None) -> int:
    """Writes upstream's source with one commit for each commit of the series.

    The pristine release is the tag "upstream"; the series is the branch "ovis".

    Args:
        root: The repository.
        target: Folder to write; must be missing or empty.
        cache: Folder of upstream archives.
        version: Upstream version; default: the release forked from.

    Returns:
        Number of commits on top of the release.

    Raises:
        ForkError: If `target` is not empty, or an archive or an anchor is not as it
            must be.

    """
    archive = load_upstream(root / "series" / "upstream.toml").sdist(version)
    unpack_sdist(fetch(archive, cache), target)
    git(target, "init", "--quiet", "--initial-branch", BRANCH)
    git(target, "config", "core.autocrlf", "false")
    git(target, "config", "gc.auto", "0")
    # Some files of the release match its own ignore rules.
    git(target, "add", "--all", "--force")
    git(target, "commit", "--quiet", "-m", f"vLLM {archive.version} as released")
    git(target, "tag", BASE)
    return _commit_series(root, target, load_series(root))


def _commit_series(root: Path, tree: Path, series: Series) -> int:
    files = series.files(root)
    made = 0
    for commit in series.commits:
        own = [path for path in files if commit.owns(path)]
        copy_files(root, tree, own)
        edit_source(tree, commit.edits)
        changed = sorted({*own, *(edit.file for edit in commit.edits)})
        if not changed:
            continue
        git(tree, "add", "--force", "--", *changed)
        message = f"{commit.title}\n\n{commit.message}"
        git(tree, "commit", "--quiet", "-m", message)
        made += 1
    return made


def write_series(root: Path, out: Path, cache: Path, version: str | None = None) -> int:
    """Writes the series as git format-patch does, and proves that it applies.

    Args:
        root: The repository.
        out: Folder for the patches; must hold no other patch.
        cache: Folder of upstream archives.
        version: Upstream version the patches are for; default: the one forked from.

    Returns:
        Number of patches, the cover letter aside.

    Raises:
        ForkError: If the patches do not apply to the pristine release, or as for
            `make_tree`.

    """
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if any(out.glob("*.patch")):
        raise ForkError(f"{out} holds patches already; remove them first")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="series-") as folder:
        tree = Path(folder) / "vllm"
        count = make_tree(root, tree, cache, version)
        format_patches(tree, load_series(root), out)
        apply_patches(tree, out, Path(folder) / "pristine")
    return count


def format_patches(tree: Path, series: Series, out: Path) -> None:
    """Writes the patches and the cover letter of a tree made by `make_tree`."""
    arguments = ["--quiet", "--cover-letter", "--no-signature", "-o", str(out)]
    git(tree, "format-patch", *arguments, f"{BASE}..{BRANCH}")
    cover = out / "0000-cover-letter.patch"
    text = cover.read_text(encoding="utf-8")
    text = text.replace("*** SUBJECT HERE ***", series.title)
    text = text.replace("*** BLURB HERE ***", series.message.strip())
    cover.write_text(text, encoding="utf-8")


def apply_patches(tree: Path, patches: Path, pristine: Path) -> None:
    """Applies patches to the pristine release in a new work tree at `pristine`.

    Raises:
        ForkError: If one does not apply, or the outcome is not the series' tree.

    """
    git(tree, "worktree", "add", "--quiet", "--detach", str(pristine), BASE)
    names = sorted(str(path) for path in patches.glob("*.patch"))
    git(pristine, "am", "--quiet", *names[1:])
    applied = git(pristine, "rev-parse", "HEAD^{tree}")
    if applied != git(tree, "rev-parse", f"{BRANCH}^{{tree}}"):
        raise ForkError("the applied patches give another tree than the series")
