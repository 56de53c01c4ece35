# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the engine passes to the encoder: the tiles of one batch of items."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch

from vllm.utils.tensor_schema import TensorSchema, TensorShape

from .tiling import num_image_tokens, num_tiles

TILE_FIELDS = ("pixel_values", "normalized_tiles", "video_pixels")
"""Fields of an item whose first dimension counts its tiles."""

RECTANGLE_FIELDS = ("rectangles", "video_rectangles")
"""Fields beside them, one row per tile."""


class OvisImageInputs(TensorSchema):
    """Tiles of all images of a batch.

    Dimensions:
        - n: tiles of all images
        - s: side of a tile in pixels
        - i: images
    """

    pixel_values: Annotated[torch.Tensor, TensorShape("n", "s", "s", 3)]
    """uint8, zero outside each tile's picture."""
    rectangles: Annotated[torch.Tensor, TensorShape("n", 4)]
    """int32: top, left, height, width of the picture in each tile."""
    grids: Annotated[torch.Tensor, TensorShape("i", 2)]
    """Rows and columns of each image's grid, on the CPU."""


class OvisNormalizedInputs(TensorSchema):
    """Tiles that a client normalised.

    Dimensions:
        - n: tiles of all images
        - s: side of a tile in pixels
        - i: images
    """

    normalized_tiles: Annotated[torch.Tensor, TensorShape("n", 3, "s", "s")]
    """float32, zero outside each tile's picture."""
    grids: Annotated[torch.Tensor, TensorShape("i", 2)]
    """Rows and columns of each image's grid, on the CPU."""


class OvisVideoInputs(TensorSchema):
    """Frames of all videos of a batch, one tile each.

    Dimensions:
        - n: frames of all videos
        - s: side of a tile in pixels
        - v: videos
    """

    video_pixels: Annotated[torch.Tensor, TensorShape("n", "s", "s", 3)]
    """uint8, zero outside each frame's picture."""
    video_rectangles: Annotated[torch.Tensor, TensorShape("n", 4)]
    """int32: top, left, height, width of the picture in each tile."""
    video_frames: Annotated[torch.Tensor, TensorShape("v")]
    """Number of frames of each video, on the CPU."""


@dataclass(frozen=True)
class TileBatch:
    """Tiles of a batch of items, all of one kind."""

    pixels: torch.Tensor
    """uint8, [tiles, side, side, 3], or float32, [tiles, 3, side, side]."""
    rectangles: torch.Tensor
    """int32, [tiles, 4]: top, left, height and width of the picture in each tile."""
    grids: Sequence[Sequence[Sequence[int]]]
    """Per item, rows and columns of its pictures: an image is one, a video's frames
    are 1x1 each."""

    @property
    def tiles_per_item(self) -> list[int]:
        """Number of tiles of each item."""
        return [sum(num_tiles(*grid) for grid in item) for item in self.grids]

    def lengths(self, tokens_per_tile: int) -> list[int]:
        """Number of embeddings of each item, indicators among them."""
        return [
            sum(num_image_tokens(rows, cols, tokens_per_tile) for rows, cols in item)
            for item in self.grids
        ]


def tile_batch(fields: Mapping[str, Any], validate: bool = True) -> TileBatch | None:
    """Read a batch of items from what the engine passes to the model.

    Args:
        fields: Fields of items of one kind: images, ready tiles, or videos.
        validate: Whether to check their shapes, which takes longer than reading.

    Returns:
        The batch; None if the fields hold no tiles.

    Raises:
        ValueError: If a field has a shape that this kind does not allow.

    """
    if fields.get("video_frames") is not None:
        videos = OvisVideoInputs(
            validate=validate,
            video_pixels=fields["video_pixels"],
            video_rectangles=fields["video_rectangles"],
            video_frames=fields["video_frames"],
        )
        grids = [[(1, 1)] * count for count in videos["video_frames"].tolist()]
        return TileBatch(videos["video_pixels"], videos["video_rectangles"], grids)
    if fields.get("normalized_tiles") is not None:
        ready = OvisNormalizedInputs(
            validate=validate,
            normalized_tiles=fields["normalized_tiles"],
            grids=fields["grids"],
        )
        pixels = ready["normalized_tiles"]
        rectangles = pixels.new_zeros(len(pixels), 4, dtype=torch.int32)
        return TileBatch(pixels, rectangles, [[g] for g in ready["grids"].tolist()])
    if fields.get("pixel_values") is not None:
        images = OvisImageInputs(
            validate=validate,
            pixel_values=fields["pixel_values"],
            rectangles=fields["rectangles"],
            grids=fields["grids"],
        )
        grids = [[grid] for grid in images["grids"].tolist()]
        return TileBatch(images["pixel_values"], images["rectangles"], grids)
    return None


def select_items(fields: Mapping[str, Any], indices: Sequence[int]) -> dict[str, Any]:
    """Take some items out of a batch.

    Args:
        fields: Fields of items of one kind, as `tile_batch` takes them, or ready-made
            embeddings.
        indices: Items to take, in this order; none is allowed.

    Returns:
        The fields of those items.

    """
    batch = tile_batch(fields, validate=False)
    if batch is not None and list(indices) == list(range(len(batch.grids))):
        return dict(fields)
    selected: dict[str, Any] = {}
    for name, value in fields.items():
        if batch is not None and name in TILE_FIELDS + RECTANGLE_FIELDS:
            parts = value.split(batch.tiles_per_item)
            selected[name] = torch.cat([value[:0], *(parts[i] for i in indices)])
        elif name == "image_embeds":
            selected[name] = [value[i] for i in indices]
        else:
            # One row an item, on the CPU.
            selected[name] = value[list(indices)]
    return selected
