# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Ovis 1.6 and 2 inputs without an engine: chat text, token ids and tiles.

`OvisProcessor` reads a checkpoint in any of its file layouts (config.json,
preprocessor_config.json, tokenizer) and gives what the engine's own preprocessing
gives: the same ids, the same bytes. The functions in front of it are what the two
share.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from PIL import Image
from transformers import AutoConfig, AutoTokenizer, BatchFeature
from transformers.models.auto.image_processing_auto import get_image_processor_config
from transformers.utils.hub import cached_file

from .chat import Message, format_conversation, turn_format
from .images import tile_image
from .tiling import (
    DEFAULT_COVERING_THRESHOLD,
    DEFAULT_MAX_PARTITION,
    IMAGE_MARKER,
    num_image_tokens,
    tokens_per_tile,
)

Picture: TypeAlias = Image.Image | np.ndarray

# A token of each family's vocabulary that no text contains, to hold image positions.
_IMAGE_PADS = {
    "qwen2": "<|image_pad|>",
    "gemma2": "<unused0>",
    "llama": "<|reserved_special_token_0|>",
}


def resolve_image_pad_id(tokenizer: Any, text_model_type: str) -> int:
    """Id of the token that holds image positions in a checkpoint.

    Looked up by name, because small checkpoints number their tokens differently.

    Args:
        tokenizer: Tokenizer of the checkpoint.
        text_model_type: `model_type` of the text model: qwen2, gemma2 or llama.

    Raises:
        ValueError: Another type of text model, or a tokenizer without the token.

    """
    if text_model_type not in _IMAGE_PADS:
        raise ValueError(
            f"unknown text model type {text_model_type!r}, "
            f"known: {', '.join(_IMAGE_PADS)}"
        )
    token = _IMAGE_PADS[text_model_type]
    token_id = tokenizer.convert_tokens_to_ids(token)
    if token_id is None or tokenizer.convert_ids_to_tokens(token_id) != token:
        raise ValueError(
            f"the tokenizer has no token {token!r}, which holds image positions in "
            f"checkpoints with a text model of type {text_model_type}"
        )
    return token_id


def tokenize_with_markers(tokenizer: Any, text: str) -> list[list[int]]:
    """Token ids of the pieces of a text between its `<image>` markers.

    Pieces are tokenised apart and without special tokens, so text beside a marker
    never merges with it (authors' behaviour, golden
    `prompt_input_ids_with_image_marker`).

    Returns:
        One list more than the text has markers; piece `k` precedes marker `k`.

    """
    return [
        tokenizer.encode(piece, add_special_tokens=False) if piece else []
        for piece in text.split(IMAGE_MARKER)
    ]


def validate_image_kwargs(
    kwargs: Mapping[str, Any], limit: int | None
) -> tuple[int, float]:
    """Check the options a request may give for its pictures.

    Args:
        kwargs: `max_partition` and `covering_threshold`, both optional.
        limit: Largest `max_partition` allowed; None for no limit.

    Returns:
        `(max_partition, covering_threshold)`, defaults filled in.

    Raises:
        ValueError: An unknown option; `max_partition` is no integer from 1 to the
            limit; `covering_threshold` is no number from 0 to 1. Both ends have a
            meaning (see `tiling.choose_grid`), beyond them nothing would change.

    """
    for key, value in kwargs.items():
        if key not in ("max_partition", "covering_threshold"):
            raise ValueError(
                f"unknown image option {key!r} (value {value!r}), "
                "known: max_partition, covering_threshold"
            )
    partition = kwargs.get("max_partition", DEFAULT_MAX_PARTITION)
    threshold = kwargs.get("covering_threshold", DEFAULT_COVERING_THRESHOLD)
    if (
        not isinstance(partition, int | np.integer)
        or isinstance(partition, bool)
        or partition < 1
        or (limit is not None and partition > limit)
    ):
        allowed = "of at least 1" if limit is None else f"from 1 to {limit}"
        raise ValueError(
            f"max_partition must be an integer {allowed}, got {partition!r}"
        )
    if (
        not isinstance(threshold, int | float | np.integer | np.floating)
        or isinstance(threshold, bool)
        or not 0 <= threshold <= 1
    ):
        raise ValueError(
            f"covering_threshold must be a number from 0 to 1, got {threshold!r}"
        )
    return int(partition), float(threshold)


@dataclass(frozen=True)
class ImageSettings:
    """What a checkpoint's preprocessor_config.json says about its tiles.

    Attributes:
        side: Side of a square tile in pixels.
        mean: Mean of the channels, on a scale of 0 to 1.
        std: Standard deviation of the channels.

    """

    side: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    @classmethod
    def from_preprocessor_config(cls, config: Mapping[str, Any]) -> "ImageSettings":
        """Read a file of CLIP type (Ovis2: crop_size) or SigLIP type (1.6: size).

        Raises:
            ValueError: A tile that is missing, not square or not given as height and
                width; a mean or deviation that is not three numbers; a resampling,
                scale or omitted step that the authors' models do not use.

        """
        key = "size" if config.get("crop_size") is None else "crop_size"
        size = config.get(key)
        if isinstance(size, int):
            size = {"height": size, "width": size}
        if not isinstance(size, Mapping) or not {"height", "width"} <= set(size):
            raise ValueError(
                "preprocessor_config.json must give the tile as crop_size or size with "
                f"height and width, got {key} {size!r}"
            )
        side = size["height"]
        if side != size["width"] or not isinstance(side, int) or side < 1:
            raise ValueError(
                f"preprocessor_config.json must give a square tile of at least 1 "
                f"pixel, got {key} with height {size['height']!r} and width "
                f"{size['width']!r}"
            )
        fixed = {
            "resample": int(Image.Resampling.BICUBIC),
            "do_rescale": True,
            "do_normalize": True,
        }
        for name, needed in fixed.items():
            if config.get(name, needed) != needed:
                raise ValueError(
                    f"preprocessor_config.json must have {name} {needed}, "
                    f"got {config[name]!r}"
                )
        factor = config.get("rescale_factor", 1 / 255)
        if not math.isclose(factor, 1 / 255):
            raise ValueError(
                f"preprocessor_config.json must have rescale_factor 1/255, got {factor}"
            )
        return cls(
            side, _channels(config, "image_mean"), _channels(config, "image_std")
        )


def _channels(config: Mapping[str, Any], key: str) -> tuple[float, float, float]:
    values = config.get(key)
    if not isinstance(values, Sequence) or len(values) != 3:
        raise ValueError(
            f"preprocessor_config.json must give {key} as three numbers, got {values!r}"
        )
    red, green, blue = (float(value) for value in values)
    return red, green, blue


class OvisProcessor:
    """Chat text, token ids and tiles of a checkpoint, outside the engine.

    Attributes:
        tokenizer: Tokenizer of the checkpoint.
        image_settings: Side of a tile and its normalisation.
        tokens_per_tile: Tokens that stand for one tile.
        image_pad_id: Token id at every image position.

    """

    def __init__(
        self,
        tokenizer: Any,
        image_settings: ImageSettings,
        tokens_per_tile: int,
        text_model_type: str,
        image_pad_id: int | None = None,
    ) -> None:
        """Put a processor together.

        Args:
            tokenizer: Tokenizer of the checkpoint.
            image_settings: Side of a tile and its normalisation.
            tokens_per_tile: Tokens that stand for one tile.
            text_model_type: `model_type` of the text model: qwen2, gemma2 or llama.
            image_pad_id: Token at image positions, where config.json names one
                (`image_token_id`); else the family's own is looked up.

        Raises:
            ValueError: Another type of text model, or no pad token in the tokenizer.

        """
        self.tokenizer = tokenizer
        self.image_settings = image_settings
        self.tokens_per_tile = tokens_per_tile
        if image_pad_id is None:
            image_pad_id = resolve_image_pad_id(tokenizer, text_model_type)
        self.image_pad_id = image_pad_id
        self._turn_format = turn_format(text_model_type)

    @classmethod
    def from_pretrained(
        cls, path: str, *, revision: str | None = None
    ) -> "OvisProcessor":
        """Read a checkpoint; its code is never run.

        Args:
            path: Folder, or name on the hub.
            revision: Branch, tag or commit on the hub.

        Raises:
            OSError: config.json is missing.
            ValueError: The files are not those of an Ovis 1.6 or 2 checkpoint, or say
                nothing of its tiles.

        """
        config = _read_json(path, "config.json", revision)
        try:
            patch_size, hidden_stride, text_model_type = _sizes(config)
        except KeyError as error:
            raise ValueError(
                f"config.json of {path} is not that of an Ovis 1.6 or 2 checkpoint: "
                f"it has no {error}"
            ) from error
        settings = ImageSettings.from_preprocessor_config(
            get_image_processor_config(path, revision=revision)
        )
        turn_format(text_model_type)  # Refuses a text model that is none of ours.
        tokenizer = AutoTokenizer.from_pretrained(
            path,
            revision=revision,
            # Else config.json is read, whose model type transformers does not know and
            # which may name code of its own.
            config=AutoConfig.for_model(text_model_type),
            trust_remote_code=False,
        )
        return cls(
            tokenizer,
            settings,
            tokens_per_tile(settings.side, patch_size, hidden_stride),
            text_model_type,
            config.get("image_token_id"),
        )

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        tokenize: bool = False,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
    ) -> str:
        """Write a conversation as the authors' formatter of the family does.

        Args:
            messages: See `chat.format_conversation`.
            tokenize: Must stay False: ids depend on the pictures, so they come from
                calling the processor.
            add_generation_prompt: Open an assistant turn at the end.
            continue_final_message: Leave the last message open, for an answer that
                begins with given words.

        Returns:
            The text; `<image>` in it marks the places of pictures.

        Raises:
            ValueError: `tokenize` is set, or see `chat.format_conversation`.

        """
        if tokenize:
            raise ValueError(
                "tokenize must be False: call the processor with the text and its "
                "images to get token ids"
            )
        return format_conversation(
            messages,
            self._turn_format,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )

    def __call__(
        self,
        text: str | Sequence[str],
        images: Picture | Sequence[Picture] | Sequence[Sequence[Picture]] | None = None,
        *,
        max_partition: int = DEFAULT_MAX_PARTITION,
        covering_threshold: float = DEFAULT_COVERING_THRESHOLD,
        return_tensors: str | None = None,
    ) -> BatchFeature:
        """Turn prompts and their pictures into model inputs.

        Args:
            text: One prompt or several; picture `k` replaces marker `k`.
            images: Pictures of all prompts in order, or a list of pictures per prompt.
            max_partition: Most cells a picture is cut into.
            covering_threshold: See `tiling.choose_grid`.
            return_tensors: As transformers has it ("np", "pt"); prompts must then
                have equal lengths.

        Returns:
            `input_ids`, one list per prompt, with `image_pad_id` at every image
            position (tiles and indicators); if there are images also `pixel_values`
            uint8 `[tiles, side, side, 3]` and `rectangles` int32 `[tiles, 4]` of all
            pictures in order, and `grids` int32 `[images, 2]` (rows, columns).

        Raises:
            ValueError: Numbers of markers and images differ, an option is out of
                range, or a picture cannot be tiled.

        """
        partition, threshold = validate_image_kwargs(
            {"max_partition": max_partition, "covering_threshold": covering_threshold},
            None,
        )
        prompts = [text] if isinstance(text, str) else list(text)
        pieces = [tokenize_with_markers(self.tokenizer, prompt) for prompt in prompts]
        pictures = _assign_images([len(parts) - 1 for parts in pieces], images)
        tiled = [
            tile_image(picture, self.image_settings.side, partition, threshold)
            for picture in pictures
        ]
        lengths = iter(
            [num_image_tokens(*image.grid, self.tokens_per_tile) for image in tiled]
        )
        input_ids = []
        for first, *others in pieces:
            ids = list(first)
            for piece in others:
                ids += [self.image_pad_id] * next(lengths) + piece
            input_ids.append(ids)
        data: dict[str, Any] = {"input_ids": input_ids}
        if tiled:
            data["pixel_values"] = np.concatenate([image.pixels for image in tiled])
            data["rectangles"] = np.concatenate([image.rectangles for image in tiled])
            data["grids"] = np.array([image.grid for image in tiled], np.int32)
        return BatchFeature(data, tensor_type=return_tensors)


def _read_json(path: str, name: str, revision: str | None) -> dict[str, Any]:
    file = cached_file(path, name, revision=revision)
    if file is None:
        raise FileNotFoundError(f"{path} has no file {name}")
    with open(file, encoding="utf-8") as stream:
        return json.load(stream)


def _sizes(config: Mapping[str, Any]) -> tuple[int, int, str]:
    """Patch size, hidden stride and type of the text model, in either layout."""
    if config.get("model_type") == "ovis2":
        # transformers' own port; what its files leave out has its defaults.
        vision = config["vision_config"]
        text_model_type = config["text_config"].get("model_type", "qwen2")
        return (
            vision.get("patch_size", 14),
            vision.get("hidden_stride", 1),
            text_model_type,
        )
    visual = config["visual_tokenizer_config"]
    return (
        visual["backbone_config"]["patch_size"],
        visual["hidden_stride"],
        config["llm_config"]["model_type"],
    )


def _assign_images(markers: list[int], images: Any) -> list[Picture]:
    """All pictures in order, once their numbers fit the markers of each prompt."""
    if images is None:
        images = []
    elif isinstance(images, Image.Image | np.ndarray):
        images = [images]
    if any(isinstance(item, list | tuple) for item in images):
        if not all(isinstance(item, list | tuple) for item in images):
            raise ValueError("images must be all pictures or all lists of pictures")
        if len(images) != len(markers):
            raise ValueError(
                f"got {len(markers)} prompts but {len(images)} lists of images"
            )
        for index, (wanted, given) in enumerate(zip(markers, images)):
            _check_count(wanted, len(given), f"prompt {index}")
        return [picture for given in images for picture in given]
    _check_count(sum(markers), len(images), "the text")
    return list(images)


def _check_count(markers: int, images: int, where: str) -> None:
    if markers != images:
        raise ValueError(
            f"{where} has {markers} {IMAGE_MARKER} markers, but {images} images are "
            "given"
        )
