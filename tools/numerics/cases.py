# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Seeded pictures and prompts, sized by the checkpoint's tile."""

import zlib
from dataclasses import dataclass

import numpy as np
from PIL import Image

LONG_TEXT = " ".join(
    f"On day {day} the keeper counted {day * 37 % 101} boats and wrote it down."
    for day in range(1, 13)
)


@dataclass(frozen=True)
class Case:
    """One request.

    Attributes:
        name: What the case is for; its pictures are drawn from it.
        sizes: Width and height of each picture in pixels.
        question: Text behind the pictures.
        max_partition: Upper limit of rows * columns for each picture.

    """

    name: str
    sizes: tuple[tuple[int, int], ...]
    question: str
    max_partition: int = 9

    def pictures(self) -> list[Image.Image]:
        """Draw the pictures: the same bytes in every run."""
        seed = zlib.crc32(self.name.encode())
        return [draw(size, seed + index) for index, size in enumerate(self.sizes)]

    @property
    def text(self) -> str:
        """The user's turn, one mark a picture."""
        return "<image>\n" * len(self.sizes) + self.question


def draw(size: tuple[int, int], seed: int) -> Image.Image:
    """Smooth colours under fine noise, so that every tile has something to see."""
    random = np.random.default_rng(seed)
    width, height = size
    coarse = random.integers(0, 256, (4, 5, 3), np.uint8)
    fine = random.integers(0, 256, (height, width, 3), np.uint8)
    smooth = Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)
    return Image.blend(smooth, Image.fromarray(fine), 0.25)


def stage_cases(side: int) -> list[Case]:
    """Requests whose every intermediate value is compared.

    Args:
        side: Side of the checkpoint's tile in pixels; it decides the grids.

    """
    return [
        Case("no picture", (), "Name three colours."),
        Case("long text", (), LONG_TEXT + " How many boats came on day 7?"),
        Case("one tile", ((side, side),), "What do you see?"),
        Case("small", ((31, 17),), "What colour is it?"),
        Case("3x3", ((3 * side, 3 * side),), "Describe the picture."),
        Case("tall", ((side // 2, 2 * side),), "Where is the shape?"),
        Case(
            "two pictures",
            ((side, 2 * side // 3), (2 * side, side)),
            "Which image shows the star?",
        ),
    ]


def batch_cases(side: int) -> list[Case]:
    """Requests to be answered together: 0 to 4 pictures, 1 to 17 tiles each."""
    one, wide, square = (side, side), (2 * side, side), (3 * side, 3 * side)
    tall, large = (side, 2 * side), (4 * side, 4 * side)
    sizes: list[tuple[tuple[int, int], ...]] = [
        (),
        (one,),
        (square,),
        (one, wide),
        (large,),
        (),
        (tall, one, wide),
        (one, tall, one, wide),
    ]
    return [
        Case(f"batch {index}", pictures, f"What do you see? {index}", 16)
        for index, pictures in enumerate(sizes)
    ]
