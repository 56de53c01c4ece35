# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""tools/fork develop on a small release."""

import csv
import importlib.metadata
from pathlib import Path

import pytest

from tests.fork.small_fork import EDIT, UPSTREAM_FILES, Fork
from tools.forklib.develop import develop
from tools.forklib.errors import ForkError


def run(fork: Fork) -> str:
    return develop(fork.root, "cpu", fork.env, fork.cache)


def registry(fork: Fork) -> str:
    return fork.installed("vllm/models/registry.py").read_text()


def snapshot(fork: Fork) -> dict[Path, tuple[int, int]]:
    """Inode and time of change of what upstream's package holds."""
    paths = [p for p in fork.installed("vllm").rglob("*") if p.is_file()]
    kept = [p for p in paths if p.name != "_version.py"]
    return {p: (p.lstat().st_ino, p.lstat().st_mtime_ns) for p in kept}


def test_installs_links_and_edits(fork: Fork) -> None:
    run(fork)
    package = fork.installed("vllm/models/ovis")
    assert package.is_symlink() and package.resolve() == (
        fork.root / "vllm/models/ovis"
    )
    assert fork.installed("vllm/models/old.py").read_text() == "WHO = 'fork'\n"
    assert '    "A": 1,\n    "Ovis": 3,\n' in registry(fork)
    assert "1.2.3+ovis.4.cpu" in fork.installed("vllm/_version.py").read_text()
    assert not fork.installed("docs").exists()
    command = fork.env.scripts / "vllm"
    assert command.read_text().startswith("#!/python\n")
    assert command.stat().st_mode & 0o111


def test_distribution_is_named_vllm(fork: Fork) -> None:
    run(fork)
    (found,) = importlib.metadata.distributions(name="vllm", path=[str(fork.env.site)])
    assert found.version == "1.2.3+ovis.4.cpu"
    (point,) = found.entry_points.select(group="console_scripts")
    assert point.name == "vllm"


def test_record_names_what_is_there(fork: Fork) -> None:
    run(fork)
    record = fork.installed("vllm-1.2.3+ovis.4.cpu.dist-info/RECORD")
    with record.open(newline="") as stream:
        rows = {path: digest for path, digest, _ in csv.reader(stream)}
    for path in rows:
        assert fork.installed(path).exists(), path
    assert set(UPSTREAM_FILES) <= set(rows)
    # An uninstaller that reads this removes the link, never the repository's files.
    assert rows["vllm/models/ovis"] == ""
    assert not any(path.startswith("vllm/models/ovis/") for path in rows)


def test_second_run_changes_nothing(fork: Fork) -> None:
    run(fork)
    before = snapshot(fork)
    assert "up to date" in run(fork)
    assert snapshot(fork) == before


def test_edit_of_our_file_is_live(fork: Fork) -> None:
    run(fork)
    fork.write("vllm/models/ovis/__init__.py", "WHO = 'changed'\n")
    fork.write("vllm/models/ovis/towers/new.py", "")
    assert "changed" in fork.installed("vllm/models/ovis/__init__.py").read_text()
    assert fork.installed("vllm/models/ovis/towers/new.py").exists()


def test_changed_declaration_starts_from_the_release(fork: Fork) -> None:
    run(fork)
    fork.declare(EDIT.replace("3", "5"))
    assert "1 links and edited files" in run(fork)
    assert '"Ovis": 5' in registry(fork) and '"Ovis": 3' not in registry(fork)


def test_dropped_edit_and_file_are_undone(fork: Fork) -> None:
    run(fork)
    fork.declare("")
    (fork.root / "vllm/models/old.py").unlink()
    run(fork)
    assert registry(fork) == UPSTREAM_FILES["vllm/models/registry.py"]
    old = fork.installed("vllm/models/old.py")
    assert old.read_text() == UPSTREAM_FILES["vllm/models/old.py"]
    assert not old.is_symlink()


def test_bad_anchor_leaves_the_environment_alone(fork: Fork) -> None:
    run(fork)
    before = snapshot(fork)
    fork.declare(EDIT.replace('"A"', '"Z"'))
    with pytest.raises(ForkError, match=r"series/0001-ovis\.toml:5"):
        run(fork)
    assert snapshot(fork) == before


def test_edit_of_an_unknown_file(fork: Fork) -> None:
    fork.declare(EDIT.replace("registry.py", "nowhere.py"))
    with pytest.raises(ForkError, match=r"0001-ovis\.toml:5: .*nowhere\.py is not in"):
        run(fork)
