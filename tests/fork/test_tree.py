# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The tree, the patches and the checks of a small release."""

from pathlib import Path

import pytest

from tests.fork.small_fork import EDIT, UPSTREAM_FILES, Fork
from tools.forklib.basewheel import link_points
from tools.forklib.check import Checks, shared_lines
from tools.forklib.errors import ForkError
from tools.forklib.git import git
from tools.forklib.tree import make_tree, write_series


def test_tree_has_the_release_and_the_series(fork: Fork, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    assert make_tree(fork.root, tree, fork.cache) == 1
    subjects = git(tree, "log", "--format=%s").splitlines()
    assert subjects == ["[Model] Ovis", "vLLM 1.2.3 as released"]
    released = git(tree, "show", "upstream:vllm/models/old.py")
    assert released == UPSTREAM_FILES["vllm/models/old.py"]
    assert (tree / "vllm/models/old.py").read_text() == "WHO = 'fork'\n"
    assert '"Ovis": 3' in (tree / "vllm/models/registry.py").read_text()
    assert not (tree / "docs").exists()
    assert git(tree, "status", "--porcelain") == ""


def test_tree_refuses_a_full_folder(fork: Fork, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "file").write_text("")
    with pytest.raises(ForkError, match="not empty"):
        make_tree(fork.root, tmp_path / "tree", fork.cache)


def test_series_is_a_cover_letter_and_patches(fork: Fork, tmp_path: Path) -> None:
    out = tmp_path / "patches"
    assert write_series(fork.root, out, fork.cache) == 1
    cover, patch = sorted(out.iterdir())
    assert "Subject: [PATCH 0/1] Cover\n\nLetter.\n" in cover.read_text()
    assert '+    "Ovis": 3,' in patch.read_text()
    assert "Why." in patch.read_text()
    with pytest.raises(ForkError, match="holds patches already"):
        write_series(fork.root, out, fork.cache)


def test_moved_anchor_is_reported_with_its_line(fork: Fork, tmp_path: Path) -> None:
    fork.declare(EDIT.replace('"A": 1', '"A": 9'))
    with pytest.raises(ForkError, match=r"series/0001-ovis\.toml:5: .*not found"):
        make_tree(fork.root, tmp_path / "tree", fork.cache)


@pytest.fixture
def checks(fork: Fork, tmp_path: Path) -> Checks:
    return Checks(fork.root, "cpu", fork.cache, tmp_path)


def test_checks_pass_on_a_good_fork(checks: Checks) -> None:
    checks.archives()
    checks.ownership()
    checks.no_empty_commit()
    checks.syntax()
    checks.wheel_anchors()
    checks.applies("1.2.3")
    checks.originality()


def test_file_without_a_commit(fork: Fork, tmp_path: Path) -> None:
    fork.write("vllm/models/lost.py", "")
    with pytest.raises(ForkError, match=r"vllm/models/lost\.py: in no commit"):
        Checks(fork.root, "cpu", fork.cache, tmp_path).ownership()


def test_file_in_two_commits(fork: Fork, tmp_path: Path) -> None:
    text = 'title = "x"\nmessage = "y"\nfiles = ["*/old.py"]\n'
    fork.write("series/0002-more.toml", text)
    with pytest.raises(ForkError, match=r"old\.py: in series/0001.*, series/0002"):
        Checks(fork.root, "cpu", fork.cache, tmp_path).ownership()


def test_empty_commit(fork: Fork, tmp_path: Path) -> None:
    fork.write("series/0002-more.toml", 'title = "x"\nmessage = "y"\n')
    with pytest.raises(ForkError, match="0002-more.toml: no files and no edits"):
        Checks(fork.root, "cpu", fork.cache, tmp_path).no_empty_commit()


def test_glob_that_finds_nothing(fork: Fork, tmp_path: Path) -> None:
    text = 'title = "x"\nmessage = "y"\nfiles = ["vllm/gone/*"]\n'
    fork.write("series/0002-more.toml", text)
    with pytest.raises(ForkError, match=r"no file matches 'vllm/gone/\*'"):
        Checks(fork.root, "cpu", fork.cache, tmp_path).no_empty_commit()


def test_shared_lines() -> None:
    theirs = "# a comment both files may well have\nvalue = compute(something, 1)\n"
    ours = theirs + "other = entirely_of_our_own(2)\nx = 1\nimport something_long\n"
    assert shared_lines(ours, theirs) == (1, 2)
    assert shared_lines("x = 1\n", theirs) == (0, 0)


def test_copied_file_is_found(fork: Fork, tmp_path: Path) -> None:
    fork.write("vllm/models/old.py", UPSTREAM_FILES["vllm/models/old.py"] + "x = 1\n")
    checks = Checks(fork.root, "cpu", fork.cache, tmp_path)
    checks.applies("1.2.3")
    with pytest.raises(ForkError, match=r"old\.py: 8 of 8 lines are upstream's"):
        checks.originality()


def test_links_are_as_high_as_possible() -> None:
    upstream = ["vllm/__init__.py", "vllm/models/a.py"]
    ours = ["vllm/models/ovis/x.py", "vllm/models/ovis/t/y.py", "vllm/models/a.py"]
    assert link_points(ours, upstream) == ["vllm/models/a.py", "vllm/models/ovis"]
