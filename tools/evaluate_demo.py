# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Measure the demo checkpoint on held-out pictures.

    python tools/evaluate_demo.py [--count 250] [--dtype float32|bfloat16]
        [--engine-arguments JSON]

Draws the samples that ``demo/heldout.json`` names, answers them greedily, prints the
share of exact answers and fails if one is out of its bounds. The plain-torch reference
answers, or with ``--engine-arguments`` (``{}``: as it starts) the engine.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.reference.model import Reference  # noqa: E402
from tools.demo_data.scenes import make_sample  # noqa: E402
from tools.numerics import engine  # noqa: E402
from tools.numerics.reference import layout  # noqa: E402

MOST_TOKENS = 32
"""Of an answer; the longest right one is shorter."""

Question = tuple[list[Image.Image], str]
Answerer = Callable[[list[Question], int], list[str]]
"""Answers questions about pictures, given max_partition."""


@contextmanager
def reference_answerer(checkpoint: Path, dtype: str) -> Iterator[Answerer]:
    """The plain-torch reference."""
    reference = Reference(checkpoint)
    reference.model.to(getattr(torch, dtype))
    yield lambda questions, max_partition: [
        reference.answer(images, question, max_partition, MOST_TOKENS)
        for images, question in questions
    ]


@contextmanager
def engine_answerer(
    checkpoint: Path, dtype: str, arguments: dict[str, Any]
) -> Iterator[Answerer]:
    """The engine on this machine's device."""
    engine.prepare_environment(batch_invariant=False)
    from vllm import SamplingParams

    device = "cuda" if torch.cuda.is_available() else "cpu"
    format_prompt = layout(str(checkpoint)).format
    sampling = SamplingParams(temperature=0, max_tokens=MOST_TOKENS)
    with engine.started(str(checkpoint), dtype, device, **arguments) as llm:

        def answer(questions: list[Question], max_partition: int) -> list[str]:
            requests: Any = [
                {
                    "prompt": format_prompt("<image>\n" * len(images) + question),
                    "multi_modal_data": {"image": images},
                    "mm_processor_kwargs": {"max_partition": max_partition},
                }
                for images, question in questions
            ]
            outputs = llm.generate(requests, sampling, use_tqdm=False)
            return [output.outputs[0].text for output in outputs]

        yield answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--checkpoint", type=Path, default=ROOT / "demo/tiny-ovis2")
    parser.add_argument("--count", type=int, help="samples per check (default: all)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument(
        "--engine-arguments",
        type=engine.arguments,
        metavar="JSON",
        help="of vllm.LLM: measure the engine instead of the reference",
    )
    args = parser.parse_args()
    if args.engine_arguments is None:
        answerer = reference_answerer(args.checkpoint, args.dtype)
    else:
        answerer = engine_answerer(args.checkpoint, args.dtype, args.engine_arguments)

    plan = json.loads((ROOT / "demo/heldout.json").read_text("utf-8"))
    with answerer as answer:
        seeds = range(*plan["seeds"])[: args.count]
        good = [check_is_met(check, seeds, answer) for check in plan["checks"]]
    if not all(good):
        raise SystemExit("a score is out of its bounds")


def check_is_met(check: dict[str, Any], seeds: range, answer: Answerer) -> bool:
    """Measure one line of the plan, print its score and some wrong answers."""
    samples = [make_sample(check["task"], seed) for seed in seeds]
    questions = [(images, question) for images, question, _ in samples]
    answers = answer(questions, check["max_partition"])
    wrong = [
        f"{seed}: {expected} read as {got}"
        for seed, (_, _, expected), got in zip(seeds, samples, answers, strict=True)
        if got != expected
    ]
    share = 1 - len(wrong) / len(seeds)
    good = check.get("at_least", 0) <= share <= check.get("at_most", 1)
    name = f"{check['task']}, max_partition {check['max_partition']}"
    print(f"{name:30} {share:.3f} {'' if good else 'OUT OF BOUNDS'}", flush=True)
    if "at_least" in check and wrong:
        print("    " + "; ".join(wrong[:10]), flush=True)
    return good


if __name__ == "__main__":
    main()
