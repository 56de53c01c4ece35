# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Requests to engine inputs: image kwargs, tiles, placeholder positions."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from transformers import BatchFeature

from vllm.config.multimodal import BaseDummyOptions, MultiModalDummyOptions
from vllm.exceptions import VLLMValidationError
from vllm.inputs import MultiModalDataDict, MultiModalInput, mm_input
from vllm.logger import init_logger
from vllm.multimodal.inputs import (
    MultiModalFieldConfig,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
)
from vllm.multimodal.parse import MultiModalDataItems
from vllm.multimodal.processing import (
    BaseDummyInputsBuilder,
    BaseMultiModalProcessor,
    BaseProcessingInfo,
    ProcessorInputs,
    PromptReplacement,
    PromptUpdate,
    PromptUpdateDetails,
    TimingContext,
)
from vllm.multimodal.processing.processor import (
    MultiModalPromptUpdates,
    PlaceholderFeaturesInfo,
)
from vllm.renderers import TokenizeParams

from .config import OvisConfig
from .images import tile_image
from .marks import MARKERS, MarkedPrompt, cut_at_marks
from .media import Limits, OvisDataParser, embedding_fields_config
from .processor import (
    ImageSettings,
    OvisProcessor,
    validate_image_kwargs,
)
from .tiling import (
    DEFAULT_COVERING_THRESHOLD,
    largest_grid,
    num_image_tokens,
    worst_case_image_size,
)

logger = init_logger(__name__)

TILER_THREADS = min(4, os.cpu_count() or 1)
"""Threads that share a picture. The engine's front end prepares one request after the
other, whatever the number of cores, so that its cache is filled in the same order as
the engine's: more cores can only help within a picture."""


def flatten_image_kwargs(
    kwargs: Mapping[str, object], configured: Mapping[str, object]
) -> dict[str, object]:
    """Bring `images_kwargs` to the top level, where the same keys are accepted.

    Args:
        kwargs: Options at the top level and under `images_kwargs`. The engine has
            already merged its own into them, each at the level it was configured at.
        configured: The engine's own options, flat. Where both levels have a key, the
            value that is not the engine's own is the request's and wins.

    Raises:
        VLLMValidationError: If `images_kwargs` is not a mapping, or the request gives a
            key at both levels with different values.

    """
    flat = dict(kwargs)
    scoped = flat.pop("images_kwargs", {})
    if not isinstance(scoped, Mapping):
        raise VLLMValidationError(
            f"`images_kwargs` must be a mapping, got {scoped!r}.",
            parameter="mm_processor_kwargs",
        )
    for key, value in scoped.items():
        if key not in flat or flat[key] == configured.get(key):
            flat[key] = value
        elif value not in (flat[key], configured.get(key)):
            raise VLLMValidationError(
                f"{key!r} is given twice: {flat[key]!r} directly and {value!r} under "
                "`images_kwargs`.",
                parameter="mm_processor_kwargs",
            )
    return flat


class OvisProcessingInfo(BaseProcessingInfo):
    """What the engine asks about the model's images, answered by arithmetic."""

    def get_hf_config(self) -> OvisConfig:
        return self.ctx.get_hf_config(OvisConfig)

    @cached_property
    def ovis_processor(self) -> OvisProcessor:
        """The processor on the engine's own tokenizer, built once."""
        config = self.get_hf_config()
        settings = ImageSettings.from_preprocessor_config(
            self.ctx.get_hf_image_processor_config()
        )
        if settings.side != config.vision.image_size:
            raise ValueError(
                f"preprocessor_config.json asks for tiles of {settings.side} pixels, "
                f"the vision tower takes {config.vision.image_size}."
            )
        return OvisProcessor(
            self.get_tokenizer(),
            settings,
            config.vision.tokens_per_tile,
            config.llm_config.model_type,
            config.image_token_id,
        )

    def get_hf_processor(self, **kwargs: object) -> OvisProcessor:  # type: ignore[override]
        return self.ovis_processor

    def get_default_tok_params(self) -> TokenizeParams:
        # The conversation format spells out every special token, the leading one too
        # (authors' behaviour: pieces are tokenised without automatic special tokens).
        return super().get_default_tok_params().with_kwargs(add_special_tokens=False)

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": None, "video": None}

    def get_data_parser(self) -> OvisDataParser:
        vision = self.get_hf_config().vision
        model_config = self.ctx.model_config
        assert isinstance(model_config.dtype, torch.dtype)
        return OvisDataParser(
            Limits(
                side=vision.image_size,
                tokens_per_tile=vision.tokens_per_tile,
                max_cells=self.max_partition_limit,
                max_frames=self.max_frames,
                hidden_size=model_config.get_inputs_embeds_size(),
                dtype=model_config.dtype,
            ),
            allow_missing_mm_embeddings=self.allow_missing_mm_embeddings,
        )

    @cached_property
    def max_frames(self) -> int:
        """Most frames of a video: as many as the engine is configured to take.

        All that the model's length has room for if that is -1, all frames of a file.
        """
        model_config = self.ctx.model_config
        frames = self.ctx.get_mm_config().media_io_kwargs["video"]["num_frames"]
        if frames > 0:
            return frames
        return max(1, model_config.max_model_len // (self.tokens_per_frame + 1))

    @property
    def tokens_per_frame(self) -> int:
        """Tokens of a frame, which is one tile."""
        return num_image_tokens(1, 1, self.get_hf_config().vision.tokens_per_tile)

    @cached_property
    def configured_image_kwargs(self) -> dict[str, object]:
        """The engine's own image options, flat."""
        return flatten_image_kwargs(
            self._without_device(self.ctx.get_mm_config().mm_processor_kwargs or {}),
            configured={},
        )

    def _without_device(self, kwargs: Mapping[str, object]) -> dict[str, object]:
        """Options without the device of the engine's `--mm-processor-device`.

        An encode-only engine sets one by itself. Tiles are made on the CPU all the
        same; the engine's process normalises them on its device.
        """
        configured = self.ctx.get_mm_config().mm_processor_kwargs or {}
        device = configured.get("device")
        if device not in (None, "cpu"):
            logger.warning_once(
                "Pictures are prepared on the CPU; --mm-processor-device has no effect."
            )
        return {
            key: value
            for key, value in kwargs.items()
            if key != "device" or device is None or value != device
        }

    @cached_property
    def max_partition_limit(self) -> int:
        """Most cells a request may ask for: the value the engine started with.

        Memory is profiled for this many, so a larger one is refused.
        """
        max_partition, _ = validate_image_kwargs(
            self.configured_image_kwargs, limit=None
        )
        return max_partition

    def get_image_kwargs(self, kwargs: Mapping[str, object]) -> tuple[int, float]:
        """Return (max_partition, covering_threshold) in force for a request.

        Args:
            kwargs: The request's `mm_processor_kwargs`, flat or under
                `images_kwargs`; they win over the engine's own.

        Raises:
            VLLMValidationError: If a key is unknown or a value out of range; the
                message names both.

        """
        configured = self.configured_image_kwargs
        given = flatten_image_kwargs(self._without_device(kwargs), configured)
        try:
            return validate_image_kwargs(
                {**configured, **given},
                limit=self.max_partition_limit,
            )
        except ValueError as error:
            raise VLLMValidationError(
                str(error), parameter="mm_processor_kwargs"
            ) from error

    def get_profiled_max_partition(self, seq_len: int) -> int:
        """Largest legal max_partition whose image fits into `seq_len` tokens."""
        tokens_per_tile = self.get_hf_config().vision.tokens_per_tile
        for max_partition in range(self.max_partition_limit, 1, -1):
            grid = largest_grid(max_partition)
            if num_image_tokens(*grid, tokens_per_tile) <= seq_len:
                return max_partition
        return 1

    def get_mm_max_tokens_per_item(
        self, seq_len: int, mm_counts: Mapping[str, int]
    ) -> Mapping[str, int]:
        grid = largest_grid(self.get_profiled_max_partition(seq_len))
        tokens_per_tile = self.get_hf_config().vision.tokens_per_tile
        return {
            "image": num_image_tokens(*grid, tokens_per_tile),
            "video": self.get_profiled_frames(seq_len) * self.tokens_per_frame,
        }

    def get_profiled_frames(self, seq_len: int) -> int:
        """Most frames of a video that fit into `seq_len` tokens."""
        # Line breaks between the frames are tokens too.
        return max(1, min(self.max_frames, seq_len // (self.tokens_per_frame + 1)))


def _join(arrays: Sequence[np.ndarray]) -> torch.Tensor:
    """One tensor of all arrays; of a single one without a copy."""
    return torch.from_numpy(arrays[0] if len(arrays) == 1 else np.concatenate(arrays))


def _values(item: MultiModalKwargsItem, key: str) -> torch.Tensor:
    values = item[key].data
    assert isinstance(values, torch.Tensor)
    return values


class OvisDummyInputsBuilder(BaseDummyInputsBuilder[OvisProcessingInfo]):
    """The smallest picture that becomes the most tiles."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        return "".join(
            marker * mm_counts.get(modality, 0) for modality, marker in MARKERS.items()
        )

    def get_dummy_mm_data(
        self,
        seq_len: int,
        mm_counts: Mapping[str, int],
        mm_options: Mapping[str, BaseDummyOptions],
    ) -> MultiModalDataDict:
        side = self.info.get_hf_config().vision.image_size
        width, height = worst_case_image_size(
            side, self.info.get_profiled_max_partition(seq_len)
        )
        return {
            "image": self._get_dummy_images(
                width=width,
                height=height,
                num_images=mm_counts.get("image", 0),
                overrides=mm_options.get("image"),  # type: ignore[arg-type]
            ),
            "video": self._get_dummy_videos(
                # Any size makes one whole tile.
                width=side,
                height=side,
                num_frames=self.info.get_profiled_frames(seq_len),
                num_videos=mm_counts.get("video", 0),
                overrides=mm_options.get("video"),  # type: ignore[arg-type]
            ),
        }


class OvisMultiModalProcessor(BaseMultiModalProcessor[OvisProcessingInfo]):
    """Tiles stay 8-bit; the engine normalises them."""

    def get_dummy_inputs(
        self,
        seq_len: int,
        mm_counts: Mapping[str, int],
        mm_options: MultiModalDummyOptions,
    ) -> ProcessorInputs:
        inputs = super().get_dummy_inputs(seq_len, mm_counts, mm_options)
        # A request may have more tiles than the engine's own threshold would give.
        return replace(
            inputs,
            hf_processor_mm_kwargs={"covering_threshold": DEFAULT_COVERING_THRESHOLD},
        )

    def _call_hf_processor(
        self, hf_data: Mapping[str, object], hf_kwargs: Mapping[str, object]
    ) -> BatchFeature:
        max_partition, threshold = self.info.get_image_kwargs(hf_kwargs)
        data: dict[str, Any] = {}
        if images := hf_data.get("images"):
            data |= self._image_fields(images, max_partition, threshold)
        if videos := hf_data.get("videos"):
            data |= self._video_fields(videos)
        return BatchFeature(data)

    def _image_fields(
        self, images: Any, max_partition: int, threshold: float
    ) -> dict[str, torch.Tensor]:
        side = self.info.ovis_processor.image_settings.side
        tiled = []
        for image in images:
            if not isinstance(image, Mapping):
                cut = tile_image(image, side, max_partition, threshold, TILER_THREADS)
                image = {
                    "pixel_values": cut.pixels,
                    "rectangles": cut.rectangles,
                    "grid": cut.grid,
                }
            tiled.append(image)
        grids = torch.tensor([image["grid"] for image in tiled])
        pixels = _join([image["pixel_values"] for image in tiled])
        if pixels.is_floating_point():
            return {"normalized_tiles": pixels, "grids": grids}
        rectangles = _join([image["rectangles"] for image in tiled])
        return {"pixel_values": pixels, "rectangles": rectangles, "grids": grids}

    def _video_fields(self, videos: Any) -> dict[str, torch.Tensor]:
        side = self.info.ovis_processor.image_settings.side
        # Every frame is one tile (authors' behaviour, golden case video_4_frames).
        frames = [
            tile_image(frame, side, max_partition=1, threads=TILER_THREADS)
            for video in videos
            for frame in video
        ]
        return {
            "video_pixels": _join([frame.pixels for frame in frames]),
            "video_rectangles": _join([frame.rectangles for frame in frames]),
            "video_frames": torch.tensor([len(video) for video in videos]),
        }

    def _get_mm_fields_config(
        self,
        hf_inputs: BatchFeature,
        hf_processor_mm_kwargs: Mapping[str, object],
    ) -> Mapping[str, MultiModalFieldConfig]:
        grids = hf_inputs.get("grids", torch.empty((0, 2), dtype=torch.int64))
        cells = grids.prod(-1)
        tiles = cells + (cells > 1)
        frames = hf_inputs.get("video_frames", torch.empty(0, dtype=torch.int64))
        by_tiles = MultiModalFieldConfig.flat_from_sizes("image", tiles)
        by_frames = MultiModalFieldConfig.flat_from_sizes("video", frames)
        return {
            "pixel_values": by_tiles,
            "rectangles": by_tiles,
            "normalized_tiles": by_tiles,
            "video_pixels": by_frames,
            "video_rectangles": by_frames,
            "video_frames": MultiModalFieldConfig.batched("video", keep_on_cpu=True),
            **embedding_fields_config(),
        }

    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: MultiModalKwargsItems,
    ) -> Sequence[PromptUpdate]:
        # Refused also where only embeddings are given, which need no options.
        self.info.get_image_kwargs(hf_processor_mm_kwargs)
        pad_id = self.info.ovis_processor.image_pad_id
        tokens_per_tile = self.info.get_hf_config().vision.tokens_per_tile

        def image_placeholder(item_index: int) -> list[int]:
            item = out_mm_kwargs["image"][item_index]
            if "grids" in item:
                rows, columns = _values(item, "grids").tolist()
                length = num_image_tokens(rows, columns, tokens_per_tile)
            else:
                length = len(_values(item, "image_embeds"))
            return [pad_id] * length

        def video_placeholder(item_index: int) -> PromptUpdateDetails:
            frames = int(_values(out_mm_kwargs["video"][item_index], "video_frames"))
            frame = [pad_id] * self.info.tokens_per_frame
            # The authors join the marks of the frames by line breaks.
            ids = frame + (self._line_break + frame) * (frames - 1)
            return PromptUpdateDetails.select_token_id(ids, pad_id)

        return [
            PromptReplacement("image", target=[pad_id], replacement=image_placeholder),
            PromptReplacement("video", target=[pad_id], replacement=video_placeholder),
        ]

    @cached_property
    def _line_break(self) -> list[int]:
        return self.info.get_tokenizer().encode("\n", add_special_tokens=False)

    def apply(
        self, inputs: ProcessorInputs, timing_ctx: TimingContext
    ) -> MultiModalInput:
        """Put each item's tokens where its mark is, and nowhere else.

        The engine would search the prompt for the pad token, and take one that a user
        typed for a place. Marks are counted before the items enter the cache: the
        cache of a refused request's items would not be that of the engine process.
        """
        counts = inputs.mm_data_items.get_all_counts()
        try:
            marked = cut_at_marks(
                self.info.get_tokenizer(),
                inputs.prompt,
                counts,
                self.info.ovis_processor.image_pad_id,
            )
        except ValueError as error:
            raise VLLMValidationError(str(error), parameter="prompt") from error
        result = self._cached_apply_hf_processor(inputs, timing_ctx)
        self._validate_mm_kwargs(result.kwargs, counts)
        self._validate_mm_updates(result.prompt_updates, counts)
        prompt_ids, places = self._fill_marks(marked, result.prompt_updates)
        return mm_input(
            prompt_token_ids=prompt_ids,
            mm_kwargs=result.kwargs,
            mm_hashes=result.hashes,
            mm_placeholders={
                modality: [place.to_range() for place in found]
                for modality, found in places.items()
            },
        )

    @staticmethod
    def _fill_marks(
        marked: MarkedPrompt, updates: MultiModalPromptUpdates
    ) -> tuple[list[int], Mapping[str, list[PlaceholderFeaturesInfo]]]:
        prompt_ids = list(marked.pieces[0])
        placeholders: dict[str, list[PlaceholderFeaturesInfo]] = {}
        for modality, piece in zip(marked.modalities, marked.pieces[1:], strict=True):
            filled = placeholders.setdefault(modality, [])
            (update,) = updates[modality][len(filled)]
            content = update.content
            filled.append(
                PlaceholderFeaturesInfo(
                    modality=modality,
                    item_idx=len(filled),
                    start_idx=len(prompt_ids),
                    tokens=content.full,
                    is_embed=content.is_embed(content.full)
                    if content.is_embed
                    else None,
                )
            )
            prompt_ids += [*content.full, *piece]
        return prompt_ids, placeholders
