# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""From a decoded picture to normalised tiles and placeholder ids.

Rules: ``tests/golden/ovis2/NOTES.md``, sections Grid, Tiles and Placeholder ids.
"""

from dataclasses import dataclass

import numpy as np
from PIL import Image

ATOM = -300
START, PREFIX, COLUMN, ROW, END = -301, -302, -303, -304, -305

Grid = tuple[int, int]
Box = tuple[int, int, int, int]


@dataclass(frozen=True)
class PixelRule:
    """How pixels become numbers: the fields of preprocessor_config.json in use.

    Attributes:
        side: Tile side in pixels.
        mean: Mean per colour channel, on the scale 0 to 1.
        std: Standard deviation per colour channel, on the scale 0 to 1.
        scale: Factor that brings 8-bit values to the scale 0 to 1.

    """

    side: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    scale: float

    @classmethod
    def from_config(cls, config: dict) -> "PixelRule":
        """Read the rule from a preprocessor_config.json.

        CLIP-type processors carry the side in ``crop_size``, SigLIP-type ones in
        ``size``.

        Raises:
            ValueError: The configuration names no square side.

        """
        size = config.get("crop_size") or config.get("size") or {}
        height, width = size.get("height"), size.get("width")
        if not height or height != width:
            raise ValueError(f"expected a square tile size, got {size!r}")
        return cls(
            side=height,
            mean=tuple(config["image_mean"]),
            std=tuple(config["image_std"]),
            scale=config["rescale_factor"],
        )


def cell_boxes(width: int, height: int, grid: Grid) -> list[Box]:
    """Cut a picture into cells, row by row; the last row and column take the rest.

    Returns:
        (left, top, right, bottom) in pixels, for each of the rows * cols cells.

    """
    rows, cols = grid
    cell_w, cell_h = width // cols, height // rows
    return [
        (
            col * cell_w,
            row * cell_h,
            width if col == cols - 1 else (col + 1) * cell_w,
            height if row == rows - 1 else (row + 1) * cell_h,
        )
        for row in range(rows)
        for col in range(cols)
    ]


def covering_ratio(width: int, height: int, grid: Grid, side: int) -> float:
    """Share of the picture's pixels that survive when each cell is shrunk to a tile."""
    covered = 0.0
    for left, top, right, bottom in cell_boxes(width, height, grid):
        short, long = sorted((right - left, bottom - top))
        # The order of division and product is the authors'; it decides ties.
        covered += side * (short / long * side) if long > side else long * short
    return covered / (width * height)


def choose_grid(
    width: int, height: int, side: int, max_partition: int = 9, threshold: float = 0.9
) -> Grid:
    """Choose (rows, cols): the fewest tiles which keep enough of the picture.

    Raises:
        ValueError: max_partition is below 1.

    """
    if max_partition < 1:
        raise ValueError(f"max_partition must be at least 1, got {max_partition}")
    grids = [
        (rows, cols)
        for rows in range(1, max_partition + 1)
        for cols in range(1, max_partition + 1)
        if rows * cols <= max_partition
    ]
    ratios = {grid: covering_ratio(width, height, grid, side) for grid in grids}
    good = [grid for grid in grids if ratios[grid] > threshold]
    if good:
        return min(good, key=lambda g: (g[0] * g[1], -ratios[g]))
    return min(grids, key=lambda g: (-ratios[g], g[0] * g[1]))


def fitted_size(width: int, height: int, side: int) -> tuple[int, int]:
    """Size of a cell inside its tile: the long side filled, the short one truncated.

    Raises:
        ValueError: The short side would vanish (golden case size_1000x1).

    """
    if width == height:
        fitted = (side, side)
    elif width > height:
        fitted = (side, int(height / width * side))
    else:
        fitted = (int(width / height * side), side)
    if 0 in fitted:
        raise ValueError(
            f"a {width}x{height} pixel cell shrinks to {fitted[0]}x{fitted[1]} pixels "
            f"in a tile of side {side}; height and width must be > 0"
        )
    return fitted


def tile_pixels(cell: Image.Image, rule: PixelRule) -> np.ndarray:
    """Resize, normalise and centre one RGB cell.

    Returns:
        float32 [3, side, side]; zero (after normalisation) outside the picture.

    """
    width, height = fitted_size(*cell.size, rule.side)
    resized = cell.resize((width, height), Image.Resampling.BICUBIC)
    values = (np.asarray(resized) * rule.scale).astype(np.float32)
    values -= np.asarray(rule.mean, np.float32)
    values /= np.asarray(rule.std, np.float32)
    left, top = (rule.side - width) // 2, (rule.side - height) // 2
    canvas = np.zeros((3, rule.side, rule.side), dtype=np.float32)
    canvas[:, top : top + height, left : left + width] = values.transpose(2, 0, 1)
    return canvas


def placeholder_ids(grid: Grid) -> list[int]:
    """Ids which stand for one image in the prompt: ATOM is a tile, the rest marks."""
    rows, cols = grid
    ids = [START, ATOM, PREFIX]
    if rows * cols > 1:
        for row in range(rows):
            if row:
                ids.append(ROW)
            for col in range(cols):
                if col:
                    ids.append(COLUMN)
                ids.append(ATOM)
    return [*ids, END]


def preprocess(
    image: Image.Image, rule: PixelRule, max_partition: int = 9
) -> tuple[np.ndarray, Grid]:
    """Turn a picture into tiles: the overview first, then the cells of the grid.

    Args:
        image: Picture in any Pillow mode; converted to RGB, alpha is dropped.
        rule: Pixel rule of the checkpoint.
        max_partition: Upper limit of rows * cols.

    Returns:
        float32 [tiles, 3, side, side] and the grid (rows, cols).

    """
    image = image.convert("RGB")
    grid = choose_grid(*image.size, rule.side, max_partition)
    cells = [image.crop(box) for box in cell_boxes(*image.size, grid)]
    if len(cells) > 1:
        cells.insert(0, image)
    return np.stack([tile_pixels(cell, rule) for cell in cells]), grid
