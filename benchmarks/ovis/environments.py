# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The two builds that are compared, each as a Python and folders in front of its path.

Both run on the same torch, Pillow and transformers, so that a difference is one of the
builds. The official release is its wheel, pinned by hash as for the fork itself,
unpacked into a folder that comes before the fork's environment.
"""

import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.ovis.records import Measurement, read_measurements

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "bench"


@dataclass(frozen=True)
class Environment:
    """One build.

    Attributes:
        side: "release" or "fork".
        python: Interpreter.
        path: Folders that come first on its module path.

    """

    side: str
    python: Path
    path: tuple[Path, ...] = ()

    def variables(self) -> dict[str, str]:
        """Environment variables of its processes.

        What a build compiles is kept apart from the other's.
        """
        given = os.environ.get("PYTHONPATH", "")
        folders = [*map(str, self.path), *filter(None, given.split(os.pathsep))]
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(folders),
            "VLLM_CACHE_ROOT": str(CACHE / f"cache-{self.side}"),
            "TORCHINDUCTOR_CACHE_DIR": str(CACHE / f"inductor-{self.side}"),
            "TRITON_CACHE_DIR": str(CACHE / f"triton-{self.side}"),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            # vLLM would keep nearly all memory of a CPU machine for its cache.
            "VLLM_CPU_KVCACHE_SPACE": "2",
        }

    def command(self, module: str, *arguments: str) -> list[str]:
        """Command line that runs a module, this repository's included."""
        return [str(self.python), "-m", module, *arguments]

    def measure(
        self,
        worker: str,
        arguments: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
    ) -> list[Measurement]:
        """Run a worker to its end; its output goes to a log beside the caches.

        Args:
            worker: Name of a module in `benchmarks.ovis.workers`.
            arguments: Its arguments, without the output file.
            variables: Further environment variables.

        Raises:
            RuntimeError: The worker failed; the message has the end of its log.

        """
        CACHE.mkdir(parents=True, exist_ok=True)
        log = CACHE / f"{self.side}-{worker}.log"
        with tempfile.TemporaryDirectory() as folder, log.open("w+") as stream:
            output = Path(folder) / "measurements.json"
            status = subprocess.run(
                self.command(
                    f"benchmarks.ovis.workers.{worker}", str(output), *arguments
                ),
                cwd=ROOT,
                env={**self.variables(), **(variables or {})},
                stdout=stream,
                stderr=subprocess.STDOUT,
            ).returncode
            if status or not output.exists():
                end = log.read_text(errors="replace")[-3000:]
                raise RuntimeError(
                    f"{worker} of the {self.side} ended with status {status}:\n{end}"
                )
            return read_measurements(output)


def unpack_release(device: str) -> Path:
    """Folder with the official release's package, fetched and unpacked once.

    Args:
        device: "cpu" or "cuda".

    Returns:
        A folder for the front of the module path.

    """
    from tools.forklib.basewheel import BaseWheel
    from tools.forklib.fetch import fetch
    from tools.forklib.pins import load_upstream

    upstream = load_upstream(ROOT / "series" / "upstream.toml")
    archive = upstream.wheel(device)
    folder = CACHE / f"release-{upstream.version}-{device}"
    done = folder / ".complete"
    if not done.exists():
        wheel = BaseWheel(fetch(archive, ROOT / ".cache" / "fork"))
        wheel.unpack_package(folder)
        done.touch()
    return folder
