# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Resize boxes of a picture into the rectangles of a tile buffer.

The work is done by the library of `csrc/ovis` where it has been built and gives the
same bytes as the installed Pillow, which is tried once per process on a few pictures;
else by Pillow itself. Which bytes are right is Pillow's to say: the authors prepare
pictures with it, and its releases differ (13 changed the order of the two passes for
tall pictures).
"""

import logging
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from .tiler import (
    BEST,
    LIBRARY_PATH,
    Library,
    Target,
    keep_pictures_in_one_piece,
    resize_with_library,
)
from .tiling import Box

logger = logging.getLogger(__name__)

PIXELS_FOR_THREADS = 2**19
"""Smaller pictures take a millisecond at most, of which threads would save little."""


def resample(
    image: Image.Image,
    boxes: Sequence[Box],
    rectangles: npt.NDArray[np.int32],
    pixels: npt.NDArray[np.uint8],
    threads: int = 1,
) -> None:
    """Resize boxes of an RGB picture into rectangles of a tile buffer, bicubic.

    Equals Pillow's `crop` and `resize` on 8 bits in every byte (authors' behaviour,
    every golden case with an image). The interpreter lock is released meanwhile if the
    library does the work.

    Args:
        image: Picture in mode RGB.
        boxes: Left, top, right, bottom of each tile in the picture.
        rectangles: int32 `[tiles, 4]`: top, left, height, width of the place in the
            tile to write to.
        pixels: uint8 `[tiles, side, side, 3]`, C order, written to inside the
            rectangles only.
        threads: Most threads at work, the caller's included. A picture below
            `PIXELS_FOR_THREADS` has one, whatever is allowed.

    Raises:
        ValueError: The picture is not RGB, or a box or rectangle does not lie inside
            its picture or tile.

    """
    targets = _targets(image, boxes, rectangles, pixels)
    library = _library_if_equal()
    if library is None:
        resize_with_pillow(image, targets)
    else:
        if image.width * image.height < PIXELS_FOR_THREADS:
            threads = 1
        resize_with_library(library, image, targets, threads)


def _targets(
    image: Image.Image,
    boxes: Sequence[Box],
    rectangles: npt.NDArray[np.int32],
    pixels: npt.NDArray[np.uint8],
) -> list[Target]:
    if image.mode != "RGB":
        raise ValueError(f"the picture must have mode RGB, got {image.mode}")
    if pixels.dtype != np.uint8 or not pixels.flags.c_contiguous:
        raise ValueError(f"pixels must be uint8 in C order, got {pixels.dtype}")
    targets = []
    for tile, box, rectangle in zip(pixels, boxes, rectangles.tolist(), strict=True):
        left, top, right, bottom = box
        if not (0 <= left < right <= image.width and 0 <= top < bottom <= image.height):
            raise ValueError(
                f"box {box} must be inside the picture of {image.width}x{image.height} "
                "pixels and have pixels"
            )
        y, x, height, width = rectangle
        content = tile[y : y + height, x : x + width]
        if (
            min(rectangle) < 0
            or content.shape != (height, width, 3)
            or not content.size
        ):
            raise ValueError(
                f"rectangle {rectangle} (top, left, height, width) must be inside the "
                f"tile of shape {list(tile.shape)} and have pixels"
            )
        targets.append(Target(box, content))
    return targets


def resize_with_pillow(image: Image.Image, targets: Sequence[Target]) -> None:
    """Resize boxes of an RGB picture, bicubic, with the installed Pillow's bytes."""
    for target in targets:
        # Cropped first: `resize(box=...)` would let the filter see outside the tile.
        whole = target.box == (0, 0, *image.size)
        content = image if whole else image.crop(target.box)
        height, width = target.content.shape[:2]
        content = content.resize((width, height), Image.Resampling.BICUBIC)
        target.content[:] = np.asarray(content)


# Size of a picture, a box in it, and the size to resize to: enlarging, reducing, tall
# (vertical pass first), unchanged in one axis or both, and one pixel.
_PROBES = (
    ((61, 47), (0, 0, 61, 47), (112, 86)),
    ((223, 181), (0, 0, 223, 181), (56, 45)),
    ((223, 181), (40, 21, 211, 180), (56, 52)),
    ((67, 301), (0, 0, 67, 301), (12, 56)),
    ((67, 301), (3, 7, 63, 291), (11, 56)),
    ((56, 90), (0, 0, 56, 90), (56, 33)),
    ((56, 40), (8, 4, 56, 36), (48, 32)),
    ((33, 1), (0, 0, 33, 1), (56, 1)),
)


def equals_pillow(library: Library, instruction_set: int = BEST) -> bool:
    """Try whether the library gives the same bytes as the installed Pillow."""
    random = np.random.default_rng(0)
    for (width, height), box, (out_width, out_height) in _PROBES:
        # Extremes make the clipping and the rounding of both passes matter.
        values = random.integers(0, 256, (height, width, 3), np.uint8)
        values[::3] = np.where(values[::3] < 128, 0, 255)
        image = Image.fromarray(values)
        expected = np.zeros((out_height, out_width, 3), np.uint8)
        resize_with_pillow(image, [Target(box, expected)])
        got = np.zeros_like(expected)
        resize_with_library(
            library, image, [Target(box, got)], instruction_set=instruction_set
        )
        if not np.array_equal(got, expected):
            return False
    return True


_lock = threading.Lock()
_checked = False
_library: Library | None = None


def _library_if_equal() -> Library | None:
    """The library, or None if Pillow is to be used; decided once per process."""
    global _checked, _library
    if not _checked:
        with _lock:
            if not _checked:
                _library = _load_library(LIBRARY_PATH)
                _checked = True
    return _library


def _load_library(path: Path) -> Library | None:
    try:
        library = Library(path)
        reason = None if equals_pillow(library) else "it differs from this Pillow"
    except (OSError, ValueError) as error:
        reason = str(error)
    if reason is None:
        keep_pictures_in_one_piece()
        return library
    logger.warning(
        "Pictures are resized by Pillow, not by the faster tiler: %s", reason
    )
    return None
