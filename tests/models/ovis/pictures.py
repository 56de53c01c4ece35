# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Seeded pictures and mixed requests, for tests that need no recorded answer."""

import numpy as np
from PIL import Image

SIZES = ((112, 112), (300, 200), (90, 400), (640, 480), (31, 70), (900, 260))
"""Widths and heights; with tiles of 112 pixels they make 1 to 17 tiles."""


def picture(seed: int) -> Image.Image:
    """Draw coarse random colours at one of SIZES, another picture for each seed."""
    random = np.random.default_rng(seed)
    colours = random.integers(0, 256, (5, 7, 3), np.uint8)
    size = SIZES[int(random.integers(len(SIZES)))]
    return Image.fromarray(colours).resize(size, Image.Resampling.BICUBIC)


def mixed_requests(count: int, seed: int) -> list[tuple[list[Image.Image], int]]:
    """Pictures and max_partition of requests with 0 to 4 pictures each."""
    random = np.random.default_rng(seed)
    requests = []
    for index in range(count):
        pictures = [picture(seed * 10**4 + index * 10 + i) for i in range(index % 5)]
        requests.append((pictures, int(random.choice((1, 2, 4, 9, 16)))))
    return requests
