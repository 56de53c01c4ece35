# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The commands of tools/fork."""

import argparse
import sys
from pathlib import Path

from .check import run_checks
from .develop import active_environment, develop
from .device import DEVICES, choose_device
from .errors import ForkError
from .tree import make_tree, write_series
from .wheel import build_wheel

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "fork"


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    args = _parser().parse_args(arguments)
    try:
        return args.run(args)
    except ForkError as error:
        print(f"tools/fork: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tools/fork", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser(
        "develop", help="install the fork into the active environment, files live"
    )
    command.add_argument("--device", choices=DEVICES, help="default: what is there")
    command.set_defaults(run=_develop)

    command = commands.add_parser("wheel", help="write the fork's wheel")
    command.add_argument("--device", choices=DEVICES, help="default: what is there")
    command.add_argument("--out", type=Path, default=Path("dist"))
    command.add_argument(
        "--compile", action="store_true", help="compile vLLM's CUDA kernels"
    )
    command.set_defaults(run=_wheel)

    command = commands.add_parser(
        "tree", help="write upstream's source with one git commit per commit"
    )
    command.add_argument("folder", type=Path, help="missing or empty")
    command.add_argument("--base", metavar="VERSION", help="upstream version")
    command.set_defaults(run=_tree)

    command = commands.add_parser(
        "series", help="write the patches for upstream and prove that they apply"
    )
    command.add_argument("--out", type=Path, default=Path("build/series"))
    command.add_argument("--base", metavar="VERSION", help="upstream version")
    command.set_defaults(run=_series)

    command = commands.add_parser("check", help="check everything, a line for each")
    command.add_argument("--device", choices=DEVICES, help="default: what is there")
    command.set_defaults(run=_check)

    command = commands.add_parser("device", help="print the device found: cpu or cuda")
    command.set_defaults(run=_device)
    return parser


def _develop(args: argparse.Namespace) -> int:
    device = choose_device(args.device)
    print(develop(ROOT, device, active_environment(), CACHE))
    return 0


def _device(args: argparse.Namespace) -> int:
    print(choose_device(None))
    return 0


def _wheel(args: argparse.Namespace) -> int:
    device = choose_device(args.device)
    print(build_wheel(ROOT, device, args.out, CACHE, args.compile))
    return 0


def _tree(args: argparse.Namespace) -> int:
    count = make_tree(ROOT, args.folder, CACHE, args.base)
    print(f"{args.folder}: the release and {count} commits on branch ovis")
    return 0


def _series(args: argparse.Namespace) -> int:
    count = write_series(ROOT, args.out, CACHE, args.base)
    print(f"{args.out}: {count} patches and a cover letter; they apply with git am")
    return 0


def _check(args: argparse.Namespace) -> int:
    return 1 if run_checks(ROOT, choose_device(args.device), CACHE) else 0
