# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Error along the data path as an SVG picture, written by hand: no library needed."""

import math
from collections.abc import Sequence
from html import escape

from . import trace
from .records import FAILED
from .tables import Row

WIDTH, HEIGHT = 960, 420
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 50, 110
COLOURS = {"float32": "#1b6ca8", "bfloat16": "#c8553d", "float16": "#3c8d4f"}
FLOOR = 1e-8
"""Errors below are drawn here: a logarithm has no place for zero."""


def path_rows(rows: Sequence[Row], dtype: str) -> dict[str, Row]:
    """Records of one dtype by name, stages and layers with a real-valued error."""
    skipped = (trace.PIXELS, trace.IDS, trace.GREEDY)
    return {
        row["name"]: row
        for row in rows
        if row["report"] in ("stages", "layers")
        and row["dtype"] == dtype
        and row["verdict"] != FAILED
        and row["name"] not in skipped
    }


def svg(rows: Sequence[Row], title: str) -> str:
    """Draw errors of layers and stages, one colour a dtype.

    Solid: the engine, to the float32 reference. Dashed: how far the reference itself
    goes, by rounding in that dtype, or in float32 by another attention.

    Raises:
        ValueError: No record has a place on the data path.

    """
    dtypes = [d for d in COLOURS if path_rows(rows, d)]
    if not dtypes:
        raise ValueError("nothing to draw: the report has no stages")
    present = path_rows(rows, dtypes[0])
    layers = [name.split()[0] for name in present if "layer" in name]
    names = trace.data_path(layers.count("tower"), layers.count("text"))
    values = [
        value
        for dtype in dtypes
        for name in names
        for value in _values(path_rows(rows, dtype)[name], dtype)
    ]
    low = math.floor(math.log10(max(FLOOR, min(values))))
    high = math.ceil(math.log10(max(values)))
    inner_width, inner_height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def x(index: int) -> float:
        return LEFT + inner_width * (index + 0.5) / len(names)

    def y(value: float) -> float:
        exponent = math.log10(max(value, FLOOR))
        return TOP + inner_height * (high - exponent) / max(1, high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14">{escape(title)}</text>',
    ]
    for exponent in range(low, high + 1):
        level = y(10.0**exponent)
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{level:.1f}" y2="{level:.1f}" '
            'stroke="#ddd"/>'
            f'<text x="{LEFT - 8}" y="{level + 4:.1f}" text-anchor="end">'
            f"1e{exponent}</text>"
        )
    for index, name in enumerate(names):
        if "layer" not in name or int(name.split()[-1]) % 4 == 0:
            place = f"translate({x(index) + 4:.1f},{HEIGHT - BOTTOM + 12})"
            parts.append(
                f'<text transform="{place} '
                f'rotate(-60)" text-anchor="end">{escape(name)}</text>'
            )
    for order, dtype in enumerate(dtypes):
        found = path_rows(rows, dtype)
        for line, dash in enumerate(("", ' stroke-dasharray="5 4"')):
            points = " ".join(
                f"{x(i):.1f},{y(_values(found[name], dtype)[line]):.1f}"
                for i, name in enumerate(names)
            )
            parts.append(
                f'<polyline points="{points}" fill="none" stroke-width="2" '
                f'stroke="{COLOURS[dtype]}"{dash}/>'
            )
        parts.append(
            f'<text x="{LEFT + 140 * order}" y="40" fill="{COLOURS[dtype]}">'
            f"{dtype}</text>"
        )
    parts.append(
        f'<text x="{WIDTH - RIGHT}" y="40" text-anchor="end">'
        "solid: engine, dashed: reference itself</text></svg>\n"
    )
    return "\n".join(parts)


def _values(row: Row, dtype: str) -> tuple[float, float]:
    """Error of the engine, and how far the reference itself goes."""
    if dtype == "float32":
        return row["relative"], row["noise_floor"]
    return row["against_float32"], row["reference_against_float32"]
