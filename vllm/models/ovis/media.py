# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What a request may give as image or video, checked and brought to one form.

Besides pictures: ready tiles, precomputed embeddings, and videos as frames.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image

from vllm.exceptions import VLLMValidationError
from vllm.multimodal.inputs import MultiModalFieldConfig
from vllm.multimodal.media import MediaWithBytes
from vllm.multimodal.parse import (
    DictEmbeddingItems,
    EmbeddingFieldRole,
    ImageEmbeddingItems,
    ImageProcessorItems,
    ModalityDataItems,
    MultiModalDataParser,
    VideoProcessorItems,
)

from .images import from_array, to_rgb
from .tiling import num_image_tokens, num_tiles


@dataclass(frozen=True)
class Limits:
    """What an engine takes.

    Attributes:
        side: Side of a tile in pixels.
        tokens_per_tile: Tokens of one tile.
        max_cells: Most cells of an image's grid.
        max_frames: Most frames of a video.
        hidden_size: Width of an embedding.
        dtype: Type of the model.

    """

    side: int
    tokens_per_tile: int
    max_cells: int
    max_frames: int
    hidden_size: int
    dtype: torch.dtype


def check_tiles(tiles: Mapping[str, Any], limits: Limits) -> dict[str, Any]:
    """Check the ready tiles of one image.

    Args:
        tiles: `pixel_values`, `grid` (rows, columns) and optionally `rectangles`, as
            arrays or tensors. Pixels are uint8 `[tiles, side, side, 3]`, or floating
            `[tiles, 3, side, side]`, normalised, 0 in the padding (as the authors'
            code prepares them). Rectangles `[tiles, 4]` (top, left, height, width of
            the picture in each tile) go with uint8 pixels only; without them the
            pictures fill their tiles.
        limits: What the engine takes.

    Returns:
        `pixel_values` uint8 or float32, `grid`, and with uint8 pixels `rectangles`
        int32. Checked again, the result stays the same.

    Raises:
        VLLMValidationError: Anything else; the message names what was given.

    """
    unknown = tiles.keys() - {"pixel_values", "grid", "rectangles"}
    missing = {"pixel_values", "grid"} - tiles.keys()
    if unknown or missing:
        raise _refusal(
            "ready tiles must be given as `pixel_values`, `grid` and optionally "
            f"`rectangles`, got {sorted(map(str, tiles))}"
        )
    rows, columns = _check_grid(tiles["grid"], limits.max_cells)
    count, side = num_tiles(rows, columns), limits.side
    pixels = _as_array(tiles["pixel_values"], "pixel_values")
    floating = np.issubdtype(pixels.dtype, np.floating)
    shape = (count, 3, side, side) if floating else (count, side, side, 3)
    if pixels.shape != shape or not (floating or pixels.dtype == np.uint8):
        raise _refusal(
            f"`pixel_values` of a grid of {rows} x {columns} must be uint8 "
            f"[{count}, {side}, {side}, 3] or floating [{count}, 3, {side}, {side}], "
            f"got {pixels.dtype} {list(pixels.shape)}"
        )
    result: dict[str, Any] = {"pixel_values": pixels, "grid": (rows, columns)}
    if floating:
        if tiles.get("rectangles") is not None:
            raise _refusal(
                "`rectangles` go with uint8 tiles; normalised tiles have 0 in their "
                "padding"
            )
        result["pixel_values"] = pixels.astype(np.float32, copy=False)
        if not np.isfinite(result["pixel_values"]).all():
            raise _refusal("`pixel_values` must be finite, got NaN or infinity")
        return result
    if tiles.get("rectangles") is None:
        rectangles = np.tile(np.array([0, 0, side, side], np.int32), (count, 1))
    else:
        rectangles = _as_array(tiles["rectangles"], "rectangles")
        if (
            not np.issubdtype(rectangles.dtype, np.integer)
            or rectangles.shape != (count, 4)
            or (rectangles[:, :2] < 0).any()
            or (rectangles[:, 2:] < 1).any()
            or (rectangles[:, :2] + rectangles[:, 2:] > side).any()
        ):
            raise _refusal(
                f"`rectangles` must be integers [{count}, 4]: top, left, height, width "
                f"inside a tile of {side} pixels, got {rectangles.dtype} "
                f"{list(rectangles.shape)}: {rectangles.tolist()}"
            )
    result["rectangles"] = rectangles.astype(np.int32, copy=False)
    return result


def check_embeddings(
    embeddings: Sequence[torch.Tensor], limits: Limits
) -> list[torch.Tensor]:
    """Check precomputed embeddings, one tensor per image.

    An image's embeddings are all its rows in the merged sequence, tiles and indicators,
    as the model's `embed_multimodal` returns them; with a Gemma 2 text model they are
    scaled by sqrt(hidden_size) already.

    Args:
        embeddings: Floating `[tokens, hidden_size]`; tokens as a legal grid has them.
        limits: What the engine takes.

    Returns:
        The embeddings in the model's type.

    Raises:
        VLLMValidationError: Another type, shape or number of tokens, NaN or infinity.

    """
    lengths = [
        num_image_tokens(1, cells, limits.tokens_per_tile)
        for cells in range(1, limits.max_cells + 1)
    ]
    checked = []
    for index, embedding in enumerate(embeddings):
        name = f"embedding {index}"
        if (
            not isinstance(embedding, torch.Tensor)
            or embedding.ndim != 2
            or embedding.shape[1] != limits.hidden_size
            or not embedding.is_floating_point()
        ):
            given = (
                f"{embedding.dtype} {list(embedding.shape)}"
                if isinstance(embedding, torch.Tensor)
                else type(embedding).__name__
            )
            raise _refusal(
                f"{name} must be a floating tensor [tokens, {limits.hidden_size}], "
                f"got {given}",
                "image_embeds",
            )
        if len(embedding) not in lengths:
            raise _refusal(
                f"{name} has {len(embedding)} rows; with its indicators an image has "
                f"{', '.join(map(str, lengths))} (1 to {limits.max_cells} cells)",
                "image_embeds",
            )
        embedding = embedding.detach().to("cpu", limits.dtype)
        if not embedding.isfinite().all():
            raise _refusal(
                f"{name} must be finite in {limits.dtype}, got NaN or infinity",
                "image_embeds",
            )
        checked.append(embedding)
    return checked


class OvisDataParser(MultiModalDataParser):
    """Pictures, ready tiles, embeddings and frames of a request."""

    embedding_fields: Mapping[str, Mapping[str, EmbeddingFieldRole]] = {
        "image": {"image_embeds": "values", "grids": "metadata"}
    }

    def __init__(self, limits: Limits, **options: Any) -> None:
        super().__init__(**options)
        self.limits = limits

    def _parse_image_data(self, data: Any) -> ModalityDataItems[Any, Any] | None:
        if data is None:
            return None
        if isinstance(data, Mapping):
            if data.keys() & self.embedding_fields["image"].keys():
                return self._parse_embeddings_by_name(data)
            data = [data]
        if isinstance(data, torch.Tensor):
            return self._parse_embeddings(data)
        if isinstance(data, Image.Image | MediaWithBytes):
            data = [data]
        elif isinstance(data, np.ndarray):
            data = [data] if data.ndim == 3 else list(data)
        if not isinstance(data, Sequence) or isinstance(data, str | bytes):
            raise _refusal(f"an image cannot be a {type(data).__name__}")
        if any(isinstance(item, torch.Tensor) for item in data):
            return self._parse_embeddings(data)
        items = [self._parse_image(item) for item in data]
        floating = [
            isinstance(item, dict) and item["pixel_values"].dtype == np.float32
            for item in items
            if item is not None
        ]
        if any(floating) and not all(floating):
            raise _refusal(
                "normalised tiles cannot be mixed with other images in one request"
            )
        return ImageProcessorItems(items)

    def _parse_image(self, item: Any) -> Any:
        if isinstance(item, Image.Image):
            return to_rgb(item)
        if isinstance(item, Mapping):
            return check_tiles(item, self.limits)
        # None stands for an image that the cache has by its uuid.
        if item is None or isinstance(item, np.ndarray | MediaWithBytes):
            return item
        raise _refusal(f"an image cannot be a {type(item).__name__}")

    def _parse_embeddings(
        self, data: torch.Tensor | Sequence[torch.Tensor]
    ) -> ImageEmbeddingItems:
        if isinstance(data, torch.Tensor) and data.ndim == 2:
            data = [data]
        return ImageEmbeddingItems(check_embeddings(list(data), self.limits))

    def _parse_embeddings_by_name(self, data: Mapping[str, Any]) -> Any:
        embeds = data.get("image_embeds")
        if data.keys() == {"image_embeds"}:
            return self._parse_embeddings(data["image_embeds"])
        required, optional = self.embedding_field_sets("image")
        if not required <= data.keys() <= required | optional:
            raise _refusal(
                f"embeddings must be given as {sorted(required | optional)}, got "
                f"{sorted(map(str, data))}",
                "image_embeds",
            )
        grids = [_check_grid(grid, self.limits.max_cells) for grid in data["grids"]]
        parsed: dict[str, Any] = {"grids": torch.tensor(grids)}
        if embeds is not None:
            checked = check_embeddings(list(embeds), self.limits)
            lengths = [
                num_image_tokens(*grid, self.limits.tokens_per_tile) for grid in grids
            ]
            if [len(embedding) for embedding in checked] != lengths:
                raise _refusal(
                    f"embeddings of grids {grids} must have {lengths} rows, got "
                    f"{[len(embedding) for embedding in checked]}",
                    "image_embeds",
                )
            parsed["image_embeds"] = checked
        return DictEmbeddingItems(
            parsed,
            modality="image",
            required_fields=required,
            optional_fields=optional,
            fields_factory=lambda _: embedding_fields_config(),
        )

    def _parse_video_data(self, data: Any) -> ModalityDataItems[Any, Any] | None:
        if data is None:
            return None
        if not isinstance(data, list) or _is_frames(data):
            data = [data]
        return VideoProcessorItems([self._parse_video(item) for item in data])

    def _parse_video(self, video: Any) -> Any:
        if video is None:
            return None  # The cache has it by its uuid.
        if isinstance(video, MediaWithBytes):
            # The file's bytes tell it from other videos in the cache.
            return MediaWithBytes(
                self._parse_video(video.media), video.original_bytes, video.io_config
            )
        if isinstance(video, tuple) and len(video) == 2:
            video = video[0]  # The other says how the frames were chosen.
        if isinstance(video, torch.Tensor):
            video = video.cpu().numpy()
        if not isinstance(video, list | np.ndarray):
            raise VLLMValidationError(
                "a video must be a list of frames or an array, got "
                f"{type(video).__name__}",
                parameter="video",
            )
        if not 1 <= len(video) <= self.limits.max_frames:
            raise VLLMValidationError(
                f"a video must have 1 to {self.limits.max_frames} frames (the engine's "
                f"`media_io_kwargs` set `num_frames` of `video`), got {len(video)}",
                parameter="video",
            )
        try:
            if isinstance(video, np.ndarray):
                return _frames_of_array(video)
            return [
                to_rgb(frame)
                if isinstance(frame, Image.Image)
                else np.asarray(from_array(np.asarray(frame)))
                for frame in video
            ]
        except ValueError as error:
            raise VLLMValidationError(str(error), parameter="video") from error


def _frames_of_array(video: np.ndarray) -> np.ndarray:
    """Frames of three channels, as they are; grey or transparent ones as RGB.

    Raises:
        ValueError: The array has no frames of a picture's type and shape.

    """
    if video.ndim == 4 and 3 in (video.shape[1], video.shape[3]):
        from_array(video[0])
        return video
    if video.dtype not in (np.uint8, np.uint16) or video.ndim not in (3, 4):
        raise ValueError(
            "frames must be uint8, or uint16 if they are grey, got "
            f"{video.dtype} {list(video.shape)}"
        )
    try:
        pictures = [Image.fromarray(frame) for frame in video]
    except TypeError as error:
        raise ValueError(
            f"a frame must be a picture, got {video.dtype} {list(video.shape[1:])}"
        ) from error
    return np.stack([np.asarray(to_rgb(picture)) for picture in pictures])


def embedding_fields_config() -> dict[str, MultiModalFieldConfig]:
    """How the fields of precomputed embeddings are split by image."""
    return {
        "image_embeds": MultiModalFieldConfig.batched("image"),
        "grids": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
    }


def _is_frames(data: list[Any]) -> bool:
    """Whether a list holds the frames of one video, not several videos."""
    return len(data) > 0 and all(
        isinstance(item, Image.Image)
        or (isinstance(item, np.ndarray | torch.Tensor) and item.ndim == 3)
        for item in data
    )


def _as_array(value: Any, name: str) -> np.ndarray:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = (value.float() if value.is_floating_point() else value).numpy()
    try:
        return np.ascontiguousarray(value)
    except ValueError as error:
        raise _refusal(f"{name} must be an array, got {value!r}") from error


def _check_grid(grid: Any, max_cells: int) -> tuple[int, int]:
    array = np.asarray(grid)
    if array.shape == (2,) and np.issubdtype(array.dtype, np.integer):
        rows, columns = array.tolist()
        if rows >= 1 and columns >= 1 and rows * columns <= max_cells:
            return rows, columns
    raise _refusal(
        f"a grid must be rows and columns of 1 to {max_cells} cells, got "
        f"{array.tolist()}"
    )


def _refusal(message: str, parameter: str = "image") -> VLLMValidationError:
    return VLLMValidationError(message, parameter=parameter)
