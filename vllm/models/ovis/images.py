# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""From a decoded picture to uint8 tiles, and from tiles to normalised floats.

Tiles leave here as bytes with the rectangle of their content: a quarter of the floats'
size crosses to the engine, which looks the floats up. The rectangle is needed because
padding is zero *after* normalisation, a value that no byte maps to.

numpy and Pillow only. Results equal the authors' bit for bit under Pillow 13 (golden
cases, `pixel_values.sha256`); older Pillow may differ by one step of 8 bits in tall
pictures, as its bicubic filter runs its two passes in another order.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image, ImageOps

from .resample import resample
from .tiling import (
    DEFAULT_COVERING_THRESHOLD,
    DEFAULT_MAX_PARTITION,
    choose_grid,
    fit_size,
    tile_boxes,
)

_ALPHA_MODES = ("RGBA", "LA", "PA", "RGBa", "La")
_WHITE = (255, 255, 255)


def to_rgb(image: Image.Image) -> Image.Image:
    """Bring a decoded picture to upright, opaque, 8-bit RGB.

    - The EXIF orientation is applied, as the engine does for pictures it decodes.
    - Transparency (an alpha channel, or a `transparency` entry of the file format) is
      composited on white by the engine's own operation. Deliberate difference: the
      authors drop alpha and show what lies under it (golden cases mode_RGBA, mode_LA,
      mode_PA).
    - 16-bit grey (mode I;16 in any byte order, and mode I whose values all lie in
      0..65535 with one above 255) is scaled to 8 bits. Deliberate difference: Pillow
      and with it the authors clip, which leaves a white picture (mode_I_16).
    - All else goes through Pillow's `convert("RGB")`, as with the authors: mode F and
      any other mode I are rounded and clipped to 0..255 (golden cases mode_F, mode_I).

    Args:
        image: Picture of any mode.

    Returns:
        The picture in mode RGB; the argument itself, not a copy, if it already is one.

    Raises:
        ValueError: Pillow cannot convert the mode to RGB.

    """
    image = _upright(image)
    grey = _sixteen_bit_grey(image)
    if grey is not None:
        return grey
    if image.mode == "La":
        image = image.convert("LA")  # Pillow knows no direct way to RGBA.
    if image.mode in _ALPHA_MODES or "transparency" in image.info:
        rgba = image.convert("RGBA")
        opaque = Image.new("RGB", rgba.size, _WHITE)
        opaque.paste(rgba, mask=rgba.getchannel("A"))
        return opaque
    return image if image.mode == "RGB" else image.convert("RGB")


def _upright(image: Image.Image) -> Image.Image:
    # A damaged EXIF block must not refuse a picture that decodes (the engine's rule).
    with contextlib.suppress(Exception):
        # Asked first, because transposing copies the picture even if it is upright.
        if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:
            return ImageOps.exif_transpose(image)
    return image


def _sixteen_bit_grey(image: Image.Image) -> Image.Image | None:
    """The picture scaled to RGB if it is 16-bit grey, else None."""
    if image.mode != "I" and not image.mode.startswith("I;16"):
        return None
    values = np.asarray(image).astype(np.int64)
    if image.mode == "I" and (
        values.min(initial=0) < 0 or not 255 < values.max(initial=0) <= 65535
    ):
        return None
    scaled = ((values * 255 + 32767) // 65535).astype(np.uint8)
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        scaled[values == transparent] = 255
    return Image.fromarray(scaled).convert("RGB")


def from_array(array: np.ndarray) -> Image.Image:
    """Picture of a uint8 array of three channels.

    Args:
        array: uint8, `[height, width, 3]` or `[3, height, width]`. If both first and
            last axis have length 3, channels come last.

    Raises:
        ValueError: Another type or shape.

    """
    if array.dtype == np.uint8 and array.ndim == 3:
        if array.shape[2] == 3:
            return Image.fromarray(np.ascontiguousarray(array))
        if array.shape[0] == 3:
            return Image.fromarray(np.ascontiguousarray(array.transpose(1, 2, 0)))
    raise ValueError(
        "an array used as image must be uint8 with shape [height, width, 3] or "
        f"[3, height, width], got {array.dtype} with shape {list(array.shape)}"
    )


@dataclass(frozen=True)
class TiledImage:
    """The tiles of one picture.

    Attributes:
        pixels: uint8 `[tiles, side, side, 3]`, C order, RGB; 0 outside the content.
        rectangles: int32 `[tiles, 4]`, content of each tile as top, left, height,
            width in pixels.
        grid: `(rows, cols)`.

    """

    pixels: npt.NDArray[np.uint8]
    rectangles: npt.NDArray[np.int32]
    grid: tuple[int, int]


def tile_image(
    image: Image.Image | np.ndarray,
    side: int,
    max_partition: int = DEFAULT_MAX_PARTITION,
    covering_threshold: float = DEFAULT_COVERING_THRESHOLD,
    threads: int = 1,
) -> TiledImage:
    """Cut a picture into tiles and resize each to fit a square.

    Each tile keeps its proportions; its short axis is centred at `(side - n) // 2`
    (authors' behaviour, every golden case with an image).

    Args:
        image: Picture of any mode, or an array as `from_array` takes it.
        side: Side of a square tile in pixels.
        max_partition: Most cells of the grid.
        covering_threshold: See `tiling.choose_grid`.
        threads: Most threads that resize tiles, see `resample.resample`.

    Returns:
        All tiles of the picture, the overview first.

    Raises:
        ValueError: The picture is empty or too thin to be resized, or has a mode that
            Pillow cannot convert.

    """
    if isinstance(image, np.ndarray):
        image = from_array(image)
    image = to_rgb(image)
    width, height = image.size
    rows, cols = choose_grid(width, height, side, max_partition, covering_threshold)
    boxes = tile_boxes(width, height, rows, cols)
    rectangles = np.empty((len(boxes), 4), np.int32)
    for rectangle, (left, top, right, bottom) in zip(rectangles, boxes):
        w, h = fit_size(right - left, bottom - top, side)
        rectangle[:] = (side - h) // 2, (side - w) // 2, h, w
    pixels = np.zeros((len(boxes), side, side, 3), np.uint8)
    resample(image, boxes, rectangles, pixels, threads)
    return TiledImage(pixels, rectangles, (rows, cols))


def normalization_table(
    mean: Sequence[float], std: Sequence[float]
) -> npt.NDArray[np.float32]:
    """Normalised value of each byte of each channel.

    The order of operations is the authors': times 1/255 in double, cast to float32,
    minus mean and divided by std in float32 (golden cases, `pixel_values.sha256`).

    Args:
        mean: Mean of the three channels, on a scale of 0 to 1.
        std: Standard deviation of the three channels, not 0.

    Returns:
        float32 `[3, 256]`.

    Raises:
        ValueError: Not three values, or a deviation that is not above 0.

    """
    if len(mean) != 3 or len(std) != 3 or not all(value > 0 for value in std):
        raise ValueError(
            "mean and std must have three values each and std must be above 0, got "
            f"mean {list(mean)} and std {list(std)}"
        )
    values = (np.arange(256) * (1 / 255)).astype(np.float32)
    means = np.asarray(mean, np.float32)[:, None]
    return (values - means) / np.asarray(std, np.float32)[:, None]


def normalize(
    pixels: npt.NDArray[np.uint8],
    rectangles: npt.NDArray[np.int32],
    table: npt.NDArray[np.float32],
) -> npt.NDArray[np.float32]:
    """Look the bytes of tiles up in a normalisation table.

    Args:
        pixels: uint8 `[tiles, side, side, 3]`.
        rectangles: int32 `[tiles, 4]`, top, left, height, width of the content.
        table: float32 `[3, 256]` from `normalization_table`.

    Returns:
        float32 `[tiles, 3, side, side]`, 0 outside the rectangles.

    """
    tiles, side = pixels.shape[:2]
    normalized = np.zeros((tiles, 3, side, side), np.float32)
    for source, target, (top, left, height, width) in zip(
        pixels, normalized, rectangles.tolist()
    ):
        inside = np.s_[top : top + height, left : left + width]
        for channel in range(3):
            target[channel][inside] = table[channel][source[inside][..., channel]]
    return normalized
