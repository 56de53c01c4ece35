# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which JPEG decoders give Pillow's pixels, and how fast.

    python -m benchmarks.ovis.decoders

Compares those of simplejpeg, OpenCV, imagecodecs and kornia-rs that are installed.
"""

import importlib
import io
import itertools
import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np
from PIL import Image

from benchmarks.ovis.pictures import make_picture

Decoder = Callable[[bytes], np.ndarray]

SIZES = ((640, 480), (1920, 1080), (4032, 3024))
RUNS = 9


def pillow(file: bytes) -> np.ndarray:
    """Pillow's pixels; its own memory is shown, not copied, where it allows."""
    image = Image.open(io.BytesIO(file))
    image.load()
    return np.asarray(image.convert("RGB"))


def load_pillow(file: bytes) -> None:
    """What the engine asks of Pillow, without the packing of pixels."""
    Image.open(io.BytesIO(file)).load()


def others() -> dict[str, Decoder]:
    """The installed decoders, in their exact modes."""
    found: dict[str, Decoder] = {}
    for name, load in {
        "simplejpeg": _simplejpeg,
        "cv2": _opencv,
        "imagecodecs": lambda: importlib.import_module("imagecodecs").jpeg8_decode,
        "kornia_rs": lambda: importlib.import_module("kornia_rs").io.decode_image_jpeg,
    }.items():
        try:
            found[name] = load()
        except ImportError:
            print(f"{name} is not installed")
    return found


def _simplejpeg() -> Decoder:
    decode = importlib.import_module("simplejpeg").decode_jpeg
    return lambda file: decode(file, "RGB", fastdct=False, fastupsample=False)


def _opencv() -> Decoder:
    cv2 = importlib.import_module("cv2")
    cv2.setNumThreads(1)
    flags = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
    return lambda file: cv2.imdecode(np.frombuffer(file, np.uint8), flags)


def files() -> Iterator[tuple[str, bytes]]:
    """Files of every subsampling, progressive or not, of odd sizes, grey, CMYK."""
    sizes = ((640, 480), (641, 479), (33, 17), (8, 3), (200, 1), (1, 1))
    kinds = itertools.product(sizes, (50, 90, 98), ("4:4:4", "4:2:2", "4:2:0", "4:1:1"))
    for size, quality, subsampling in kinds:
        for progressive in (False, True):
            yield (
                f"{size} quality {quality} {subsampling} progressive {progressive}",
                encode(
                    make_picture(*size),
                    quality=quality,
                    subsampling=subsampling,
                    progressive=progressive,
                ),
            )
    picture = make_picture(641, 479)
    yield "grey", encode(picture.convert("L"))
    yield "CMYK", encode(picture.convert("CMYK"))
    yield "restart marks", encode(picture, restart_marker_blocks=7)


def encode(picture: Image.Image, **options: object) -> bytes:
    """A JPEG file."""
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", **options)
    return buffer.getvalue()


def equal(decode: Decoder, file: bytes) -> bool:
    """Whether a decoder's pixels are Pillow's."""
    try:
        pixels = np.asarray(decode(file))
    except Exception:
        return False  # Refusing a file that Pillow reads is a difference, too.
    if pixels.ndim == 2 or pixels.shape[2] == 1:
        pixels = np.repeat(pixels.reshape(*pixels.shape[:2], 1), 3, axis=2)
    return np.array_equal(pixels, pillow(file))


def milliseconds(call: Callable[[bytes], object], file: bytes) -> float:
    """Median processor time of a call."""
    times = []
    for _ in range(RUNS):
        start = time.thread_time()
        call(file)
        times.append((time.thread_time() - start) * 1e3)
    return statistics.median(times)


def main() -> None:
    """Print what differs, then the times."""
    decoders = others()
    kinds = list(files())
    for name, decode in decoders.items():
        wrong = [kind for kind, file in kinds if not equal(decode, file)]
        print(f"{name}: {len(wrong)} of {len(kinds)} files differ: {wrong[:3]}")
    for width, height in SIZES:
        file = encode(make_picture(width, height), quality=90)
        calls: dict[str, Callable[[bytes], object]] = {"Pillow": load_pillow}
        times = {
            name: milliseconds(call, file) for name, call in (calls | decoders).items()
        }
        listed = "  ".join(f"{name} {ms:.1f}" for name, ms in times.items())
        print(f"{width}x{height}, {len(file) // 1000} kB, ms:  {listed}")


if __name__ == "__main__":
    main()
