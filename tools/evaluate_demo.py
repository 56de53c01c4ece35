# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Measure the demo checkpoint on held-out pictures with the plain-torch reference.

    python tools/evaluate_demo.py [--count 250] [--dtype float32|bfloat16]

Draws the samples that ``demo/heldout.json`` names, answers them greedily, prints the
share of exact answers and fails if one is out of its bounds.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.reference.model import Reference  # noqa: E402
from tools.demo_data.scenes import make_sample  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--checkpoint", type=Path, default=ROOT / "demo/tiny-ovis2")
    parser.add_argument("--count", type=int, help="samples per check (default: all)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    args = parser.parse_args()

    plan = json.loads((ROOT / "demo/heldout.json").read_text("utf-8"))
    reference = Reference(args.checkpoint)
    reference.model.to(getattr(torch, args.dtype))
    seeds = range(*plan["seeds"])[: args.count]
    failed = False
    for check in plan["checks"]:
        wrong = []
        for seed in seeds:
            images, question, answer = make_sample(check["task"], seed)
            got = reference.answer(images, question, check["max_partition"])
            if got != answer:
                wrong.append(f"{seed}: {answer} read as {got}")
        share = 1 - len(wrong) / len(seeds)
        good = check.get("at_least", 0) <= share <= check.get("at_most", 1)
        failed |= not good
        name = f"{check['task']}, max_partition {check['max_partition']}"
        print(f"{name:30} {share:.3f} {'' if good else 'OUT OF BOUNDS'}", flush=True)
        if "at_least" in check and wrong:
            print("    " + "; ".join(wrong[:10]), flush=True)
    if failed:
        raise SystemExit("a score is out of its bounds")


if __name__ == "__main__":
    main()
