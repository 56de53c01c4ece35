# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Ovis 1.6 and Ovis 2: visual embeddings beside an unmodified text model."""

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar

import torch
from torch import nn

from vllm.config import VllmConfig
from vllm.model_executor.models.interfaces import (
    MultiModalEmbeddings,
    SupportsEagle,
    SupportsEagle3,
    SupportsLoRA,
    SupportsMultiModal,
    SupportsPP,
    SupportsQuant,
)
from vllm.model_executor.models.module_mapping import MultiModelKeys
from vllm.model_executor.models.utils import (
    AutoWeightsLoader,
    init_vllm_registered_model,
    maybe_prefix,
)
from vllm.model_executor.models.vision import is_vit_use_data_parallel
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalKwargsItem
from vllm.sequence import IntermediateTensors
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.utils.tensor_schema import TensorSchema, TensorShape

from .config import OvisConfig
from .inputs import (
    OvisDummyInputsBuilder,
    OvisMultiModalProcessor,
    OvisProcessingInfo,
)
from .marks import MARKERS, chat_mark
from .processor import ImageSettings, resolve_image_pad_id
from .quantization import check_kernels, visual_quant_config
from .tiling import TILE, token_layout
from .visual_tokenizer import VisualTokenizer
from .weight_names import CHECKPOINT_NAMES

TILE_FIELDS = ("pixel_values", "normalized_tiles", "video_pixels")
"""Fields of an item whose first dimension counts its tiles."""


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
class Ovis(
    nn.Module,
    SupportsMultiModal,
    SupportsLoRA,
    SupportsPP,
    SupportsQuant,
    SupportsEagle,
    SupportsEagle3,
):
    """Ovis 1.6 (SigLIP) and Ovis 2 (AIMv2)."""

    supports_encoder_tp_data: ClassVar[bool] = True
    supports_tower_connector_lora: ClassVar[bool] = True
    hf_to_vllm_mapper = CHECKPOINT_NAMES
    # What text models and towers fuse, for adapters and quantization lists: an outer
    # mapping hides those of the parts.
    packed_modules_mapping = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
        "qkv": ["qkv"],
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
        check_kernels(vllm_config.quant_config)

        with self._mark_tower_model(vllm_config, {"image", "video"}):
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
        text_model: Any = self.llm
        self.make_empty_intermediate_tensors = (
            text_model.make_empty_intermediate_tensors
        )
        if vllm_config.speculative_config is not None:
            # The drafter puts this token where an image stands.
            config.image_token_index = resolve_image_pad_id(
                cached_tokenizer_from_config(vllm_config.model_config),
                config.llm_config.model_type,
            )
        self._refuse_tower_lora_over_shared_tiles(vllm_config)

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        if modality == "image_embeds":
            modality = "image"
        if modality in MARKERS:
            return chat_mark(modality)
        raise ValueError(
            f"Ovis has no {modality!r} input; it takes image, image_embeds and video."
        )

    def get_mm_mapping(self) -> MultiModelKeys:
        return MultiModelKeys.from_string_field(
            language_model="llm",
            connector="visual_tokenizer.head",
            tower_model="visual_tokenizer.backbone",
        )

    def get_mm_lora_token_counts(
        self,
        *,
        modality: str,
        mm_kwargs: MultiModalKwargsItem | None,
        num_mm_embeds: int,
    ) -> tuple[int, int | None]:
        """Count the patches that an item's tiles send through the tower.

        Indicator rows do not pass the tower and are not counted. The head works in
        chunks of tokens, which the engine's adapter layers cannot follow, so it has no
        count and its adapters are refused.

        Args:
            modality: Kind of the item.
            mm_kwargs: The item; None asks for the most that so many embeddings allow.
            num_mm_embeds: Embeddings of the item, indicators among them.

        """
        vision = self.config.vision
        if mm_kwargs is None:
            tiles = num_mm_embeds // vision.tokens_per_tile
        else:
            # Ready-made embeddings hold no tiles.
            tiles = sum(
                len(mm_kwargs[name].data) for name in TILE_FIELDS if name in mm_kwargs
            )
        return tiles * vision.patches_per_side**2, None

    def check_lora_modules(self, names: Iterable[str]) -> None:
        """Refuse an adapter of which the engine would drop a part in silence.

        Args:
            names: Modules of the adapter, named as in this model.

        Raises:
            ValueError: If modules of the visual tokenizer are among them that no
                adapter layer covers; the message lists them.

        """
        manager = self.lora_manager
        assert manager is not None
        reached = set(manager.modules).union(*manager.packed_modules.values())
        unreached = sorted(
            name
            for name in names
            if name.startswith("visual_tokenizer.") and name not in reached
        )
        if unreached:
            raise ValueError(
                f"The adapter changes {unreached}, which the server would ignore. "
                "Start it with --enable-tower-connector-lora to serve adapters of the "
                "vision tower; those of the visual head are not supported: merge them "
                "into the checkpoint."
            )

    def _refuse_tower_lora_over_shared_tiles(self, vllm_config: VllmConfig) -> None:
        """Refuse tower adapters where each rank encodes tiles of its own.

        The engine tells every rank which adapter each tile of the whole batch has.
        """
        lora = vllm_config.lora_config
        if (
            lora is not None
            and lora.enable_tower_connector_lora
            and is_vit_use_data_parallel(self.config.vision.num_heads)
            and vllm_config.parallel_config.tensor_parallel_size > 1
        ):
            raise ValueError(
                "--enable-tower-connector-lora needs a vision tower sharded over the "
                "tensor-parallel ranks, but here each rank encodes whole tiles "
                "(--mm-encoder-tp-mode data, or "
                f"{self.config.vision.num_heads} attention heads that "
                f"{vllm_config.parallel_config.tensor_parallel_size} ranks do not "
                "divide)."
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
