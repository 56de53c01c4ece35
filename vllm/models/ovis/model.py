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
from .processor import ImageSettings
from .quantization import check_gptq_backend, visual_quant_config
from .tiling import IMAGE_MARKER, TILE, token_layout
from .visual_tokenizer import VisualTokenizer
from .weight_names import CHECKPOINT_NAMES


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


@MULTIMODAL_REGISTRY.register_processor(
    OvisMultiModalProcessor,
    info=OvisProcessingInfo,
    dummy_inputs=OvisDummyInputsBuilder,
)
class Ovis(nn.Module, SupportsMultiModal, SupportsPP):
    """Ovis 1.6 (SigLIP) and Ovis 2 (AIMv2)."""

    hf_to_vllm_mapper = CHECKPOINT_NAMES
    # Quantization lists name the parts that the text models and towers fuse.
    packed_modules_mapping = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
        "fc13": ["fc1", "fc3"],
    }

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        assert isinstance(config, OvisConfig)
        images = ImageSettings.from_preprocessor_config(
            vllm_config.model_config.hf_image_processor_config
        )
        self.config = config
        check_gptq_backend(vllm_config.quant_config)

        with self._mark_tower_model(vllm_config, "image"):
            self.visual_tokenizer = VisualTokenizer(
                config.vision,
                config.llm_config.hidden_size,
                images.mean,
                images.std,
                quant_config=visual_quant_config(vllm_config.quant_config),
                prefix=maybe_prefix(prefix, "visual_tokenizer"),
            )
        with self._mark_language_model(vllm_config):
            self.llm: Any = init_vllm_registered_model(
                vllm_config=vllm_config,
                hf_config=config.llm_config,
                prefix=maybe_prefix(prefix, "llm"),
            )
        self.make_empty_intermediate_tensors = (
            self.llm.make_empty_intermediate_tensors  # type: ignore[assignment]
        )

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        if modality == "image":
            return IMAGE_MARKER
        raise ValueError(f"Ovis has no {modality!r} input; it takes images.")

    def embed_multimodal(self, **kwargs: object) -> MultiModalEmbeddings:
        if kwargs.get("pixel_values") is None:
            return []
        images = OvisImageInputs(
            pixel_values=kwargs["pixel_values"],
            rectangles=kwargs["rectangles"],
            grids=kwargs["grids"],
        )
        tiles = self.visual_tokenizer(images["pixel_values"], images["rectangles"])
        return self._interleave(tiles, images["grids"].tolist())

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
