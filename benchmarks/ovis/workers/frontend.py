# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the front end of a server does to a chat request, without engine and network.

python -m benchmarks.ovis.workers.frontend OUTPUT CHECKPOINT WIDTH HEIGHT

From a chat message with a data URL to what the engine is sent: a server can answer at
most as many requests a second as this allows, however fast its engine.
"""

import asyncio
import itertools
import time
from typing import Any

from benchmarks.ovis.pictures import make_pictures, to_data_url
from benchmarks.ovis.records import Measurement
from benchmarks.ovis.workers import run_worker

CONCURRENCIES = (1, 8, 32)
RUNS = 3
REQUESTS_OF_A_RUN = 32
SECONDS_OF_A_RUN = 2.0


def start(checkpoint: str) -> tuple[Any, list[Measurement]]:
    """The front end's part of a server that prepares requests, and how it starts."""
    times = [time.perf_counter()]
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.renderers import renderer_from_config

    times.append(time.perf_counter())
    config = AsyncEngineArgs(
        model=checkpoint, load_format="dummy", max_model_len=8192
    ).create_engine_config()
    times.append(time.perf_counter())
    renderer = renderer_from_config(config)
    times.append(time.perf_counter())
    renderer.warmup_mm()
    times.append(time.perf_counter())
    parts = (
        "imports",
        "configuration",
        "tokenizer and processor",
        "multi-modal warm-up",
    )
    return renderer, [
        Measurement(f"front end start: {part}", "s", [after - before])
        for part, (before, after) in zip(parts, itertools.pairwise(times))
    ]


def chat(url: str) -> list[dict[str, Any]]:
    """A conversation with one picture."""
    content = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "What is this?"},
    ]
    return [{"role": "user", "content": content}]


async def render(renderer: Any, urls: list[str], concurrency: int) -> tuple[int, float]:
    """Prepare requests until all are done or time is up; returns number and seconds."""
    from vllm.renderers.params import ChatParams

    parameters = ChatParams(
        chat_template_content_format="auto",
        chat_template_kwargs={"add_generation_prompt": True},
    )
    left = list(urls)
    start = time.perf_counter()

    async def client() -> int:
        done = 0
        while left and time.perf_counter() - start < SECONDS_OF_A_RUN:
            await renderer.render_chat_async([chat(left.pop())], parameters)
            done += 1
        return done

    done = sum(await asyncio.gather(*(client() for _ in range(concurrency))))
    return done, time.perf_counter() - start


def measure(checkpoint: str, width: str, height: str) -> list[Measurement]:
    """Start, warm-up, and requests a second at every concurrency."""
    renderer, rows = start(checkpoint)
    size = int(width), int(height)
    pictures = make_pictures(*size, 1 + len(CONCURRENCIES) * RUNS * REQUESTS_OF_A_RUN)
    urls = [to_data_url(picture) for picture in pictures]
    loop = asyncio.new_event_loop()
    loop.run_until_complete(render(renderer, [urls.pop()], 1))
    where = f"{width}x{height} JPEG"
    for concurrency in CONCURRENCIES:
        rates, processor_times = [], []
        for _ in range(RUNS):
            some = [urls.pop() for _ in range(REQUESTS_OF_A_RUN)]
            used = time.process_time()
            done, seconds = loop.run_until_complete(render(renderer, some, concurrency))
            rates.append(done / seconds)
            processor_times.append((time.process_time() - used) / done * 1e3)
        rows.append(
            Measurement(
                f"front end: {where}, concurrency {concurrency}", "requests/s", rates
            )
        )
        if concurrency == 1:
            rows.append(
                Measurement(
                    f"front end, processor time: {where}", "ms", processor_times
                )
            )
    return rows


if __name__ == "__main__":
    run_worker(measure)
