# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Build the tiler library: `python csrc/ovis/build.py [DIRECTORY]`.

With CMake where it is installed, else with one call of the compiler, so that a machine
needs no more than a C++17 compiler. The default directory is that of the Python module
which loads the library.
"""

import argparse
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

LIBRARY = "libovis_tiler.so"
FUZZER = "ovis_tiler_fuzzer"
_SOURCE = Path(__file__).resolve().parent
_PACKAGE = _SOURCE.parents[1] / "vllm" / "models" / "ovis"

# The same as in cmake/ovis.cmake, where the reasons are.
_FLAGS = (
    *("-std=c++17", "-O3", "-DNDEBUG", "-ffp-contract=off"),
    *("-fPIC", "-fvisibility=hidden", "-shared", "-pthread"),
    *("-static-libstdc++", "-static-libgcc", "-Wl,--exclude-libs,ALL"),
)


def compiler_command(output: Path) -> list[str]:
    """The call that compiles the library without CMake."""
    compiler = os.environ.get("CXX", "g++").split()
    sources = sorted(str(path) for path in _SOURCE.glob("*.cpp"))
    return [*compiler, *_FLAGS, *sources, "-o", str(output)]


def fuzzer_command(output: Path) -> list[str]:
    """The call that compiles the fuzzer, with sanitizers."""
    compiler = os.environ.get("CXX", "g++").split()
    sources = sorted(str(path) for path in _SOURCE.glob("*.cpp"))
    sources.append(str(_SOURCE / "fuzz" / "fuzz.cpp"))
    flags = ("-std=c++17", "-O1", "-g", "-ffp-contract=off", "-pthread")
    sanitizers = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    return [*compiler, *flags, *sanitizers, *sources, "-o", str(output)]


def cmake_commands(build: Path) -> list[list[str]]:
    """The calls that compile the library in a build directory with CMake."""
    return [
        ["cmake", "-S", str(_SOURCE), "-B", str(build)],
        ["cmake", "--build", str(build), "--parallel"],
    ]


def build(directory: Path = _PACKAGE, use_cmake: bool | None = None) -> Path:
    """Build the library into a directory.

    Args:
        directory: Where the library goes; made if it does not exist.
        use_cmake: True or False to decide, None to use CMake if it is there.

    Returns:
        Path of the library.

    Raises:
        OSError: There is no compiler.
        subprocess.CalledProcessError: Compilation failed.

    """
    if use_cmake is None:
        use_cmake = shutil.which("cmake") is not None
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        built = Path(scratch) / LIBRARY
        commands = (
            cmake_commands(Path(scratch)) if use_cmake else [compiler_command(built)]
        )
        for command in commands:
            subprocess.run(command, check=True)
        # Moved into place in one step: a running process may have the old one mapped.
        fresh = directory / f".{LIBRARY}.{os.getpid()}"
        shutil.copy(built, fresh)
        target = directory / LIBRARY
        os.replace(fresh, target)
    return target


def build_fuzzer(directory: Path) -> Path:
    """Build the fuzzer into a directory and return its path."""
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / FUZZER
    subprocess.run(fuzzer_command(target), check=True)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", nargs="?", type=Path, default=_PACKAGE)
    parser.add_argument(
        "--no-cmake", action="store_true", help="call the compiler, even with CMake"
    )
    parser.add_argument(
        "--fuzzer", action="store_true", help="build the fuzzer instead"
    )
    arguments = parser.parse_args()
    if arguments.fuzzer:
        print(build_fuzzer(arguments.directory))
        return
    print(build(arguments.directory, False if arguments.no_cmake else None))


if __name__ == "__main__":
    main()
