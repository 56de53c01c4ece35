# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Vision encode and offline throughput of the installed vLLM on one GPU.

    python -m benchmarks.ovis.workers.encode OUTPUT CHECKPOINT ARGUMENTS

The encode is called as the engine's own model runner calls it, with the items that the
runner was given for real requests, so that nothing here depends on whose model it is.
"""

import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# The engine's worker must live in this process to be called.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

from benchmarks.ovis.floors import (
    Sizes,
    Speed,
    encode_floor,
    encode_work,
    request_floor,
)
from benchmarks.ovis.pictures import make_picture
from benchmarks.ovis.records import Measurement
from benchmarks.ovis.stages import read_trace, stage_times
from benchmarks.ovis.workers import run_worker
from benchmarks.ovis.workers.offline import start_engine, throughput

RUNS, WARM_UP = 20, 5
OFFLINE_SIZE, OFFLINE_IMAGES, OFFLINE_TILES, OFFLINE_TOKENS = (1920, 1080), 48, 9, 2330

# Sizes of pictures whose tiles at max_partition 9 are so many in all.
PICTURES = {
    1: [(448, 448)],
    10: [(1344, 1344)],
    40: [(1344, 1344)] * 4,
}


def measure_speed() -> Speed:
    """Speed of this GPU: a large product in bfloat16, a large copy."""
    import torch

    n = 8192
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = min(device_times(lambda: torch.mm(a, b))) / 1e3
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = min(device_times(lambda: target.copy_(source))) / 1e3
    return Speed(2 * n**3 / product, 2 * source.numel() / copy)


def device_times(call: Callable[[], Any]) -> list[float]:
    """Milliseconds of each of `RUNS` calls, from its start to the device's end."""
    import torch

    times = []
    for run in range(WARM_UP + RUNS):
        torch.cuda.synchronize()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        stop.synchronize()
        if run >= WARM_UP:
            times.append(start.elapsed_time(stop))
    return times


def extra_memory(call: Callable[[], Any]) -> float:
    """Peak of a call in MiB beyond what was held before it, its result included."""
    import torch

    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - held) / 2**20


def profile_stages(call: Callable[[], Any], sizes: Sizes) -> dict[str, float]:
    """Milliseconds of device time by stage, the mean of three calls."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    calls = 3
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    total: dict[str, float] = {}
    for _ in range(calls):
        with profile(activities=activities, record_shapes=True) as profiler:
            call()
            torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            kernels = read_trace(json.loads(path.read_text()))
        for stage, milliseconds in stage_times(kernels, sizes).items():
            total[stage] = total.get(stage, 0) + milliseconds / calls
    return total


def items_of_request(engine: Any, runner: Any, pictures: list[Any]) -> Any:
    """What the engine gives its runner to encode for a request with these pictures."""
    from vllm import SamplingParams

    encoder = runner.model_state.encoder_runner
    execute = encoder.execute_mm_encoder
    recorded: list[Any] = []

    def recording(items: Any) -> Any:
        recorded.extend(items)
        return execute(items)

    encoder.execute_mm_encoder = recording
    prompt = "<|im_start|>user\n" + "<image>\n" * len(pictures) + "?<|im_end|>\n"
    try:
        engine.generate(
            {"prompt": prompt, "multi_modal_data": {"image": pictures}},
            SamplingParams(max_tokens=1),
        )
    finally:
        del encoder.execute_mm_encoder
    return recorded


def measure_encode(
    engine: Any, runner: Any, sizes: Sizes, speed: Speed | None
) -> list[Measurement]:
    """Rows of each number of tiles: whole, device memory, stages.

    Without `speed` they have no floor.
    """
    import torch

    from vllm.multimodal.utils import group_and_batch_mm_kwargs

    encoder = runner.model_state.encoder_runner
    rows = []
    for tiles, picture_sizes in PICTURES.items():
        pictures = [
            make_picture(*size, seed=1000 * tiles + index)
            for index, size in enumerate(picture_sizes)
        ]
        items = items_of_request(engine, runner, pictures)
        ((_, _, batch),) = group_and_batch_mm_kwargs(items, device=runner.device)
        with torch.inference_mode():

            def run(items: Any = items) -> Any:
                return encoder.execute_mm_encoder(items)

            def embed(batch: Any = batch) -> Any:
                return encoder.model.embed_multimodal(**batch)

            floor = encode_floor(sizes, tiles, speed) if speed else None
            count = f"{tiles} tile" + "s" * (tiles > 1)
            rows += [
                Measurement(f"encode: {count}", "ms", device_times(run), floor),
                Measurement(
                    f"encode memory: {count}",
                    "MiB",
                    [extra_memory(run) for _ in range(3)],
                ),
                Measurement(
                    f"encode without graph and copy: {count}",
                    "ms",
                    device_times(embed),
                    floor,
                ),
            ]
            work = encode_work(sizes, tiles)
            rows += [
                Measurement(
                    f"encode, device time: {count}, {stage}",
                    "ms",
                    [milliseconds],
                    speed.milliseconds(work[stage]) if speed else None,
                )
                for stage, milliseconds in profile_stages(embed, sizes).items()
            ]
    return rows


def measure(checkpoint: str, arguments: str) -> list[Measurement]:
    """All rows."""
    changed = json.loads(arguments)
    start = time.perf_counter()
    engine = start_engine(
        checkpoint,
        **{
            "dtype": "bfloat16",
            "max_model_len": 16384,
            "max_num_batched_tokens": 16384,
            "limit_mm_per_prompt": {"image": 4},
            "gpu_memory_utilization": 0.5,
            **changed,
        },
    )
    started = time.perf_counter() - start
    config = json.loads((Path(checkpoint) / "config.json").read_text())
    sizes, speed = Sizes.of(config), measure_speed()
    (runner,) = engine.collective_rpc(lambda worker: worker.model_runner)
    # Quantized products may be faster than those that a floor is made of.
    floor_speed = None if "quantization" in changed else speed
    ceiling = None
    if floor_speed:
        ceiling = request_floor(sizes, OFFLINE_TILES, OFFLINE_TOKENS, floor_speed)
    return [
        Measurement("engine start: import and start", "s", [started]),
        Measurement("device: matrix product", "TFLOP/s", [speed.flops / 1e12]),
        Measurement("device: copy", "TB/s", [speed.bandwidth / 1e12]),
        *measure_encode(engine, runner, sizes, floor_speed),
        throughput(engine, OFFLINE_SIZE, OFFLINE_IMAGES, ceiling),
    ]


if __name__ == "__main__":
    run_worker(measure)
