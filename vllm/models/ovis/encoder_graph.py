# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Vision encoder in CUDA graphs (`cudagraph_mm_encoder`).

A graph runs the tower over a fixed number of tiles, which is what needs most launches.
Normalisation before it and the visual vocabulary after it run as always: few launches,
on the real tiles only, and without their large buffers in the graphs' memory.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from vllm.model_executor.models.interfaces import SupportsEncoderCudaGraph
from vllm.v1.worker.encoder_cudagraph_defs import (
    EncoderCudaGraphCaptureInputs,
    EncoderCudaGraphConfig,
    EncoderCudaGraphReplayBuffers,
    EncoderItemSpec,
)

from .config import OvisConfig, VisionConfig
from .ops import padded_patch_width
from .tile_batch import select_items, tile_batch
from .towers.common import shapes_planned
from .visual_tokenizer import VisualTokenizer

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class OvisEncoderGraphs(SupportsEncoderCudaGraph):
    """What the engine's graph manager asks an Ovis model."""

    config: OvisConfig
    vision: VisionConfig
    visual_tokenizer: VisualTokenizer

    def interleave(
        self, tiles: torch.Tensor, grids: Sequence[Sequence[Sequence[int]]]
    ) -> tuple[torch.Tensor, ...]:
        """Place each item's tiles among its indicator rows."""
        raise NotImplementedError

    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
        return EncoderCudaGraphConfig(
            modalities=["image", "video"],
            buffer_keys=["patches"],
            out_hidden_size=self.config.llm_config.hidden_size,
        )

    def get_input_modality(self, mm_kwargs: dict[str, Any]) -> str:
        return "video" if "video_frames" in mm_kwargs else "image"

    def get_max_frames_per_video(self) -> int:
        # Frames are tiles like any other, bounded by the token budgets alone.
        return 1

    def get_encoder_cudagraph_budget_range(
        self, vllm_config: "VllmConfig"
    ) -> tuple[int, int]:
        tokens = self.vision.encoder_graph_tokens
        return tokens[0], tokens[-1]

    def get_encoder_cudagraph_item_specs(
        self, mm_kwargs: dict[str, Any]
    ) -> list[EncoderItemSpec]:
        batch = tile_batch(mm_kwargs, validate=False)
        if batch is None:
            return [
                EncoderItemSpec(
                    input_size=0,
                    output_tokens=len(embeddings),
                    path_output_tokens={"default": 0},
                )
                for embeddings in mm_kwargs["image_embeds"]
            ]
        tokens = self.vision.tokens_per_tile
        return [
            EncoderItemSpec(
                input_size=tiles,
                output_tokens=length,
                path_output_tokens={"default": tiles * tokens},
            )
            for tiles, length in zip(batch.tiles_per_item, batch.lengths(tokens))
        ]

    def select_encoder_cudagraph_items(
        self, mm_kwargs: dict[str, Any], indices: list[int]
    ) -> dict[str, Any]:
        return select_items(mm_kwargs, indices)

    def prepare_encoder_cudagraph_capture_inputs(
        self,
        token_budget: int,
        max_batch_size: int,
        max_frames_per_batch: int,
        device: torch.device,
        dtype: torch.dtype,
        path: str = "default",
        axis_keys: tuple[Any, ...] | None = None,
    ) -> EncoderCudaGraphCaptureInputs:
        vision = self.vision
        tiles = token_budget // vision.tokens_per_tile
        if tiles == 0:
            raise ValueError(
                f"encoder_cudagraph_token_budgets holds {token_budget}, but one tile "
                f"of this model has {vision.tokens_per_tile} tokens."
            )
        patches = torch.zeros(
            tiles,
            vision.patches_per_side**2,
            padded_patch_width(vision.patch_size),
            device=device,
            dtype=dtype,
        )
        return EncoderCudaGraphCaptureInputs(values={"patches": patches})

    def prepare_encoder_cudagraph_replay_buffers(
        self,
        mm_kwargs: dict[str, Any],
        max_batch_size: int,
        max_frames_per_batch: int,
        path: str = "default",
    ) -> EncoderCudaGraphReplayBuffers:
        return EncoderCudaGraphReplayBuffers(
            values={"patches": self._patches(mm_kwargs)}
        )

    def encoder_cudagraph_forward(
        self, inputs: dict[str, torch.Tensor], path: str = "default"
    ) -> torch.Tensor:
        """Features, [tiles, tokens_per_tile, merged_size]."""
        with shapes_planned(self.visual_tokenizer.backbone):
            return self.visual_tokenizer.features(inputs["patches"])

    def encoder_eager_forward(
        self, mm_kwargs: dict[str, Any], path: str = "default"
    ) -> torch.Tensor:
        """Features, [tiles, tokens_per_tile, merged_size], of more than fit a graph."""
        return self.visual_tokenizer.features(self._patches(mm_kwargs))

    def postprocess_encoder_output(
        self,
        outputs: dict[str, torch.Tensor],
        indices: list[int],
        per_item_out_tokens: list[int],
        dest: dict[int, torch.Tensor] | list[torch.Tensor | None],
        clone: bool = False,
        batch_mm_kwargs: dict[str, Any] | None = None,
    ) -> None:
        assert batch_mm_kwargs is not None
        batch = tile_batch(batch_mm_kwargs, validate=False)
        items: Sequence[torch.Tensor]
        if batch is None:
            items = batch_mm_kwargs["image_embeds"]
        else:
            # A graph's output has room for more tiles than the batch holds.
            features = outputs["default"][: sum(batch.tiles_per_item)]
            items = self.interleave(self.visual_tokenizer.embed(features), batch.grids)
        for index, item in zip(indices, items):
            dest[index] = item

    def _patches(self, mm_kwargs: dict[str, Any]) -> torch.Tensor:
        batch = tile_batch(mm_kwargs)
        assert batch is not None
        return self.visual_tokenizer.patches(batch.pixels, batch.rectangles)
