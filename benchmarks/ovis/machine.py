# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What figures were measured on.

python -m benchmarks.ovis.machine        prints it as JSON
"""

import datetime
import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "torchvision", "pillow", "transformers", "triton")


def describe() -> dict[str, Any]:
    """Processor, GPUs, versions, date, and how busy others kept the machine."""
    import torch

    import vllm

    # Read once before anything is timed, so that no build finds its files cold.
    import vllm.renderers

    gpus = []
    if torch.cuda.is_available():
        gpus = [
            torch.cuda.get_device_name(index)
            for index in range(torch.cuda.device_count())
        ]
    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "gpus": gpus,
        "python": platform.python_version(),
        "vllm": vllm.__version__,
        **{name: found for name in PACKAGES if (found := installed(name))},
        "load": round(os.getloadavg()[0], 1),
        "date": datetime.date.today().isoformat(),
    }


def processor() -> str:
    """Model name of the processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def installed(name: str) -> str | None:
    """Version of a package, None if it is missing."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    print(json.dumps(describe()))
