# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Time of the vision encode inside the installed vLLM, stock or fork, on one GPU.

The model's `embed_multimodal` is called again with what the engine itself passed to it,
so nothing here depends on whose model it is. Medians over CUDA events; memory is the
peak beyond what was held before the call.

    python benchmarks/ovis/encode.py CHECKPOINT [--eager] [--json FILE]
"""

import argparse
import json
import os
import statistics
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

RUNS, WARM_UP = 20, 5

# Picture sizes whose grid at max_partition 9 has the named number of tiles in all.
PICTURES = {1: [(448, 448)], 10: [(1344, 1344)], 40: [(1344, 1344)] * 4}


def record_inputs(model: Any) -> None:
    """Keep the arguments of the engine's last call of `embed_multimodal`."""
    original = model.embed_multimodal

    def recording(**kwargs: Any) -> Any:
        model.recorded = kwargs
        return original(**kwargs)

    model.embed_multimodal = recording
    model.original_embed_multimodal = original


def measure(model: Any) -> dict[str, Any]:
    """Repeat the recorded call.

    Returns:
        Median and spread in milliseconds, peak extra memory in MB, tokens of output.

    """
    import torch

    times = []
    with torch.inference_mode():
        for _ in range(WARM_UP):
            output = model.original_embed_multimodal(**model.recorded)
        tokens = sum(item.shape[0] for item in output)
        del output
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(RUNS):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            model.original_embed_multimodal(**model.recorded)
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop))
        peak = torch.cuda.max_memory_allocated() - held
    times.sort()
    return {
        "median_ms": statistics.median(times),
        "low_ms": times[0],
        "high_ms": times[-1],
        "extra_mb": peak / 2**20,
        "tokens": tokens,
        "runs": RUNS,
    }


def main() -> None:
    """Run all sizes and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint")
    parser.add_argument("--eager", action="store_true", help="start with enforce_eager")
    parser.add_argument("--json", help="also write the table to this file")
    arguments = parser.parse_args()

    from PIL import Image

    import vllm
    from vllm import LLM, SamplingParams

    llm = LLM(
        arguments.checkpoint,
        load_format="dummy",
        dtype="bfloat16",
        enforce_eager=arguments.eager,
        max_model_len=16384,
        max_num_batched_tokens=16384,
        limit_mm_per_prompt={"image": 4},
        gpu_memory_utilization=0.5,
    )
    llm.apply_model(record_inputs)
    table = []
    for tiles, sizes in PICTURES.items():
        # Noise: no picture equals one that a cache holds.
        pictures = [Image.effect_noise(size, 80).convert("RGB") for size in sizes]
        prompt = "<|im_start|>user\n" + "<image>\n" * len(sizes) + "?<|im_end|>\n"
        llm.generate(
            {"prompt": prompt, "multi_modal_data": {"image": pictures}},
            SamplingParams(max_tokens=1),
        )
        (result,) = llm.apply_model(measure)
        table.append({"version": vllm.__version__, "tiles": tiles, **result})
        print(table[-1], flush=True)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(table, file, indent=1)


if __name__ == "__main__":
    main()
