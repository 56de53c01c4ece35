# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which device the fork is built or installed for."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from .errors import ForkError

DEVICES = ("cpu", "cuda")


def choose_device(asked: str | None, env: Mapping[str, str] = os.environ) -> str:
    """Picks the device asked for, else vLLM's own switch, else what is there.

    Args:
        asked: Value of --device, or None.
        env: Environment; VLLM_TARGET_DEVICE is the switch of vLLM's setup.py.

    Returns:
        "cpu" or "cuda".

    Raises:
        ForkError: If the device is neither "cpu" nor "cuda".

    """
    named = asked or env.get("VLLM_TARGET_DEVICE")
    if not named:
        return "cuda" if nvidia_gpu_present() else "cpu"
    if named not in DEVICES:
        source = "--device" if asked else "VLLM_TARGET_DEVICE"
        raise ForkError(f"{source} is {named!r}; allowed are {', '.join(DEVICES)}")
    return named


def nvidia_gpu_present() -> bool:
    """Whether this machine shows an NVIDIA GPU, asked without importing torch."""
    gpus = Path("/proc/driver/nvidia/gpus")
    if gpus.is_dir() and any(gpus.iterdir()):
        return True
    command = shutil.which("nvidia-smi")
    if command is None:
        return False
    listing = subprocess.run([command, "-L"], capture_output=True, text=True)
    return listing.returncode == 0 and "GPU " in listing.stdout
