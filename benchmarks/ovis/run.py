# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Measure the official release and the fork on this machine and compare them.

    python -m benchmarks.ovis.run cpu
    python -m benchmarks.ovis.run gpu

fetches the release (pinned by hash) and compares it with the fork in the environment of
this Python. Elsewhere both may be named:

    python -m benchmarks.ovis.run gpu --release-path DIR --fork-path DIR

with folders that hold each build's packages. Prints a table and keeps it as JSON; rows
that were not measured again stay as they were in that file.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.ovis.checkpoint import CONFIG, small_config, write_checkpoint
from benchmarks.ovis.environments import (
    CACHE,
    ROOT,
    Environment,
    unpack_release,
)
from benchmarks.ovis.records import (
    SIDES,
    Measurement,
    beside_release,
    merge,
    read_results,
    table,
    with_label,
    write_results,
)
from benchmarks.ovis.workers.serve import Settings

TOKENIZER = ROOT / "tests" / "golden" / "ovis2" / "checkpoints" / "tiny-ovis2"
RESULTS = ROOT / "benchmarks" / "ovis" / "results"
SIZE = (1920, 1080)
API_PROCESSES = 4

Section = Callable[[Environment, dict[str, Any]], list[Measurement]]


def small_checkpoint() -> str:
    """Folder of the checkpoint that a CPU serves."""
    folder = CACHE / "small"
    write_checkpoint(TOKENIZER, folder, small_config())
    return str(folder)


def full_checkpoint() -> str:
    """Folder of the checkpoint with the sizes of Ovis2-2B."""
    folder = CACHE / "ovis2-2b"
    write_checkpoint(TOKENIZER, folder, CONFIG)
    return str(folder)


def prepare(build: Environment, arguments: dict[str, Any]) -> list[Measurement]:
    return build.measure("prepare", variables={"OMP_NUM_THREADS": "1"})


def frontend(build: Environment, arguments: dict[str, Any]) -> list[Measurement]:
    return build.measure("frontend", [small_checkpoint(), *map(str, SIZE)])


def cpu_offline(build: Environment, arguments: dict[str, Any]) -> list[Measurement]:
    return build.measure("offline", [small_checkpoint(), *map(str, SIZE), "16"])


def cpu_server(build: Environment, arguments: dict[str, Any]) -> list[Measurement]:
    settings = Settings(
        checkpoint=small_checkpoint(),
        size=SIZE,
        requests={1: 12, 8: 40},
        output_tokens=4,
        arguments=["--dtype", "float32", *as_options(arguments)],
    )
    return build.measure("serve", [settings.dump()])


def gpu_encode(build: Environment, arguments: dict[str, Any]) -> list[Measurement]:
    return build.measure("encode", [full_checkpoint(), json.dumps(arguments)])


def gpu_settings(requests: dict[int, int], arguments: dict[str, Any]) -> Settings:
    return Settings(
        checkpoint=full_checkpoint(),
        size=SIZE,
        requests=requests,
        output_tokens=16,
        arguments=["--dtype", "bfloat16", *as_options(arguments)],
    )


def gpu_server(build: Environment, arguments: dict[str, Any]) -> list[Measurement]:
    settings = gpu_settings({1: 24, 8: 64, 32: 160, 64: 256}, arguments)
    return build.measure("serve", [settings.dump()])


def gpu_processes(build: Environment, arguments: dict[str, Any]) -> list[Measurement]:
    arguments = {"api_server_count": API_PROCESSES, **arguments}
    settings = gpu_settings({32: 160, 64: 256}, arguments)
    return [
        replace(row, name=with_label(row.name, f"{API_PROCESSES} API processes"))
        for row in build.measure("serve", [settings.dump()])
    ]


# An engine comes before the front end: what vLLM keeps of a build between starts is
# made at the first one.
SECTIONS: dict[str, dict[str, Section]] = {
    "cpu": {
        "prepare": prepare,
        "offline": cpu_offline,
        "frontend": frontend,
        "server": cpu_server,
    },
    "gpu": {
        "prepare": prepare,
        "encode": gpu_encode,
        "frontend": frontend,
        "server": gpu_server,
        "processes": gpu_processes,
    },
}


def as_options(arguments: dict[str, Any]) -> list[str]:
    """Arguments of an engine as options of `vllm serve`."""
    options = []
    for name, value in arguments.items():
        text = value if isinstance(value, str) else json.dumps(value)
        options += [f"--{name.replace('_', '-')}", text]
    return options


def describe(build: Environment) -> dict[str, Any]:
    """What a build runs on."""
    output = subprocess.run(
        build.command("benchmarks.ovis.machine"),
        cwd=ROOT,
        env=build.variables(),
        stdout=subprocess.PIPE,
        check=True,
    ).stdout
    return json.loads(output.splitlines()[-1])


def results_file(kind: str, machine: dict[str, Any]) -> Path:
    """Where results are kept: "cpu", or the short name of the GPU."""
    name = machine["gpus"][0].split()[-1].lower() if kind == "gpu" else kind
    return RESULTS / f"{name}.json"


def parse(command_line: Sequence[str] | None = None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=SECTIONS)
    for side in SIDES:
        parser.add_argument(f"--{side}", type=Path, metavar="PYTHON")
        parser.add_argument(
            f"--{side}-path", type=Path, nargs="+", default=[], metavar="DIR"
        )
    parser.add_argument(
        "--fork-arguments",
        type=json.loads,
        default={},
        metavar="JSON",
        help="engine arguments of the fork alone, to measure an option",
    )
    parser.add_argument(
        "--label",
        help="measure the fork alone, in rows with this name beside the release's kept",
    )
    parser.add_argument("--only", metavar="SECTION,...", help="default: all sections")
    parser.add_argument("--output", type=Path, metavar="JSON")
    options = parser.parse_args(command_line)
    known = list(SECTIONS[options.kind])
    options.only = options.only.split(",") if options.only else known
    if unknown := set(options.only) - set(known):
        parser.error(f"no section {sorted(unknown)}, there are {known}")
    return options


def environments(options: argparse.Namespace) -> list[Environment]:
    """The two builds, the release fetched unless it is named."""
    release_path = options.release_path
    if not release_path and not options.release:
        release_path = [unpack_release("cpu" if options.kind == "cpu" else "cuda")]
    # The interpreter's path as it is: resolved, a virtual environment would be lost.
    here = Path(sys.executable)
    return [
        Environment("release", options.release or here, tuple(release_path)),
        Environment("fork", options.fork or here, tuple(options.fork_path)),
    ]


def main() -> bool:
    """Run the sections, one build after the other; returns whether one failed."""
    options = parse()
    builds = environments(options)
    described = {build.side: describe(build) for build in builds}
    about = described["fork"] | {
        side: machine["vllm"] for side, machine in described.items()
    }
    if options.kind == "gpu" and not about["gpus"]:
        sys.exit("the fork's environment sees no NVIDIA GPU; measure 'cpu' instead")
    output = options.output or results_file(options.kind, about)
    rows, failed = {}, False
    if output.exists():
        rows = {row.name: row for row in read_results(output)[1]}
    for section in options.only:
        measure = SECTIONS[options.kind][section]
        found: dict[str, list[Measurement]] = {}
        for build in builds[1:] if options.label else builds:
            start = time.perf_counter()
            arguments = options.fork_arguments if build.side == "fork" else {}
            try:
                found[build.side] = measure(build, arguments)
            except RuntimeError as error:
                # What the other build does is still worth knowing.
                print(f"{section} of the {build.side} failed: {error}", flush=True)
                failed = True
                continue
            seconds = time.perf_counter() - start
            print(f"{section} of the {build.side}: {seconds:.0f} s", flush=True)
        measured = merge(found)
        if options.label:
            measured = [
                beside_release(row, rows.get(row.name), options.label)
                for row in measured
            ]
        rows |= {row.name: row for row in measured}
        print(table(measured), flush=True)
        write_results(output, about, rows.values())
    print(f"kept in {output}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
