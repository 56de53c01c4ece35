# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Compare the engine with the plain-torch reference; see docs/numerics.md.

    python -m tools.numerics MODEL [--dtype float32 bfloat16 float16]
        [--device cpu|cuda] [--reports stages operators batches]
        [--json FILE] [--plot FILE]
    python -m tools.numerics MODEL --engine-arguments JSON [--dtype ...]
    python -m tools.numerics MODEL --batch-invariant --device cuda --dtype bfloat16
    python -m tools.numerics --tables docs/numerics.md

The exit status is 1 if anything is outside its bound or did not run.
"""

import argparse
import datetime
import json
import platform
import shlex
import sys
import traceback
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from . import engine

ROOT = Path(__file__).resolve().parents[2]
DTYPES = ("float32", "bfloat16", "float16")
REPORTS = ("stages", "operators", "batches", "options")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.numerics",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", nargs="?", help="folder in the authors' layout")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["float32"])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--reports",
        nargs="+",
        choices=REPORTS,
        metavar="REPORT",
        help=f"of {', '.join(REPORTS)}; default: stages, or options with arguments",
    )
    parser.add_argument(
        "--engine-arguments",
        type=engine.arguments,
        metavar="JSON",
        help="of vllm.LLM; report options: the engine with and without them",
    )
    parser.add_argument(
        "--batch-invariant",
        action="store_true",
        help="only this: vLLM's batch-invariant mode (GPU) must be bitwise equal",
    )
    parser.add_argument("--json", type=Path, help="write the report to this file")
    parser.add_argument("--plot", type=Path, help="draw the errors to this SVG file")
    parser.add_argument(
        "--tables", type=Path, metavar="DOCUMENT", help="put reports into their places"
    )
    parsed = parser.parse_args(arguments)
    has_arguments = parsed.engine_arguments is not None
    parsed.reports = parsed.reports or ["options" if has_arguments else "stages"]
    if ("options" in parsed.reports) != has_arguments:
        parser.error("the report options and --engine-arguments need each other")
    if (parsed.model is None) == (parsed.tables is None):
        parser.error("give either a MODEL folder or --tables DOCUMENT")
    if parsed.batch_invariant and parsed.device != "cuda":
        parser.error("vLLM has a batch-invariant mode on GPUs only: add --device cuda")
    if parsed.plot and "stages" not in parsed.reports:
        parser.error("--plot draws the report stages, which --reports leaves out")
    return parsed


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    parsed = parse(arguments)
    from .tables import fill_places, report_tables

    if parsed.tables:
        parsed.tables.write_text(fill_places(parsed.tables, ROOT), "utf-8")
        return 0
    engine.prepare_environment(parsed.batch_invariant)
    from .records import bad

    report = description(parsed)
    found = []
    for record in run(parsed, report["engines"]):
        found.append(record)
        print(record.verdict, record.report, record.dtype, record.name, flush=True)
        report["records"].append(record.to_json())
        if parsed.json:
            # After each line, so that a run that is stopped leaves what it measured.
            parsed.json.parent.mkdir(parents=True, exist_ok=True)
            parsed.json.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    print("\n" + report_tables(report))
    if parsed.plot:
        from .plot import svg

        title = f"{parsed.model}, {report['device']}: error relative to the reference"
        parsed.plot.parent.mkdir(parents=True, exist_ok=True)
        parsed.plot.write_text(svg(report["records"], title), "utf-8")
    return 1 if bad(found) else 0


def description(parsed: argparse.Namespace) -> dict[str, Any]:
    """What a report says beside its records.

    The command is told without where the results were written.
    """
    import torch
    import transformers

    import vllm

    if parsed.device == "cuda":
        device = torch.cuda.get_device_name()
    else:
        device = (
            f"CPU ({platform.machine()}, {torch.backends.cpu.get_cpu_capability()})"
        )
    words = ["python", "-m", "tools.numerics", parsed.model]
    words += ["--device", parsed.device, "--dtype", *parsed.dtype]
    if parsed.batch_invariant:
        words.append("--batch-invariant")
    else:
        words += ["--reports", *parsed.reports]
    if parsed.engine_arguments is not None:
        words += ["--engine-arguments", json.dumps(parsed.engine_arguments)]
    return {
        "command": shlex.join(words),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": device,
        "versions": {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "engines": [],
        "records": [],
    }


def run(parsed: argparse.Namespace, engines: list[dict[str, str]]) -> Iterator[Any]:
    """Make all reports that were asked for, dtype by dtype.

    Args:
        parsed: The command line.
        engines: Filled with the attention back ends of each stage engine.

    """
    import torch

    from . import batches, operators, options, reference, stages
    from .records import FAILED, Record

    wanted = ["batches"] if parsed.batch_invariant else parsed.reports
    # Ways of running are compared with each other. In batch-invariant mode nothing may
    # run on the GPU before the engine, which sets up its libraries at their first use.
    loaded: Any = None
    if wanted != ["batches"]:
        loaded = reference.load(parsed.model, parsed.device)
    for dtype in parsed.dtype:
        place = (parsed.model, dtype, parsed.device)
        if loaded:
            model = reference.in_dtype(loaded.model, getattr(torch, dtype))
            measure_stages = partial(stages.records, loaded, model, *place, engines)
        for name in wanted:
            try:
                if name == "stages":
                    yield from measure_stages()
                elif name == "operators":
                    yield from operators.records(loaded, model, *place)
                elif name == "options":
                    yield from options.records(measure_stages, parsed.engine_arguments)
                else:
                    yield from batches.records(*place, parsed.batch_invariant)
            except Exception as error:
                traceback.print_exc()
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
                yield Record(name, dtype, "all", FAILED, case=reason)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
