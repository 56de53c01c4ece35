# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""tools/fork wheel: the fork's wheel for the CPU and for CUDA."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path

from .basewheel import PACKAGE, BaseWheel, package_edits, package_files
from .errors import ForkError
from .fetch import build_path, fetch
from .metadata import VERSION_MODULE, fork_info, version_module
from .native import LIBRARY, build_library
from .pins import load_upstream
from .series import load_series
from .source import lay_series, unpack_sdist
from .wheelfile import write_wheel


def build_wheel(
    root: Path, device: str, out: Path, cache: Path, compile_kernels: bool = False
) -> Path:
    """Builds the fork's wheel.

    Args:
        root: The repository.
        device: "cpu" or "cuda".
        out: Folder to write the wheel into.
        cache: Folder of upstream archives.
        compile_kernels: CUDA only: compile vLLM's kernels instead of taking the
            official wheel's.

    Returns:
        Path of the wheel.

    Raises:
        ForkError: If an archive or anchor is not as it must be, or a build fails.

    """
    out.mkdir(parents=True, exist_ok=True)
    if compile_kernels and device != "cuda":
        raise ForkError("--compile builds CUDA kernels; it needs --device cuda")
    if compile_kernels:
        return _compile_cuda(root, out, cache)
    return (
        _cpu_wheel(root, out, cache)
        if device == "cpu"
        else (_cuda_wheel(root, out, cache))
    )


def wheel_info(root: Path, device: str, cache: Path) -> dict[str, bytes]:
    """Content of the wheel's .dist-info folder, RECORD aside, without building it."""
    upstream = load_upstream(root / "series" / "upstream.toml")
    base = BaseWheel(fetch(upstream.wheel(device), cache))
    return _info(root, base, upstream.fork_version(device), device)


def _info(root: Path, base: BaseWheel, version: str, device: str) -> dict[str, bytes]:
    description = (root / "README.md").read_text(encoding="utf-8")
    return fork_info(base, version, device, description)


def _library(root: Path, cache: Path) -> dict[str, bytes]:
    """Our compiled library as a member of the wheel, if it can be had."""
    path = build_library(root, cache)
    return {path: (root / path).read_bytes()} if path else {}


def _cpu_wheel(root: Path, out: Path, cache: Path) -> Path:
    """Our files laid over the CPU wheel.

    vLLM's own switch for ready-made kernels does not take the libraries of a CPU
    wheel, so there is no build to run.
    """
    upstream = load_upstream(root / "series" / "upstream.toml")
    series = load_series(root)
    base = BaseWheel(fetch(upstream.wheel("cpu"), cache))
    version = upstream.fork_version("cpu")
    members = {
        path: (root / path).read_bytes() for path in package_files(series.files(root))
    }
    for path, edits in package_edits(series.edits()).items():
        members[path] = base.edited(path, edits)
    members[VERSION_MODULE] = version_module(version).encode()
    members |= _library(root, cache)
    target = out / f"vllm-{version}-{base.tag}.whl"
    write_wheel(target, base, version, members, _info(root, base, version, "cpu"))
    return target


def _cuda_wheel(root: Path, out: Path, cache: Path) -> Path:
    """Runs vLLM's own build on the fork's tree, with the official wheel's kernels.

    That build reads its requirements for a device without kernels and names the
    interpreter in its tag; both are taken from the official wheel again, whose
    compiled members these are.
    """
    upstream = load_upstream(root / "series" / "upstream.toml")
    series = load_series(root)
    official = BaseWheel(fetch(upstream.wheel("cuda"), cache))
    version = upstream.fork_version("cuda")
    with tempfile.TemporaryDirectory(dir=cache, prefix="build-") as folder:
        built = BaseWheel(
            _run_upstream_build(
                root,
                Path(folder),
                cache,
                {
                    "VLLM_USE_PRECOMPILED": "1",
                    "VLLM_PRECOMPILED_WHEEL_LOCATION": str(official.path),
                    "VLLM_TARGET_DEVICE": "empty",
                    "VLLM_VERSION_OVERRIDE": version,
                    "PYTHONPATH": build_path(cache, with_stub=True),
                },
            )
        )
        ours = {
            *package_files(series.files(root)),
            *package_edits(series.edits()),
            VERSION_MODULE,
            LIBRARY,
        }
        _compare(built, official, ours)
        target = out / f"vllm-{version}-{official.tag}.whl"
        info = _info(root, official, version, "cuda")
        write_wheel(target, built, version, _library(root, cache), info)
    return target


def _compile_cuda(root: Path, out: Path, cache: Path) -> Path:
    """Runs vLLM's own build on the fork's tree; its CMake compiles the kernels."""
    _require_compilers()
    upstream = load_upstream(root / "series" / "upstream.toml")
    with tempfile.TemporaryDirectory(dir=cache, prefix="build-") as folder:
        built = _run_upstream_build(
            root,
            Path(folder),
            cache,
            {
                "VLLM_TARGET_DEVICE": "cuda",
                "VLLM_VERSION_OVERRIDE": upstream.fork_version("cuda"),
                "PYTHONPATH": build_path(cache, with_stub=False),
            },
        )
        return built.replace(out / built.name)


def _require_compilers() -> None:
    """Looks for what vLLM's CMake build cannot do without.

    Raises:
        ForkError: If something is missing; names all of it.

    """
    ask = [sys.executable, "-c", "import torch; print(torch.version.cuda or '')"]
    answer = subprocess.run(ask, capture_output=True, text=True)
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin", "nvcc")
    missing = []
    if answer.returncode or not answer.stdout.strip():
        missing.append(f"a CUDA build of torch beside {sys.executable}")
    if not shutil.which("nvcc") and not toolkit.exists():
        missing.append("nvcc on PATH or in CUDA_HOME")
    missing += [
        f"{name} on PATH"
        for name in ("cmake", "ninja", "g++", "git")
        if not shutil.which(name)
    ]
    if missing:
        raise ForkError(
            f"--compile needs {'; '.join(missing)} (see docs/installation.md)"
        )


def _run_upstream_build(
    root: Path, folder: Path, cache: Path, settings: dict[str, str]
) -> Path:
    """Runs vLLM's setup.py on the fork's tree below `folder`; returns the wheel."""
    upstream = load_upstream(root / "series" / "upstream.toml")
    tree = folder / "vllm"
    unpack_sdist(fetch(upstream.sdist(), cache), tree)
    lay_series(root, tree, load_series(root))
    print("Building with vLLM's setup.py (a minute or more) ...", flush=True)
    command = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "-v"]
    command += ["--no-build-isolation", "--wheel-dir", str(folder / "out")]
    env = {**os.environ, **settings}
    # cmake and ninja may be packages of the environment that is not activated.
    env["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), env["PATH"]))
    if subprocess.run(command, cwd=tree, env=env).returncode:
        raise ForkError("vLLM's own build failed (its messages are above)")
    wheels = list((folder / "out").glob("vllm-*.whl"))
    if len(wheels) != 1:
        raise ForkError(f"vLLM's own build gave {len(wheels)} wheels instead of one")
    return wheels[0]


def _compare(built: BaseWheel, official: BaseWheel, ours: Collection[str]) -> None:
    """Checks that apart from our files the built wheel is the official one.

    Raises:
        ForkError: If a member is missing, new or of other content.

    """

    def contents(wheel: BaseWheel) -> dict[str, int]:
        return {
            member.filename: member.CRC
            for member in wheel.zip.infolist()
            if member.filename.startswith(PACKAGE) and member.filename not in ours
        }

    left, right = contents(built), contents(official)
    wrong = sorted(
        path for path in {*left, *right} if left.get(path) != right.get(path)
    )
    if wrong:
        raise ForkError(
            f"{len(wrong)} members of the built wheel differ from "
            f"{official.path.name}: {', '.join(wrong[:5])}"
        )
