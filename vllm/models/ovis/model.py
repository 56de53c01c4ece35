# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Ovis 1.6 and Ovis 2: visual embeddings beside an unmodified text model."""

from collections.abc import Iterable
from typing import Annotated, Any

import torch
from torch import nn

from vllm.config import VllmConfig
from vllm.model_executor.models.interfaces import (
    MultiModalEmbeddings,
    SupportsMultiModal,
    SupportsPP,
)
from vllm.model_executor.models.utils import (
    AutoWeightsLoader,
    WeightsMapper,
    init_vllm_registered_model,
    maybe_prefix,
)
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.sequence import IntermediateTensors
from vllm.utils.tensor_schema import TensorSchema, TensorShape

from .config import OvisConfig
from .inputs import (
    OvisDummyInputsBuilder,
    OvisMultiModalProcessor,
    OvisProcessingInfo,
)
from .marks import MARKERS, chat_mark
from .processor import ImageSettings
from .tiling import TILE, token_layout
from .visual_tokenizer import VisualTokenizer


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


@MULTIMODAL_REGISTRY.register_processor(
    OvisMultiModalProcessor,
    info=OvisProcessingInfo,
    dummy_inputs=OvisDummyInputsBuilder,
)
class Ovis(nn.Module, SupportsMultiModal, SupportsPP):
    """Ovis 1.6 (SigLIP) and Ovis 2 (AIMv2)."""

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={"vte.": "visual_tokenizer.head.vte."}
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        assert isinstance(config, OvisConfig)
        images = ImageSettings.from_preprocessor_config(
            vllm_config.model_config.hf_image_processor_config
        )
        self.config = config

        with self._mark_tower_model(vllm_config, {"image", "video"}):
            self.visual_tokenizer = VisualTokenizer(
                config.vision,
                config.llm_config.hidden_size,
                images.mean,
                images.std,
                quant_config=vllm_config.quant_config,
                prefix=maybe_prefix(prefix, "visual_tokenizer"),
            )
        with self._mark_language_model(vllm_config):
            self.llm: Any = init_vllm_registered_model(
                vllm_config=vllm_config,
                hf_config=config.llm_config,
                prefix=maybe_prefix(prefix, "llm"),
            )
        self.make_empty_intermediate_tensors = (  # type: ignore[assignment]
            self.llm.make_empty_intermediate_tensors
        )

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        if modality == "image_embeds":
            modality = "image"
        if modality in MARKERS:
            return chat_mark(modality)
        raise ValueError(
            f"Ovis has no {modality!r} input; it takes image, image_embeds and video."
        )

    def embed_multimodal(self, **kwargs: object) -> MultiModalEmbeddings:
        if kwargs.get("image_embeds") is not None:
            # Checked, with indicators and scale, when the request came in.
            return [embeds for embeds in kwargs["image_embeds"]]  # type: ignore[attr-defined]
        if kwargs.get("video_frames") is not None:
            return self._embed_videos(
                OvisVideoInputs(
                    video_pixels=kwargs["video_pixels"],
                    video_rectangles=kwargs["video_rectangles"],
                    video_frames=kwargs["video_frames"],
                )
            )
        if kwargs.get("normalized_tiles") is not None:
            normalized = OvisNormalizedInputs(
                normalized_tiles=kwargs["normalized_tiles"], grids=kwargs["grids"]
            )
            pixels, grids = normalized["normalized_tiles"], normalized["grids"]
            tiles = self.visual_tokenizer(
                pixels, pixels.new_zeros(len(pixels), 4, dtype=torch.int32)
            )
            return self._interleave(tiles, grids.tolist())
        if kwargs.get("pixel_values") is None:
            return []
        images = OvisImageInputs(
            pixel_values=kwargs["pixel_values"],
            rectangles=kwargs["rectangles"],
            grids=kwargs["grids"],
        )
        tiles = self.visual_tokenizer(images["pixel_values"], images["rectangles"])
        return self._interleave(tiles, images["grids"].tolist())

    def _embed_videos(self, videos: OvisVideoInputs) -> tuple[torch.Tensor, ...]:
        tiles = self.visual_tokenizer(
            videos["video_pixels"], videos["video_rectangles"]
        )
        frames = self._interleave(tiles, [[1, 1]] * len(tiles))
        length = frames[0].shape[0]
        lengths = [count * length for count in videos["video_frames"].tolist()]
        return torch.cat(frames).split(lengths)

    def _interleave(
        self, tiles: torch.Tensor, grids: list[list[int]]
    ) -> tuple[torch.Tensor, ...]:
        """Place each image's tiles among its indicator rows.

        Args:
            tiles: [tiles, tokens_per_tile, hidden_size] of all images in order.
            grids: Rows and columns per image.

        Returns:
            Per image, [tokens, hidden_size].

        """
        indicators = self.visual_tokenizer.head.indicators
        next_tile = iter(tiles)
        parts: list[torch.Tensor] = []
        lengths = []
        for rows, columns in grids:
            image = [
                next(next_tile) if mark == TILE else indicators[mark : mark + 1]
                for mark in token_layout(rows, columns)
            ]
            lengths.append(sum(part.shape[0] for part in image))
            parts += image
        embeddings = torch.cat(parts)
        if self.config.embedding_scale is not None:
            # The factor is rounded to the model's type first, as the text model's is.
            scale = embeddings.new_full((), self.config.embedding_scale)
            embeddings = embeddings * scale
        return embeddings.split(lengths)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: object,
    ) -> torch.Tensor | IntermediateTensors:
        if intermediate_tensors is not None:
            inputs_embeds = None
        return self.llm.model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        return self.llm.compute_logits(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loader = AutoWeightsLoader(self)
        return loader.load_weights(weights, mapper=self.hf_to_vllm_mapper)
