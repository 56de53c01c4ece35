# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Show what an Ovis model will see of a picture.

python -m vllm.models.ovis.inspect IMAGE [--max-partition N] [--side PIXELS]
                                         [--model PATH] [--output PNG]

Prints size, grid, tiles and tokens, and writes the upright picture with its grid.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from .images import to_rgb
from .processor import OvisProcessor, validate_image_kwargs
from .tiling import (
    DEFAULT_MAX_PARTITION,
    TILE,
    Indicator,
    choose_grid,
    fit_size,
    num_image_tokens,
    tile_boxes,
    token_layout,
    tokens_per_tile,
)

# Of Ovis2; a checkpoint given with --model speaks for itself.
_SIDE = 448
_PATCH_SIZE = 14
_HIDDEN_STRIDE = 2
# A drawing smaller than this is enlarged, so that lines do not hide the picture.
_SMALLEST_DRAWING = 448


def describe(
    width: int, height: int, side: int, per_tile: int, max_partition: int
) -> str:
    """Text about the tiles and tokens of a picture.

    Args:
        width: Width of the upright picture in pixels.
        height: Height of the upright picture in pixels.
        side: Side of a square tile in pixels.
        per_tile: Tokens of a tile.
        max_partition: Most cells allowed.

    Raises:
        ValueError: The picture is too thin to be resized.

    """
    rows, cols = choose_grid(width, height, side, max_partition)
    boxes = tile_boxes(width, height, rows, cols)
    lines = [
        f"picture  {width} x {height} pixels, upright",
        f"grid     {rows} x {cols} (rows x columns; at most {max_partition} cells, "
        f"tiles of {side} x {side} pixels)",
        f"tiles    {len(boxes)}, of {per_tile} tokens each",
    ]
    for index, (left, top, right, bottom) in enumerate(boxes):
        w, h = fit_size(right - left, bottom - top, side)
        name = "overview" if len(boxes) > 1 and index == 0 else f"cell {index or 1}"
        lines.append(
            f"  {name:<9} left {left}, top {top}, right {right}, bottom {bottom}: "
            f"{right - left} x {bottom - top} -> {w} x {h}"
        )
    layout = " ".join(
        f"[{per_tile}]" if item == TILE else Indicator(item).name.lower()
        for item in token_layout(rows, cols)
    )
    lines.append(f"tokens   {num_image_tokens(rows, cols, per_tile)} = {layout}")
    return "\n".join(lines)


def draw_grid(image: Image.Image, side: int, max_partition: int) -> Image.Image:
    """Copy of a picture with the outlines and numbers of its cells.

    Args:
        image: Upright picture in mode RGB.
        side: Side of a square tile in pixels.
        max_partition: Most cells allowed.

    Returns:
        RGB; enlarged by a whole number if the picture is small.

    """
    width, height = image.size
    rows, cols = choose_grid(width, height, side, max_partition)
    cells = tile_boxes(width, height, rows, cols)[-rows * cols :]
    scale = max(1, _SMALLEST_DRAWING // max(width, height))
    canvas = image.resize((width * scale, height * scale), Image.Resampling.NEAREST)
    drawing = ImageDraw.Draw(canvas)
    line = max(1, max(canvas.size) // 400)
    font = ImageFont.load_default(size=max(10, max(canvas.size) // 30))
    for number, cell in enumerate(cells, start=1):
        left, top, right, bottom = (edge * scale for edge in cell)
        # Light in dark lines: visible on every picture.
        outline = (left, top, right - 1, bottom - 1)
        drawing.rectangle(outline, outline="black", width=3 * line)
        inner = (left + line, top + line, right - 1 - line, bottom - 1 - line)
        if inner[0] < inner[2] and inner[1] < inner[3]:
            drawing.rectangle(inner, outline="yellow", width=line)
        drawing.text(
            (left + 5 * line, top + 4 * line),
            str(number),
            font=font,
            fill="yellow",
            stroke_width=max(1, line),
            stroke_fill="black",
        )
    return canvas


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; ends the process with a message on bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m vllm.models.ovis.inspect",
        description="Show how an Ovis model cuts a picture into tiles.",
    )
    parser.add_argument("image", type=Path, help="the picture")
    parser.add_argument(
        "--max-partition",
        type=int,
        default=DEFAULT_MAX_PARTITION,
        metavar="N",
        help="most cells (default: %(default)s)",
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--side",
        type=int,
        default=_SIDE,
        help="side of a tile in pixels (default: %(default)s, as in Ovis2)",
    )
    source.add_argument("--model", help="take the side from this checkpoint")
    parser.add_argument(
        "--output",
        type=Path,
        help="PNG to write (default: NAME.tiles.png in the current folder)",
    )
    options = parser.parse_args(arguments)
    try:
        partition, _ = validate_image_kwargs(
            {"max_partition": options.max_partition}, None
        )
        if options.model is None:
            side = options.side
            per_tile = tokens_per_tile(side, _PATCH_SIZE, _HIDDEN_STRIDE)
        else:
            processor = OvisProcessor.from_pretrained(options.model)
            side = processor.image_settings.side
            per_tile = processor.tokens_per_tile
        with Image.open(options.image) as opened:
            picture = to_rgb(opened)
            print(describe(*picture.size, side, per_tile, partition))
            drawing = draw_grid(picture, side, partition)
        output = options.output or Path(f"{options.image.stem}.tiles.png")
        drawing.save(output, "PNG")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(f"drawing  {output}")


if __name__ == "__main__":
    main()
