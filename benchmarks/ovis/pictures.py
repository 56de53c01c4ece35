# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Pictures for measurements: like photographs, all different, the same every time."""

import base64
import io
from collections.abc import Iterator

import numpy as np
from PIL import Image

JPEG_QUALITY = 90
_MARGIN = 64


def make_picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Smooth shapes and some noise, as in a photograph, in mode RGB."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width].astype(np.float32)
    waves = [np.sin(x / (31 + 7 * c)) + np.cos(y / (23 + 5 * c)) for c in range(3)]
    values = np.stack(waves, -1) * 50 + 128
    values += random.normal(0, 8, values.shape)
    return Image.fromarray(values.clip(0, 255).astype(np.uint8))


def make_pictures(
    width: int, height: int, count: int, seed: int = 0
) -> Iterator[Image.Image]:
    """Make many different pictures: pieces of one, which is made once.

    Args:
        width: Width of each in pixels.
        height: Height of each in pixels.
        count: How many; at most 4096 differ for certain.
        seed: Other pictures for another seed.

    """
    whole = make_picture(width + _MARGIN, height + _MARGIN, seed)
    for index in range(count):
        left, top = index % _MARGIN, index // _MARGIN % _MARGIN
        yield whole.crop((left, top, left + width, top + height))


def to_jpeg(picture: Image.Image) -> bytes:
    """The picture as a JPEG file, with the usual subsampling of colours."""
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=JPEG_QUALITY)
    return buffer.getvalue()


def to_data_url(picture: Image.Image) -> str:
    """The picture's JPEG file as a data URL."""
    content = base64.b64encode(to_jpeg(picture)).decode()
    return f"data:image/jpeg;base64,{content}"
