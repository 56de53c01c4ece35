# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Samples as arrays: 8-bit tiles, token ids, and targets of the extra losses.

One example is a dict of numpy arrays whose shapes depend on its layout alone.  A
layout is the tuple of the grids of its images, such as ((1, 1), (2, 2)).
"""

from functools import lru_cache

import numpy as np
from tokenizers import Tokenizer

from tests.reference.preprocess import Box, Grid, cell_boxes, choose_grid, fitted_size
from tests.reference.prompt import qwen_prompt
from tools.demo_data.glyphs import ALPHABET
from tools.demo_data.scenes import COLOURS, SHAPES, TASKS, Item, Picture, draw

from .checkpoint import SIDE

Layout = tuple[Grid, ...]
Example = dict[str, np.ndarray]

PATCHES = 8  # Patches of 14 pixels along a tile's side.
CELLS = 4  # Visual tokens along a tile's side, 2 x 2 patches each.
SLOTS = 5  # Characters of the longest text.
SUFFIX = 24  # Tokens after the last image: question and answer, padded.
GLYPH_CLASSES = 1 + len(ALPHABET)
SHAPE_CLASSES = 1 + len(SHAPES)
COLOUR_CLASSES = 1 + len(COLOURS)
IGNORE = -1

# Smaller than this in a tile, in pixels, a thing is asked of nobody.
LEAST_CAP, LEAST_SHAPE = 7.0, 8.0


_grid = lru_cache(maxsize=None)(choose_grid)


def tile_count(layout: Layout) -> int:
    return sum(1 if r * c == 1 else r * c + 1 for r, c in layout)


def shapes(layout: Layout) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of every array of an example of this layout."""
    n = tile_count(layout)
    return {
        "tiles": ((n, SIDE, SIDE, 3), "uint8"),
        "content": ((n, 4), "int16"),
        "suffix": ((SUFFIX,), "int16"),
        "answer": ((2,), "int16"),
        "task": ((1,), "int16"),
        "patch": ((n, PATCHES**2), "int8"),
        "slots": ((n, CELLS**2, SLOTS), "int8"),
        "shape": ((n, CELLS**2), "int8"),
        "colour": ((n, CELLS**2), "int8"),
    }


def _tile_targets(
    items: list[Item], box: Box, fitted: tuple[int, int], offset: tuple[int, int]
) -> dict[str, np.ndarray]:
    """What can be seen where in one tile.

    ``patch`` names the character or shape whose centre lies in a patch, ``slots`` the
    k-th character of the text where its centre lies in a visual token's cell.
    """
    patch = np.zeros((PATCHES, PATCHES), np.int8)
    slots = np.zeros((CELLS, CELLS, SLOTS), np.int8)
    shape = np.zeros((CELLS, CELLS), np.int8)
    colour = np.zeros((CELLS, CELLS), np.int8)
    left, top, right, bottom = box
    scale = fitted[0] / (right - left)

    def inside(item: Item) -> bool:
        # Characters are narrower than high.
        rx, ry = item.size * (0.3 if item.order else 0.45), item.size * 0.45
        return (
            left <= item.x - rx
            and item.x + rx <= right
            and top <= item.y - ry
            and item.y + ry <= bottom
        )

    text = [item for item in items if item.order]
    whole = all(inside(item) for item in text)
    for item in items:
        if not (left <= item.x < right and top <= item.y < bottom):
            continue
        px = offset[0] + (item.x - left) * scale
        py = offset[1] + (item.y - top) * scale
        p = int(py * PATCHES / SIDE), int(px * PATCHES / SIDE)
        c = p[0] // 2, p[1] // 2
        size = item.size * scale
        taken = patch[p] != 0
        if item.order:
            seen = whole and size >= LEAST_CAP
            number = 1 + ALPHABET.index(item.name)
            patch[p] = number if seen and not taken else IGNORE
            if seen:
                slots[c][item.order - 1] = number
            else:
                slots[c] = IGNORE
        else:
            seen = inside(item) and size >= LEAST_SHAPE and shape[c] == 0
            number = 1 + SHAPES.index(item.name)
            patch[p] = len(ALPHABET) + number if seen and not taken else IGNORE
            shape[c] = number if seen else IGNORE
            colour[c] = 1 + list(COLOURS).index(item.colour) if seen else IGNORE
    return {
        "patch": patch.reshape(-1),
        "slots": slots.reshape(-1, SLOTS),
        "shape": shape.reshape(-1),
        "colour": colour.reshape(-1),
    }


def picture_arrays(
    picture: Picture, max_partition: int
) -> tuple[Grid, list[dict[str, np.ndarray]]]:
    """Cut a picture as the reference does, but keep 8-bit pixels.

    Returns:
        The grid, and per tile the arrays tiles, content (left, top, right, bottom of
        the picture inside the tile) and the targets.

    """
    image = picture.image
    grid = _grid(*image.size, SIDE, max_partition)
    boxes = cell_boxes(*image.size, grid)
    if len(boxes) > 1:
        boxes.insert(0, (0, 0, *image.size))
    tiles: list[dict[str, np.ndarray]] = []
    for box in boxes:
        cell = image.crop(box)
        w, h = fitted_size(*cell.size, SIDE)
        x, y = (SIDE - w) // 2, (SIDE - h) // 2
        pixels = np.zeros((SIDE, SIDE, 3), np.uint8)
        pixels[y : y + h, x : x + w] = np.asarray(cell.resize((w, h), 3))
        content = np.array([x, y, x + w, y + h], np.int16)
        targets = _tile_targets(picture.items, box, (w, h), (x, y))
        tiles.append({"tiles": pixels, "content": content, **targets})
    return grid, tiles


class ExampleMaker:
    """Draws samples and turns them into examples.

    Args:
        tokenizer: The checkpoint's tokeniser.

    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._asked: dict[str, list[int]] = {}

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def frame(self) -> tuple[list[int], list[int]]:
        """Token ids before the first image, and between two images."""
        before, _ = qwen_prompt("<image>").split("<image>")
        return self._encode(before), self._encode("\n")

    def _suffix(self, question: str, answer: str) -> tuple[np.ndarray, np.ndarray]:
        if question not in self._asked:
            _, after = qwen_prompt(f"<image>\n{question}").split("<image>")
            self._asked[question] = self._encode(after)
        asked, said = self._asked[question], self._encode(answer + "<|im_end|>")
        ids = asked + said
        if len(ids) > SUFFIX:
            raise ValueError(f"{len(ids)} tokens do not fit in {SUFFIX}: {answer!r}")
        suffix = np.zeros(SUFFIX, np.int16)
        suffix[: len(ids)] = ids
        return suffix, np.array([len(asked), len(ids)], np.int16)

    def make(
        self, task: str, seed: int, heldout: bool, max_partition: int = 9
    ) -> tuple[Layout, Example]:
        """Draw one sample as arrays; see ``shapes`` for what they are."""
        sample = draw(task, seed, heldout)
        done = [picture_arrays(p, max_partition) for p in sample.pictures]
        tiles = [tile for _, picture in done for tile in picture]
        example = {key: np.stack([t[key] for t in tiles]) for key in tiles[0]}
        suffix, answer = self._suffix(sample.question, sample.answer)
        example["suffix"], example["answer"] = suffix, answer
        example["task"] = np.array([TASKS.index(task)], np.int16)
        return tuple(grid for grid, _ in done), example
