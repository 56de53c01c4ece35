# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""How Ovis 1.6 and Ovis 2 cut a picture into tiles, and which tokens come of it.

Pure arithmetic on sizes: no pixels, no torch, no engine. Everything that must know
how many tokens a picture costs asks here, so the answer cannot differ between the
processor, the scheduler's budget and the model.

The rules are the authors' behaviour as recorded in `tests/golden/ovis2/NOTES.md`
("Grid", "Tiles", "Placeholder ids"), checked by every golden case with an image.
"""

import enum
from collections.abc import Iterator
from functools import lru_cache

IMAGE_MARKER = "<image>"
"""The text that marks where a picture goes; never tokenised itself."""

TILE = -1
"""Stands for one tile (many tokens) in a token layout."""

DEFAULT_MAX_PARTITION = 9
DEFAULT_COVERING_THRESHOLD = 0.9

# Closed and sequential sums of areas differ by rounding only, about 1e-16 per cell;
# candidates closer than this are compared by the authors' own sum.
_ROUNDING = 1e-9

Box = tuple[int, int, int, int]


class Indicator(enum.IntEnum):
    """Tokens which structure the tiles of one picture.

    The values are the order of the last five rows of the visual embedding table:
    indicator `i` is row `V - 5 + i` (measured in all golden cases with an image).
    """

    START = 0
    PREFIX = 1
    COLUMN = 2
    ROW = 3
    END = 4


def _require_positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


@lru_cache(maxsize=64)
def _candidates(max_partition: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """All grids of up to `max_partition` cells, grouped by number of cells, ascending.

    Inside a group rows ascend, which is the order in which the authors generate them;
    that order decides the last ties.
    """
    groups: list[list[tuple[int, int]]] = [[] for _ in range(max_partition + 1)]
    for rows in range(1, max_partition + 1):
        for cols in range(1, max_partition // rows + 1):
            groups[rows * cols].append((rows, cols))
    return tuple(tuple(group) for group in groups[1:])


def _covered_area(width: int, height: int, side: int) -> float:
    """Pixels of a cell that survive once its long side is cut down to `side`."""
    long, short = (width, height) if width > height else (height, width)
    if long <= side:
        return long * short
    # Quotient before product: the order of the authors' floats.
    return side * (short / long * side)


class _Cells:
    """The (at most four) different cells of one grid and what they cover."""

    def __init__(self, width: int, height: int, side: int, rows: int, cols: int):
        w, h = width // cols, height // rows
        last_w, last_h = width - w * (cols - 1), height - h * (rows - 1)
        self.rows, self.cols = rows, cols
        self.picture = width * height
        self.inner = _covered_area(w, h, side)
        self.right = _covered_area(last_w, h, side)
        self.bottom = _covered_area(w, last_h, side)
        self.corner = _covered_area(last_w, last_h, side)

    def ratio(self) -> float:
        """Covered share of the picture, correct up to rounding, in constant time."""
        upper = self.inner * (self.cols - 1) + self.right
        lower = self.bottom * (self.cols - 1) + self.corner
        return (upper * (self.rows - 1) + lower) / self.picture

    def summed_ratio(self) -> float:
        """The same share, added cell by cell as the authors add it.

        A square picture gives (2, 3) and (3, 2) the same cells in another order: the
        rounding of this sum, not geometry, then decides between the two. Written out
        because `sum` compensates rounding from Python 3.12 on.
        """
        total = 0.0
        for row in range(self.rows):
            cell, last = (
                (self.inner, self.right)
                if row < self.rows - 1
                else (self.bottom, self.corner)
            )
            for _ in range(self.cols - 1):
                total += cell
            total += last
        return total / self.picture


def _best(
    cells: list[tuple[float, _Cells]], above: float | None = None
) -> _Cells | None:
    """Cells with the largest summed ratio (first one on ties), if it exceeds `above`.

    Only contenders within rounding of the best are summed cell by cell.
    """
    limit = max(ratio for ratio, _ in cells) - _ROUNDING
    winner, largest = None, -1.0 if above is None else above
    for ratio, candidate in cells:
        if ratio < limit:
            continue
        exact = candidate.summed_ratio()
        if exact > largest:
            winner, largest = candidate, exact
    return winner


@lru_cache(maxsize=4096)
def choose_grid(
    width: int,
    height: int,
    side: int,
    max_partition: int = DEFAULT_MAX_PARTITION,
    covering_threshold: float = DEFAULT_COVERING_THRESHOLD,
) -> tuple[int, int]:
    """Choose into how many rows and columns a picture is cut.

    A grid's covering ratio is the share of the picture's pixels that is left after
    each cell with a long side above `side` is shrunk to `side`. Among the grids whose
    ratio exceeds the threshold the one with fewest cells wins, then the larger ratio,
    then the fewer rows. If none exceeds it: the largest ratio, then the fewest cells,
    then the fewer rows (authors' behaviour, every golden case with an image).

    Args:
        width: Width of the upright picture in pixels.
        height: Height of the upright picture in pixels.
        side: Side of a square tile in pixels.
        max_partition: Most cells allowed.
        covering_threshold: Ratio that is good enough. At 0 one cell always is; at 1
            none ever is, so that the largest ratio decides.

    Returns:
        `(rows, cols)`, `rows * cols <= max_partition`.

    Raises:
        ValueError: A size or `max_partition` is below 1.

    """
    _require_positive(
        width=width, height=height, side=side, max_partition=max_partition
    )
    everything: list[tuple[float, _Cells]] = []
    for group in _candidates(max_partition):
        cells = [_Cells(width, height, side, rows, cols) for rows, cols in group]
        rated = [(cell.ratio(), cell) for cell in cells]
        if max(ratio for ratio, _ in rated) > covering_threshold - _ROUNDING:
            winner = _best(rated, above=covering_threshold)
            if winner is not None:
                return winner.rows, winner.cols
        everything += rated
    winner = _best(everything)
    assert winner is not None
    return winner.rows, winner.cols


def num_tiles(rows: int, cols: int) -> int:
    """Tiles of a grid: its cells, and an overview if there is more than one cell."""
    cells = rows * cols
    return cells if cells == 1 else cells + 1


def tile_boxes(width: int, height: int, rows: int, cols: int) -> list[Box]:
    """Rectangles of the picture that become tiles.

    Args:
        width: Width of the upright picture in pixels.
        height: Height of the upright picture in pixels.
        rows: Rows of the grid, at most `height`.
        cols: Columns of the grid, at most `width`.

    Returns:
        `(left, top, right, bottom)` of each tile, the overview (the whole picture)
        first if there is more than one cell, then the cells row by row. The last row
        and the last column take the remainder.

    Raises:
        ValueError: A size is below 1 or a cell would have no pixels.

    """
    _require_positive(width=width, height=height, rows=rows, cols=cols)
    if rows > height or cols > width:
        raise ValueError(
            f"a picture of {width}x{height} pixels has fewer pixels than a grid of "
            f"{rows} rows and {cols} columns has cells"
        )
    w, h = width // cols, height // rows
    lefts = [w * col for col in range(cols)] + [width]
    tops = [h * row for row in range(rows)] + [height]
    cells = [
        (lefts[col], tops[row], lefts[col + 1], tops[row + 1])
        for row in range(rows)
        for col in range(cols)
    ]
    return cells if len(cells) == 1 else [(0, 0, width, height), *cells]


def fit_size(width: int, height: int, side: int) -> tuple[int, int]:
    """Size of a rectangle once its long side is stretched or shrunk to `side`.

    The short side is `int(short / long * side)`, truncated, in this order of float
    operations (authors' behaviour, golden cases size_113x111, size_500x19).

    Returns:
        `(width, height)` in pixels.

    Raises:
        ValueError: A size is below 1, or the short side would have no pixels (the
            authors fail too: golden cases size_1000x1, size_4000x5).

    """
    _require_positive(width=width, height=height, side=side)
    if width == height:
        return side, side
    if width > height:
        fitted = side, int(height / width * side)
    else:
        fitted = int(width / height * side), side
    if 0 in fitted:
        raise ValueError(
            f"an image or tile of {width}x{height} pixels is too thin: resized to a "
            f"long side of {side} pixels its short side has none; the ratio of the "
            f"sides must not exceed {side}:1"
        )
    return fitted


def token_layout(rows: int, cols: int) -> list[int]:
    """Order of tiles and indicators which stand for one picture.

    Args:
        rows: Rows of the grid.
        cols: Columns of the grid.

    Returns:
        `Indicator` values and `TILE`, as plain integers. The first tile is the overview
        (or the only tile), the others are the cells row by row. 1x1 is
        `[START, TILE, PREFIX, END]`; 1x2 is
        `[START, TILE, PREFIX, TILE, COLUMN, TILE, END]`.

    """
    _require_positive(rows=rows, cols=cols)
    layout: list[int] = [Indicator.START, TILE, Indicator.PREFIX]
    if rows * cols > 1:
        for row in range(rows):
            if row:
                layout.append(Indicator.ROW)
            layout.append(TILE)
            layout += [Indicator.COLUMN, TILE] * (cols - 1)
    layout.append(Indicator.END)
    return [int(item) for item in layout]


def tokens_per_tile(side: int, patch_size: int, hidden_stride: int) -> int:
    """Tokens of one tile: whole patches, merged in squares of `hidden_stride`.

    A patch grid that `hidden_stride` does not divide is padded, hence rounded up:
    384, 14, 2 gives 196; 448, 14, 2 gives 256.

    Raises:
        ValueError: An argument is below 1, or no patch fits into a tile.

    """
    _require_positive(side=side, patch_size=patch_size, hidden_stride=hidden_stride)
    if side < patch_size:
        raise ValueError(f"no patch of {patch_size} pixels fits a tile of {side}")
    return (-(-(side // patch_size) // hidden_stride)) ** 2


def num_image_tokens(rows: int, cols: int, tokens_per_tile: int) -> int:
    """Tokens one picture takes in the prompt, indicators included.

    Cells are parted by one separator each, whatever the shape of the grid, so the
    number depends on `rows * cols` alone.
    """
    _require_positive(rows=rows, cols=cols, tokens_per_tile=tokens_per_tile)
    separators = rows * cols - 1
    return num_tiles(rows, cols) * tokens_per_tile + separators + 3


def largest_grid(max_partition: int) -> tuple[int, int]:
    """A grid with the most tiles, and so the most tokens, allowed: one row of cells."""
    _require_positive(max_partition=max_partition)
    return 1, max_partition


@lru_cache(maxsize=64)
def worst_case_image_size(side: int, max_partition: int) -> tuple[int, int]:
    """Size of a small picture that really is cut into the most cells.

    A strip is enough: only the long side of a cell counts for covering, so a strip is
    cut along its length, and it needs just the height that leaves the overview one
    pixel. If `max_partition` exceeds `side`, a strip that long would be refused, and
    blocks of square cells take its place, with fewer cells where the number of cells
    has no factors (a prime above `side`).

    Args:
        side: Side of a square tile in pixels.
        max_partition: Most cells allowed.

    Returns:
        `(width, height)` in pixels of a picture that `choose_grid` cuts, at the default
        threshold, into the most cells that any legal picture of ours is cut into.

    Raises:
        ValueError: An argument is below 1.

    """
    _require_positive(side=side, max_partition=max_partition)
    for cells in range(max_partition, 1, -1):
        for width, height in _hard_sizes(side, cells):
            rows, cols = choose_grid(width, height, side, max_partition)
            if rows * cols == cells and _is_legal(width, height, side, rows, cols):
                return width, height
    return 1, 1


def _hard_sizes(side: int, cells: int) -> Iterator[tuple[int, int]]:
    """Sizes likely to be cut into exactly `cells` cells, small ones first."""
    # One cell less covers exactly the threshold at this width.
    width = int(side * (cells - 1) / DEFAULT_COVERING_THRESHOLD**0.5)
    for extra in range(cells + 2):
        height = -(-(width + extra) // side)
        yield width + extra, height
        yield width + extra, height + 1
    for rows in range(1, int(cells**0.5) + 1):
        if cells % rows == 0:
            # Square cells too large to be covered: any other grid covers less.
            cell = side + side // 8 + 1
            yield cells // rows * cell, rows * cell


def _is_legal(width: int, height: int, side: int, rows: int, cols: int) -> bool:
    try:
        for left, top, right, bottom in tile_boxes(width, height, rows, cols):
            fit_size(right - left, bottom - top, side)
    except ValueError:
        return False
    return True
