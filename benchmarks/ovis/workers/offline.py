# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Throughput of `LLM.generate` over different pictures, one token each.

python -m benchmarks.ovis.workers.offline OUTPUT CHECKPOINT WIDTH HEIGHT COUNT
"""

import time
from typing import Any

from benchmarks.ovis.pictures import make_pictures
from benchmarks.ovis.records import Measurement
from benchmarks.ovis.workers import run_worker

RUNS = 3


def start_engine(checkpoint: str, **arguments: Any) -> Any:
    """An engine on random weights that keeps nothing of earlier pictures."""
    from vllm import LLM

    return LLM(
        checkpoint,
        load_format="dummy",
        mm_processor_cache_gb=0,
        **{"max_model_len": 8192, **arguments},
    )


def generate(engine: Any, pictures: list[Any]) -> float:
    """Seconds to answer a question about each picture with one token."""
    from vllm import SamplingParams

    prompt = (
        "<|im_start|>user\n<image>\nWhat is this?<|im_end|>\n<|im_start|>assistant\n"
    )
    requests = [
        {"prompt": prompt, "multi_modal_data": {"image": picture}}
        for picture in pictures
    ]
    start = time.perf_counter()
    engine.generate(requests, SamplingParams(max_tokens=1, temperature=0))
    return time.perf_counter() - start


def throughput(
    engine: Any, size: tuple[int, int], count: int, floor: float | None = None
) -> Measurement:
    """Pictures a second, all different, also from run to run."""
    values = []
    for run in range(RUNS + 1):
        seconds = generate(engine, list(make_pictures(*size, count, seed=run)))
        if run:  # The first compiles and warms up.
            values.append(count / seconds)
    name = f"offline throughput: {size[0]}x{size[1]}, {count} images, 1 token"
    return Measurement(name, "images/s", values, floor)


def measure(checkpoint: str, width: str, height: str, count: str) -> list[Measurement]:
    """The one row."""
    engine = start_engine(checkpoint, dtype="float32")
    return [throughput(engine, (int(width), int(height)), int(count))]


if __name__ == "__main__":
    run_worker(measure)
