# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Our own compiled library: the tiler, a plain C library that Python loads."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from .errors import ForkError
from .series import list_files

LIBRARY = "vllm/models/ovis/libovis_tiler.so"
_BUILD = "csrc/ovis/build.py"
_STAMP = "tiler.sha256"


def build_library(root: Path, cache: Path) -> str | None:
    """Compiles the tiler into our package if it is missing or its source changed.

    Args:
        root: The repository.
        cache: Folder that remembers which source was compiled.

    Returns:
        Its path relative to `root`; None if there is no source or no compiler, in
        which case images take the slower path of the same result.

    Raises:
        ForkError: If compilation fails.

    """
    if not (root / _BUILD).exists():
        return None
    digest = _source_digest(root)
    stamp = cache / _STAMP
    current = stamp.read_text(encoding="utf-8") if stamp.exists() else ""
    if current == digest and (root / LIBRARY).exists():
        return LIBRARY
    if not shutil.which(os.environ.get("CXX", "g++").split()[0]):
        print("No C++ compiler is here: images are resized by Pillow, more slowly")
        return None
    print("Compiling the tiler ...", flush=True)
    done = subprocess.run(
        [sys.executable, str(root / _BUILD)], capture_output=True, text=True
    )
    if done.returncode:
        raise ForkError(f"{_BUILD} failed:\n{done.stdout}{done.stderr}")
    cache.mkdir(parents=True, exist_ok=True)
    stamp.write_text(digest, encoding="utf-8")
    return LIBRARY


def _source_digest(root: Path) -> str:
    digest = hashlib.sha256()
    for path in list_files(root, ("csrc", "cmake")):
        digest.update(path.encode() + b"\0" + (root / path).read_bytes() + b"\0")
    return digest.hexdigest()
