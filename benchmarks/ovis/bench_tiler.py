# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Time from a decoded picture to uint8 tiles: tiler, Pillow, vLLM's release.

Run it with the Python of an environment that has the release installed; the tiler is
taken from this directory, whatever that environment has. Competitors take turns in one
process, as machines change their speed meanwhile; each figure is the best of its turns,
in milliseconds, with the ratio to the slowest peer at hand behind it.

    python -m benchmarks.ovis.bench_tiler [--json FILE] [--turns N] [--threads 1 2 4]
"""

import argparse
import importlib
import importlib.util
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.ovis.pictures import make_picture
from benchmarks.ovis.preparation import SIDE, load_release

ROOT = Path(__file__).resolve().parents[2]
SIZES = (
    *((640, 480), (1920, 1080), (4032, 3024)),
    *((1080, 2400), (1242, 2688), (600, 2000), (300, 1000), (200, 900)),
    *((448, 448), (200, 150), (100, 80), (800, 600), (3000, 500)),
)
SECONDS_OF_A_TURN = 0.5
THREAD_SIZES = ((640, 480), (1920, 1080), (4032, 3024))


def load_package() -> ModuleType:
    """Our package from this directory, under a name of its own."""
    directory = ROOT / "vllm" / "models" / "ovis"
    spec = importlib.util.spec_from_loader("ovis_here", None, is_package=True)
    assert spec is not None
    package = importlib.util.module_from_spec(spec)
    package.__path__ = [str(directory)]
    sys.modules["ovis_here"] = package
    return importlib.import_module("ovis_here.images")


def best_of(competitors: dict[str, Callable[[], Any]], turns: int) -> dict[str, float]:
    """Milliseconds of the fastest turn of each, in processor time of this thread.

    Processor time, because it is disturbed less by what else the machine does; nobody
    here uses more than one thread, and all memory they ask for is in it.
    """
    best = dict.fromkeys(competitors, float("inf"))
    for _ in range(turns):
        for name, competitor in competitors.items():
            start = time.thread_time()
            competitor()
            elapsed = (time.thread_time() - start) * 1e3
            best[name] = min(best[name], elapsed)
    return best


def backends(resample: ModuleType, tiler: ModuleType) -> dict[str, Callable[..., None]]:
    """Ways to resize tiles: the best the tiler has, slower ones of it, Pillow."""
    library = resample._library_if_equal()

    def by_library(instruction_set):
        def run(image, boxes, rectangles, pixels, threads):
            targets = resample._targets(image, boxes, rectangles, pixels)
            tiler.resize_with_library(library, image, targets, threads, instruction_set)

        return run

    def by_pillow(image, boxes, rectangles, pixels, threads):
        targets = resample._targets(image, boxes, rectangles, pixels)
        resample.resize_with_pillow(image, targets)

    sets = {"avx2": tiler.AVX2, "portable": tiler.PORTABLE}
    return {
        "tiler": by_library(tiler.BEST),
        **{name: by_library(s) for name, s in sets.items() if library.supports(s)},
        "pillow": by_pillow,
    }


def bench_sizes(images: Any, turns: int) -> list[dict[str, Any]]:
    """One thread, every size."""
    ways = backends(sys.modules["ovis_here.resample"], sys.modules["ovis_here.tiler"])
    release = load_release()

    def tile(image, way):
        images.resample = ways[way]
        return images.tile_image(image, SIDE)

    records = []
    for width, height in SIZES:
        image = make_picture(width, height)
        right = tile(image, "pillow").pixels
        for way in ways:
            if not np.array_equal(tile(image, way).pixels, right):
                sys.exit(f"{way} differs from Pillow at {width}x{height}")
        competitors: dict[str, Callable[[], Any]] = {
            way: partial(tile, image, way) for way in ways
        }
        if release is not None:
            competitors["release"] = partial(release, image)
        times = best_of(competitors, turns)
        record: dict[str, Any] = {"size": f"{width}x{height}", "ms": times}
        base = times["release" if release else "pillow"]
        record["ratio"] = {name: base / value for name, value in times.items()}
        records.append(record)
        figures = [
            f"{name} {ms:6.2f} ({base / ms:4.1f}x)" for name, ms in times.items()
        ]
        print(f"{record['size']:>10}  {'  '.join(figures)}", flush=True)
    images.resample = ways["tiler"]
    return records


def bench_callers(
    images: ModuleType, callers: list[int], turns: int
) -> list[dict[str, Any]]:
    """Pictures per second with several callers, a picture and a thread each."""
    records = []
    for width, height in THREAD_SIZES:
        image = make_picture(width, height)
        rates = dict.fromkeys(callers, 0.0)
        for _ in range(turns):
            for count in callers:
                rates[count] = max(rates[count], rate_of(images, image, count))
        size = f"{width}x{height}"
        listed = "  ".join(f"{count}: {rate:.0f}" for count, rate in rates.items())
        print(f"{size:>10}  pictures/s by callers   {listed}", flush=True)
        records.append({"size": size, "pictures_per_second": rates})
    return records


def rate_of(images: ModuleType, image: Image.Image, callers: int) -> float:
    """Pictures per second while each caller makes one after the other."""
    end = time.perf_counter() + SECONDS_OF_A_TURN

    def call() -> float:
        # The rate of each by its own clock: the last picture ends after the others'.
        start, done = time.perf_counter(), 0
        while time.perf_counter() < end:
            images.tile_image(image, SIDE)
            done += 1
        return done / (time.perf_counter() - start)

    with ThreadPoolExecutor(callers) as pool:
        calls = [pool.submit(call) for _ in range(callers)]
    return sum(call.result() for call in calls)


def bench_threads(
    images: ModuleType, threads: list[int], turns: int
) -> list[dict[str, Any]]:
    """Wall milliseconds of one picture with several threads for it."""
    records = []
    for width, height in THREAD_SIZES:
        image = make_picture(width, height)
        times = dict.fromkeys(threads, float("inf"))
        for _ in range(turns):
            for count in threads:
                start = time.perf_counter()
                images.tile_image(image, SIDE, threads=count)
                times[count] = min(times[count], (time.perf_counter() - start) * 1e3)
        listed = "  ".join(f"{count}: {ms:.2f}" for count, ms in times.items())
        size = f"{width}x{height}"
        print(f"{size:>10}  ms by threads   {listed}", flush=True)
        records.append({"size": size, "ms": times})
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4])
    arguments = parser.parse_args()
    images = load_package()
    if sys.modules["ovis_here.resample"]._library_if_equal() is None:
        sys.exit("the tiler is not in use (reason above); python csrc/ovis/build.py")
    results = {
        "sizes": bench_sizes(images, arguments.turns),
        "callers": bench_callers(images, arguments.threads, arguments.turns),
        "threads": bench_threads(images, arguments.threads, arguments.turns),
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
