# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Grid, boxes, sizes and token layout: golden cases and properties."""

import json
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from vllm.models.ovis.tiling import (
    TILE,
    Indicator,
    choose_grid,
    fit_size,
    largest_grid,
    num_image_tokens,
    num_tiles,
    tile_boxes,
    token_layout,
    tokens_per_tile,
    worst_case_image_size,
)

GOLDEN = Path(__file__).parents[2] / "golden" / "ovis2"
SIDES = {"tiny-ovis2": 112, "tiny-ovis1.6-llama": 112, "tiny-ovis1.6-gemma2": 104}
# The reference's ids of Indicator values and TILE.
REFERENCE_IDS = {-301: 0, -302: 1, -303: 2, -304: 3, -305: 4, -300: TILE}

SIZES = st.integers(1, 5000)
SIDE = st.sampled_from([14, 104, 112, 384, 448])
PARTITION = st.integers(1, 30)
THRESHOLD = st.one_of(st.just(0.9), st.floats(0, 1))


def golden_images():
    for case in json.loads((GOLDEN / "cases.json").read_text()):
        pairs = zip(case["images"], case["expected"].get("images", []))
        for index, (image, expected) in enumerate(pairs):
            name = f"{case['checkpoint']}-{case['name']}-{index}"
            yield pytest.param(case, image, expected, id=name)


@pytest.mark.parametrize(("case", "image", "expected"), list(golden_images()))
def test_golden_grid_and_layout(case, image, expected):
    side = SIDES[case["checkpoint"]]
    width, height = image["w"], image["h"]
    rows, cols = choose_grid(width, height, side, case["max_partition"])

    if "exception" in expected:
        boxes = tile_boxes(width, height, rows, cols)
        if "height and width must be > 0" in expected["exception"]["message"]:
            with pytest.raises(ValueError, match="too thin"):
                for left, top, right, bottom in boxes:
                    fit_size(right - left, bottom - top, side)
        else:  # The reference mistakes one row for one channel; we must not.
            assert [fit_size(r - le, b - t, side) for le, t, r, b in boxes]
        return
    assert [rows, cols] == expected["grid"]
    assert num_tiles(rows, cols) == expected["tiles"]
    layout = token_layout(rows, cols)
    assert layout == [REFERENCE_IDS[i] for i in expected["placeholder_ids"]]


def reference_grid(width, height, side, max_partition, threshold):
    """The rule of NOTES.md, as slowly as it is written there."""
    rated = []
    for rows in range(1, max_partition + 1):
        for cols in range(1, max_partition + 1):
            if rows * cols > max_partition:
                continue
            total = 0.0
            for i in range(rows):
                for j in range(cols):
                    w, h = width // cols, height // rows
                    w = w if j < cols - 1 else width - w * (cols - 1)
                    h = h if i < rows - 1 else height - h * (rows - 1)
                    a, b = max(w, h), min(w, h)
                    if a > side:
                        a, b = side, b / a * side
                    total += a * b
            rated.append((rows, cols, total / (width * height)))
    good = [item for item in rated if item[2] > threshold]
    if good:
        best = min(good, key=lambda item: (item[0] * item[1], -item[2]))
    else:
        best = min(rated, key=lambda item: (-item[2], item[0] * item[1]))
    return best[:2]


@settings(max_examples=300, deadline=None)
@given(SIZES, SIZES, SIDE, PARTITION, THRESHOLD)
def test_grid_follows_the_written_rule(width, height, side, max_partition, threshold):
    grid = choose_grid(width, height, side, max_partition, threshold)
    assert grid == reference_grid(width, height, side, max_partition, threshold)


@pytest.mark.parametrize("edge", [957, 958, 961, 963, 973, 993, 1000, 1024])
def test_square_pictures_follow_the_rounding_of_the_sum(edge):
    """(2, 3) and (3, 2) cover the same area; the order of addition decides."""
    assert choose_grid(edge, edge, 448, 6) == reference_grid(edge, edge, 448, 6, 0.9)


def test_rounding_really_decides_some_squares():
    grids = {choose_grid(edge, edge, 448, 6) for edge in range(957, 1025)}
    assert {(2, 3), (3, 2)} <= grids


@settings(max_examples=300, deadline=None)
@given(SIZES, SIZES, SIDE, PARTITION, THRESHOLD)
def test_boxes_tile_the_picture_exactly(width, height, side, max_partition, threshold):
    rows, cols = choose_grid(width, height, side, max_partition, threshold)
    assert rows * cols <= max_partition
    boxes = tile_boxes(width, height, rows, cols)
    assert len(boxes) == num_tiles(rows, cols)
    cells = boxes[1:] if len(boxes) > 1 else boxes
    assert boxes[0] == (0, 0, width, height)
    assert len(cells) == rows * cols
    right = bottom = 0
    for index, cell in enumerate(cells):
        row, col = divmod(index, cols)
        assert cell[0] == (right if col else 0)
        if col == 0:
            assert cell[1] == (bottom if row else 0)
        else:
            assert cell[1] == cells[index - 1][1]
        assert cell[2] > cell[0] and cell[3] > cell[1]
        right, bottom = cell[2], cell[3]
        assert right == width or col < cols - 1
        assert bottom == height or row < rows - 1


@given(SIZES, SIZES, SIDE)
def test_fitted_long_side_is_the_tile_side(width, height, side):
    assume(max(width, height) <= side * min(width, height))
    fitted_width, fitted_height = fit_size(width, height, side)
    assert (fitted_width if width >= height else fitted_height) == side
    # Truncation of a float quotient: at most one below the exact quotient.
    exact = min(width, height) * side // max(width, height)
    assert exact - 1 <= min(fitted_width, fitted_height) <= exact


@pytest.mark.parametrize(
    ("width", "height", "fitted"),
    [(640, 480, (448, 336)), (480, 640, (336, 448)), (5, 5, (448, 448))],
)
def test_fit_size_examples(width, height, fitted):
    assert fit_size(width, height, 448) == fitted


@pytest.mark.parametrize("size", [(1000, 1), (1, 1000), (4000, 5), (5, 4000)])
def test_too_thin_is_refused_with_the_numbers(size):
    width, height = size
    with pytest.raises(ValueError, match=rf"{width}x{height} pixels.*must not .*112:1"):
        fit_size(width, height, 112)


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 300))
def test_layout_and_token_count_agree(rows, cols, tokens_per_tile):
    layout = token_layout(rows, cols)
    assert all(type(item) is int for item in layout)
    tiles = layout.count(TILE)
    assert tiles == num_tiles(rows, cols)
    expanded = len(layout) - tiles + tiles * tokens_per_tile
    assert expanded == num_image_tokens(rows, cols, tokens_per_tile)
    assert layout.count(Indicator.ROW) == rows - 1
    assert layout.count(Indicator.COLUMN) == rows * (cols - 1)
    assert layout[0] == Indicator.START and layout[-1] == Indicator.END


@pytest.mark.parametrize(
    ("side", "tokens"), [(448, 256), (384, 196), (112, 16), (104, 16), (27, 1)]
)
def test_tokens_per_tile(side, tokens):
    assert tokens_per_tile(side, 14, 2) == tokens


def test_tile_smaller_than_a_patch_is_refused():
    with pytest.raises(ValueError, match="no patch of 14 pixels fits a tile of 13"):
        tokens_per_tile(13, 14, 2)


def test_token_counts_of_the_published_models():
    assert num_image_tokens(1, 1, 256) == 259
    assert num_image_tokens(3, 3, 256) == 2571
    assert token_layout(1, 1) == [0, -1, 1, 4]
    assert token_layout(1, 2) == [0, -1, 1, -1, 2, -1, 4]
    assert token_layout(2, 1) == [0, -1, 1, -1, 3, -1, 4]


@pytest.mark.parametrize("side", [104, 112, 384, 448])
@pytest.mark.parametrize("max_partition", range(1, 65))
def test_worst_case_reaches_the_most_tokens(side, max_partition):
    width, height = worst_case_image_size(side, max_partition)
    rows, cols = choose_grid(width, height, side, max_partition)
    most = num_image_tokens(*largest_grid(max_partition), 256)
    assert num_image_tokens(rows, cols, 256) == most
    for left, top, right, bottom in tile_boxes(width, height, rows, cols):
        fit_size(right - left, bottom - top, side)  # Legal: none is too thin.


def test_worst_case_is_small():
    width, height = worst_case_image_size(448, 9)
    assert width * height < 448 * 448
    assert choose_grid(width - 1, height, 448, 9) != (1, 9)


@pytest.mark.parametrize("max_partition", [29, 37, 64])
def test_worst_case_of_more_cells_than_pixels_in_a_side(max_partition):
    """A prime number of cells beyond `side` needs a strip which is too thin."""
    width, height = worst_case_image_size(14, max_partition)
    rows, cols = choose_grid(width, height, 14, max_partition)
    assert rows * cols == {29: 28, 37: 36, 64: 64}[max_partition]


@given(SIZES, SIZES, SIDE, PARTITION)
def test_no_picture_needs_more_than_the_largest_grid(width, height, side, partition):
    rows, cols = choose_grid(width, height, side, partition)
    most = num_image_tokens(*largest_grid(partition), 7)
    assert num_image_tokens(rows, cols, 7) <= most


def test_very_large_partitions_stay_usable():
    """Candidates grow as P log P; summing each cell by cell would take P squared."""
    assert choose_grid(448 * 50, 448 * 40, 448, 2000) == reference_strip(50, 40)


def reference_strip(cols, rows):
    """Fewest square-ish cells whose covered share exceeds 0.9: found by hand search."""
    best = None
    for r in range(1, rows + 1):
        for c in range(1, cols + 1):
            w, h = 448 * cols / c, 448 * rows / r
            ratio = min(1.0, 448 / max(w, h)) ** 2
            if ratio > 0.9 and (best is None or (r * c, -ratio) < best[:2]):
                best = (r * c, -ratio, r, c)
    assert best is not None
    return best[2:]


@pytest.mark.parametrize(
    "arguments",
    [
        {"width": 0},
        {"height": -1},
        {"side": 0},
        {"max_partition": 0},
    ],
)
def test_sizes_below_one_are_refused_by_name(arguments):
    (name,) = arguments
    good = {"width": 10, "height": 10, "side": 14, "max_partition": 9}
    with pytest.raises(ValueError, match=f"{name} must be at least 1"):
        choose_grid(**good | arguments)


def test_boxes_without_pixels_are_refused():
    with pytest.raises(ValueError, match="2x9 pixels .* 1 rows and 3 columns"):
        tile_boxes(2, 9, 1, 3)
