# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Keys of decoded pictures: equal for equal pixels, and for nothing else."""

import itertools

import numpy as np
import pytest
from PIL import Image

from vllm.multimodal.hasher import MultiModalHasher


def key(image: Image.Image) -> str:
    return MultiModalHasher.hash_kwargs("blake3", image=image)


def noise(width: int, height: int) -> Image.Image:
    random = np.random.default_rng(0)
    return Image.fromarray(random.integers(0, 256, (height, width, 3), np.uint8))


# One strip, several, one row that is longer than a strip.
@pytest.mark.parametrize("size", [(5, 4), (500, 700), (70_000, 3)])
def test_every_pixel_counts(size):
    image = noise(*size)
    same = image.copy()
    assert key(image) == key(same)
    width, height = size
    for x, y in itertools.product((0, width - 1), (0, height // 2, height - 1)):
        pixels = np.array(image)
        pixels[y, x, 2] ^= 1
        assert key(Image.fromarray(pixels)) != key(image)


def test_shape_and_mode_count():
    pixels = bytes(range(12)) * 4
    images = [
        Image.frombytes("RGB", (4, 4), pixels),
        Image.frombytes("RGB", (8, 2), pixels),
        Image.frombytes("RGB", (2, 8), pixels),
        Image.frombytes("L", (8, 6), pixels),
        Image.frombytes("L", (6, 8), pixels),
        Image.frombytes("CMYK", (4, 3), pixels),
        Image.frombytes("RGBA", (4, 3), pixels),
    ]
    assert len({key(image) for image in images}) == len(images)


def test_palette_counts():
    image = Image.frombytes("P", (4, 4), bytes(16))
    image.putpalette([1, 2, 3])
    other = image.copy()
    other.putpalette([3, 2, 1])
    assert key(image) != key(other)
