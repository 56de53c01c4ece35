# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Ovis 1.6 and Ovis 2: visual embeddings beside an unmodified text model."""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

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

from .config import OvisConfig
from .encoder_graph import OvisEncoderGraphs
from .inputs import (
    OvisDummyInputsBuilder,
    OvisMultiModalProcessor,
    OvisProcessingInfo,
)
from .marks import MARKERS, chat_mark
from .processor import ImageSettings, resolve_image_pad_id
from .quantization import check_kernels, visual_quant_config
from .tile_batch import TILE_FIELDS, tile_batch
from .tiling import TILE, token_layout
from .visual_tokenizer import VisualTokenizer
from .weight_names import CHECKPOINT_NAMES


@MULTIMODAL_REGISTRY.register_processor(
    OvisMultiModalProcessor,
    info=OvisProcessingInfo,
    dummy_inputs=OvisDummyInputsBuilder,
)
class Ovis(
    nn.Module,
    OvisEncoderGraphs,
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
        self.vision = config.vision
        check_kernels(vllm_config.quant_config)

        with self._mark_tower_model(vllm_config, {"image", "video"}):
            self.visual_tokenizer = VisualTokenizer(
                self.vision,
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
        self._refuse_what_tower_lora_cannot_follow(vllm_config)

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
        vision = self.vision
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

    def _refuse_what_tower_lora_cannot_follow(self, vllm_config: VllmConfig) -> None:
        """Refuse tower adapters where the engine's map of adapters does not fit.

        The engine tells every rank which adapter each tile of the whole batch has.
        """
        lora = vllm_config.lora_config
        if lora is None or not lora.enable_tower_connector_lora:
            return
        if vllm_config.compilation_config.cudagraph_mm_encoder:
            raise ValueError(
                "--enable-tower-connector-lora does not go with "
                "cudagraph_mm_encoder: a graph's tiles are not those that the engine "
                "maps to adapters."
            )
        heads = self.vision.num_heads
        ranks = vllm_config.parallel_config.tensor_parallel_size
        if is_vit_use_data_parallel(heads) and ranks > 1:
            raise ValueError(
                "--enable-tower-connector-lora needs a vision tower sharded over the "
                "tensor-parallel ranks, but here each rank encodes whole tiles "
                f"(--mm-encoder-tp-mode data, or {heads} attention heads that "
                f"{ranks} ranks do not divide)."
            )

    def embed_multimodal(self, **kwargs: object) -> MultiModalEmbeddings:
        if kwargs.get("image_embeds") is not None:
            # Checked, with indicators and scale, when the request came in.
            return [embeds for embeds in kwargs["image_embeds"]]  # type: ignore[attr-defined]
        batch = tile_batch(kwargs)
        if batch is None:
            return []
        tiles = self.visual_tokenizer(batch.pixels, batch.rectangles)
        return self.interleave(tiles, batch.grids)

    def interleave(
        self, tiles: torch.Tensor, grids: Sequence[Sequence[Sequence[int]]]
    ) -> tuple[torch.Tensor, ...]:
        """Place each item's tiles among its indicator rows.

        Args:
            tiles: [tiles, tokens_per_tile, hidden_size] of all items in order.
            grids: Per item, rows and columns of its pictures.

        Returns:
            Per item, [tokens, hidden_size].

        """
        indicators = self.visual_tokenizer.head.indicators
        next_tile = iter(tiles)
        parts: list[torch.Tensor] = []
        lengths = []
        for item in grids:
            marks = [mark for grid in item for mark in token_layout(*grid)]
            rows = [
                next(next_tile) if mark == TILE else indicators[mark : mark + 1]
                for mark in marks
            ]
            lengths.append(sum(part.shape[0] for part in rows))
            parts += rows
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
