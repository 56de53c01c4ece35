# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Image preparation of the installed vLLM: from a picture or a JPEG file to tiles.

python -m benchmarks.ovis.workers.prepare OUTPUT
"""

import io
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.ovis.pictures import make_picture, to_data_url, to_jpeg
from benchmarks.ovis.preparation import MAX_PARTITION, SIDE, load_installed
from benchmarks.ovis.records import Measurement
from benchmarks.ovis.workers import run_worker
from vllm.multimodal.media import MediaConnector

SIZES = ((640, 480), (1920, 1080), (4032, 3024))
CALLERS = (1, 2, 4)
RUNS = 7
SECONDS_OF_A_RUN = 0.25
SECONDS_OF_CALLERS = 0.6


def milliseconds(call: Callable[[], Any]) -> list[float]:
    """Time of a call, a value for each run: the mean over the run's calls.

    Processor time of this thread, which other work on the machine disturbs less than
    the clock; nothing here uses a second thread.
    """
    call()
    values = []
    for _ in range(RUNS):
        start, done = time.thread_time(), 0
        while not done or time.thread_time() - start < SECONDS_OF_A_RUN:
            call()
            done += 1
        values.append((time.thread_time() - start) / done * 1e3)
    return values


def copy_floor(picture: Image.Image) -> float:
    """Milliseconds to read a picture's memory once and to write its tiles once.

    Pillow keeps four bytes a pixel; the tiles are those of the largest grid at worst.
    """
    read = np.ones(picture.width * picture.height * 4, np.uint8)
    write = np.empty((MAX_PARTITION + 1) * SIDE * SIDE * 3, np.uint8)

    def touch() -> None:
        read.max()
        write.fill(0)

    return statistics.median(milliseconds(touch))


def rate(
    call: Callable[[Image.Image], Any], picture: Image.Image, callers: int
) -> float:
    """Pictures a second while each of several threads prepares one after the other."""
    end = time.perf_counter() + SECONDS_OF_CALLERS

    def caller() -> float:
        # Each by its own clock: the last picture ends after the others'.
        start, done = time.perf_counter(), 0
        while time.perf_counter() < end:
            call(picture)
            done += 1
        return done / (time.perf_counter() - start)

    with ThreadPoolExecutor(callers) as pool:
        return sum(pool.map(lambda _: caller(), range(callers)))


def measure() -> list[Measurement]:
    """All rows."""
    prepare = load_installed()
    # As the front end decodes: the fork asks for the file's own mode.
    connector = MediaConnector({"image": {"image_mode": None}})
    rows = []
    for width, height in SIZES:
        size = f"{width}x{height}"
        picture = make_picture(width, height)
        file, url = to_jpeg(picture), to_data_url(picture)

        def from_url(url: str = url) -> None:
            prepare(connector.fetch_image(url).media)  # type: ignore[attr-defined]

        def decode(file: bytes = file) -> None:
            Image.open(io.BytesIO(file)).load()

        rows += [
            Measurement(
                f"picture to tiles: {size}",
                "ms",
                milliseconds(partial(prepare, picture)),
                copy_floor(picture),
            ),
            Measurement(
                f"JPEG data URL to tiles: {size}",
                "ms",
                milliseconds(from_url),
                statistics.median(milliseconds(decode)),
            ),
        ]
        rows += [
            Measurement(
                f"picture to tiles, callers: {size}, {callers}",
                "images/s",
                [rate(prepare, picture, callers) for _ in range(3)],
            )
            for callers in CALLERS
        ]
    return rows


if __name__ == "__main__":
    run_worker(measure)
