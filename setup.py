# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Build script: pip turns this repository into the fork's wheel.

The device is the one of VLLM_TARGET_DEVICE (cpu or cuda), else cuda if there is an
NVIDIA GPU, else cpu. The work is done by tools/forklib; see docs/fork.md.
"""

import sys
from pathlib import Path

from setuptools import Command, setup

ROOT = Path(__file__).resolve().parent
CACHE = ROOT / ".cache" / "fork"
sys.path.insert(0, str(ROOT))

from tools.forklib.device import choose_device  # noqa: E402
from tools.forklib.errors import ForkError  # noqa: E402
from tools.forklib.metadata import dist_info_name  # noqa: E402
from tools.forklib.pins import load_upstream  # noqa: E402
from tools.forklib.wheel import build_wheel, wheel_info  # noqa: E402

DEVICE = choose_device(None)
VERSION = load_upstream(ROOT / "series" / "upstream.toml").fork_version(DEVICE)


class BuildWheel(Command):
    """Writes the wheel."""

    description = "write the fork's wheel"
    user_options = [
        ("dist-dir=", "d", "folder to write the wheel into"),
        ("dist-info-dir=", None, "ignored: the metadata is written anew"),
        ("compile", None, "compile vLLM's CUDA kernels"),
    ]
    boolean_options = ["compile"]

    def initialize_options(self) -> None:
        self.dist_dir = "dist"
        self.dist_info_dir = None
        self.compile = False

    def finalize_options(self) -> None:
        pass

    def run(self) -> None:
        out = Path(self.dist_dir)
        print(build_wheel(ROOT, DEVICE, out, CACHE, bool(self.compile)))


class DistInfo(Command):
    """Writes the metadata pip asks for before it builds."""

    description = "write the .dist-info folder"
    user_options = [
        ("output-dir=", "o", "folder to write into"),
        ("keep-egg-info", None, "leave an (empty) .egg-info folder, too"),
    ]
    boolean_options = ["keep-egg-info"]

    def initialize_options(self) -> None:
        self.output_dir = "."
        self.keep_egg_info = False

    def finalize_options(self) -> None:
        pass

    def run(self) -> None:
        folder = Path(self.output_dir) / dist_info_name(VERSION)
        for name, content in wheel_info(ROOT, DEVICE, CACHE).items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        if self.keep_egg_info:
            # setuptools' own build back end insists on finding one.
            Path(self.output_dir, "vllm.egg-info").mkdir()


class NoEggInfo(Command):
    """Stands for egg_info, which pip's first question runs: there is none."""

    description = "do nothing"
    user_options: list = []

    def initialize_options(self) -> None:
        pass

    def finalize_options(self) -> None:
        pass

    def run(self) -> None:
        pass


class NoEditable(NoEggInfo):
    """Refuses an editable installation, which could not hold the base wheel."""

    user_options = [
        ("dist-dir=", "d", "unused"),
        ("dist-info-dir=", None, "unused"),
    ]

    def initialize_options(self) -> None:
        self.dist_dir = self.dist_info_dir = None

    def run(self) -> None:
        raise ForkError("use 'tools/fork develop' in the place of 'pip install -e'")


setup(
    name="vllm",
    version=VERSION,
    packages=[],
    py_modules=[],
    cmdclass={
        "bdist_wheel": BuildWheel,
        "dist_info": DistInfo,
        "egg_info": NoEggInfo,
        "editable_wheel": NoEditable,
    },
)
