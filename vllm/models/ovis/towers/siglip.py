# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""SigLIP, the vision tower of Ovis1.6.

Pre-norm transformer with LayerNorm and GELU (https://arxiv.org/abs/2303.15343).
Module names follow the checkpoint, so that adapters and quantization lists match.
"""

from collections.abc import Iterable

import torch
from torch import nn

from vllm.compilation.decorators import (
    should_torch_compile_mm_encoder,
    support_torch_compile,
)
from vllm.model_executor.layers.activation import get_act_fn
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.quantization import QuantizationConfig
from vllm.model_executor.models.utils import WeightsMapper

from ..config import VisionConfig
from .common import PatchEmbedding, TowerAttention, load_tower_weights


class SiglipMLP(nn.Module):
    """fc2(gelu(fc1 x))."""

    def __init__(
        self,
        sizes: VisionConfig,
        disable_tp: bool,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()
        self.fc1 = ColumnParallelLinear(
            sizes.hidden_size,
            sizes.intermediate_size,
            quant_config=quant_config,
            prefix=f"{prefix}.fc1",
            disable_tp=disable_tp,
            return_bias=False,
        )
        self.act = get_act_fn(sizes.hidden_act)
        self.fc2 = RowParallelLinear(
            sizes.intermediate_size,
            sizes.hidden_size,
            quant_config=quant_config,
            prefix=f"{prefix}.fc2",
            disable_tp=disable_tp,
            return_bias=False,
        )

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden_size] to the same shape."""
        return self.fc2(self.act(self.fc1(hidden_states)))


@support_torch_compile(
    dynamic_arg_dims={"hidden_states": 0},
    enable_if=should_torch_compile_mm_encoder,
    is_encoder=True,
)
class SiglipLayer(nn.Module):
    """Attention and MLP, each behind a LayerNorm and around a residual."""

    def __init__(
        self,
        sizes: VisionConfig,
        disable_tp: bool,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(sizes.hidden_size, sizes.norm_eps)
        self.self_attn = TowerAttention(
            sizes.hidden_size,
            sizes.num_heads,
            sizes.qkv_bias,
            sizes.use_bias,
            patches=sizes.patches_per_side**2,
            qkv_name="qkv_proj",
            proj_name="out_proj",
            disable_tp=disable_tp,
            quant_config=quant_config,
            prefix=f"{prefix}.self_attn",
        )
        self.layer_norm2 = nn.LayerNorm(sizes.hidden_size, sizes.norm_eps)
        self.mlp = SiglipMLP(sizes, disable_tp, quant_config, f"{prefix}.mlp")

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[tiles * patches, hidden_size] to the same shape."""
        hidden_states = hidden_states + self.self_attn(self.layer_norm1(hidden_states))
        return hidden_states + self.mlp(self.layer_norm2(hidden_states))


class SiglipEmbeddings(nn.Module):
    """Patch embedding plus learned positions."""

    def __init__(self, sizes: VisionConfig) -> None:
        super().__init__()
        self.patch_embedding = PatchEmbedding(sizes.patch_size, sizes.hidden_size)
        # Every tile has all positions in order, so the table is added as a whole.
        self.position_embedding = nn.Embedding(
            sizes.patches_per_side**2, sizes.hidden_size
        )

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """[tiles, patches, padded_patch_width] to [tiles, patches, hidden_size]."""
        embedded = self.patch_embedding(patches).view(*patches.shape[:2], -1)
        return embedded + self.position_embedding.weight


class SiglipEncoder(nn.Module):
    """The stack of layers, without the final norm that Ovis never applies."""

    def __init__(
        self,
        sizes: VisionConfig,
        disable_tp: bool,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            SiglipLayer(
                sizes=sizes,
                disable_tp=disable_tp,
                quant_config=quant_config,
                prefix=f"{prefix}.layers.{index}",
            )
            for index in range(sizes.num_layers)
        )

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[tiles, patches, hidden_size] to the same shape."""
        tokens = hidden_states.flatten(0, 1)
        for layer in self.layers:
            tokens = layer(tokens)
        return tokens.view_as(hidden_states)


class SiglipTower(nn.Module):
    """SigLIP up to its last layer."""

    mapper = WeightsMapper(
        orig_to_new_prefix={"vision_model.": ""},
        orig_to_new_stacked={
            ".q_proj.": (".qkv_proj.", "q"),
            ".k_proj.": (".qkv_proj.", "k"),
            ".v_proj.": (".qkv_proj.", "v"),
        },
    )

    def __init__(
        self,
        sizes: VisionConfig,
        *,
        disable_tp: bool,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()
        self.embeddings = SiglipEmbeddings(sizes)
        self.encoder = SiglipEncoder(
            sizes, disable_tp, quant_config, f"{prefix}.encoder"
        )

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """Compute features of tiles.

        Args:
            patches: [tiles, patches, padded_patch_width] in the model's dtype.

        Returns:
            [tiles, patches, hidden_size]: the last layer's output, before the
            tower's final norm (authors' behaviour).

        """
        return self.encoder(self.embeddings(patches))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load the tower's tensors, names relative to it."""
        return load_tower_weights(
            self,
            weights,
            self.mapper,
            unused_prefixes=("vision_model.post_layernorm.", "vision_model.head."),
        )
