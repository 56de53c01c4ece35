# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Upstream archives, fetched once through pip and verified by hash."""

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from .errors import ForkError
from .pins import Archive

# pip asks an sdist for its metadata even when it only downloads it, and vLLM's
# setup.py imports these. Its imports from torch need no torch to answer for a
# build without kernels, so that one is a stub and a fetch stays small.
BUILD_HELPERS = (
    "setuptools>=78.1.1,<81",
    "setuptools-scm>=8",
    "setuptools-rust>=1.9",
    "wheel",
    "packaging>=24.2",
    "jinja2",
)
TORCH_STUB = {
    "torch/__init__.py": "class version:\n    cuda = hip = xpu = None\n",
    "torch/utils/__init__.py": "",
    "torch/utils/cpp_extension.py": "CUDA_HOME = ROCM_HOME = None\n",
}


def sha256_of(path: Path) -> str:
    """Hash of a file's content as 64 hexadecimal digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def verify(path: Path, archive: Archive) -> None:
    """Compares a file with its pin.

    Raises:
        ForkError: If the hash differs; names the file, the pin and what was found.

    """
    found = sha256_of(path)
    if found != archive.sha256:
        raise ForkError(
            f"{path}: wrong content\n  expected sha256 {archive.sha256}\n"
            f"  found    sha256 {found}\n"
            "Delete the file to fetch it again, or correct series/upstream.toml."
        )


def fetch(archive: Archive, cache: Path) -> Path:
    """Path of a verified copy of `archive` in `cache`, fetched if it is missing.

    Raises:
        ForkError: If pip cannot fetch the file or its content is not the pinned one.

    """
    path = cache / archive.file
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        print(f"Fetching {archive.file} ...", flush=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            _download(archive, cache, Path(folder))
            fetched = Path(folder) / archive.file
            if not fetched.exists():
                others = ", ".join(sorted(p.name for p in Path(folder).iterdir()))
                raise ForkError(
                    f"pip fetched {others or 'nothing'} instead of {archive.file}"
                )
            verify(fetched, archive)
            os.replace(fetched, path)
        return path
    verify(path, archive)
    return path


def _download(archive: Archive, cache: Path, folder: Path) -> None:
    """Runs pip for one archive; the file lands in `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "-d", str(folder)]
    env = dict(os.environ)
    if archive.kind == "sdist":
        command += ["--no-binary", archive.project, "--no-build-isolation"]
        env |= {
            "PYTHONPATH": build_path(cache, with_stub=True),
            "VLLM_VERSION_OVERRIDE": archive.version,
            "VLLM_TARGET_DEVICE": "empty",
        }
    else:
        command += ["--only-binary", ":all:"]
    run_pip([*command, f"{archive.project}=={archive.version}"], env, archive.file)


def build_path(cache: Path, with_stub: bool) -> str:
    """PYTHONPATH under which vLLM's setup.py runs.

    Args:
        cache: Folder of upstream archives; the helpers are kept beside them.
        with_stub: Whether a stub stands for torch: right wherever no kernel is
            compiled.

    """
    helpers = cache / "helpers"
    done = helpers / ".complete"
    wanted = "\n".join((sys.version, *BUILD_HELPERS))
    if not done.exists() or done.read_text(encoding="utf-8") != wanted:
        run_pip(
            [
                *(sys.executable, "-m", "pip", "install", "--quiet", "--upgrade"),
                *("--target", str(helpers), *BUILD_HELPERS),
            ],
            dict(os.environ),
            "the helpers of vLLM's setup.py",
        )
        done.write_text(wanted, encoding="utf-8")
    if not with_stub:
        return str(helpers)
    stub = cache / "torch_stub"
    for name, text in TORCH_STUB.items():
        path = stub / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return os.pathsep.join((str(helpers), str(stub)))


def run_pip(command: list[str], env: dict[str, str], what: str) -> None:
    """Runs a pip command with its output shown.

    Raises:
        ForkError: If pip fails; `what` says what could not be had.

    """
    env.setdefault("PIP_DISABLE_PIP_VERSION_CHECK", "1")
    if subprocess.run(command, env=env).returncode != 0:
        raise ForkError(
            f"pip could not fetch {what} (its own message is above). Without a "
            "network, put the file into .cache/fork or name its folder in "
            "PIP_FIND_LINKS."
        )
