# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""AIMv2, the vision tower of Ovis2.

Pre-norm transformer with RMSNorm and SwiGLU (https://arxiv.org/abs/2411.14402).
Module names follow the checkpoint, so that adapters and quantization lists match.
"""

from collections.abc import Iterable

import torch
from torch import nn

from vllm.compilation.decorators import (
    should_torch_compile_mm_encoder,
    support_torch_compile,
)
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.fusion.quant_activation import QuantizedActivation
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.quantization import QuantizationConfig
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.utils import WeightsMapper

from ..config import VisionConfig
from ..ops import quantized_for, runs_triton, silu_and_mul
from ..products import MANY_ROWS, add_linear, fuses_gate, gated_linear, num_rows
from .common import (
    PatchEmbedding,
    TowerAttention,
    TowerRMSNorm,
    load_tower_weights,
    runs_own_kernels,
)


class AIMv2MLP(nn.Module):
    """fc2(silu(fc1 x) * fc3 x), with fc1 and fc3 as one product."""

    def __init__(
        self,
        sizes: VisionConfig,
        disable_tp: bool,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()
        self.fc13 = MergedColumnParallelLinear(
            sizes.hidden_size,
            [sizes.intermediate_size] * 2,
            bias=sizes.use_bias,
            quant_config=quant_config,
            prefix=f"{prefix}.fc13",
            disable_tp=disable_tp,
            return_bias=False,
        )
        self.act = SiluAndMul()
        self.runs_own_kernels = runs_own_kernels()
        self.planned = False
        self.fc2 = RowParallelLinear(
            sizes.intermediate_size,
            sizes.hidden_size,
            bias=sizes.use_bias,
            quant_config=quant_config,
            prefix=f"{prefix}.fc2",
            disable_tp=disable_tp,
            return_bias=False,
        )

    def gate(
        self, hidden_states: torch.Tensor | QuantizedActivation
    ) -> torch.Tensor | QuantizedActivation:
        """silu(fc1 x) * fc3 x, [tokens, intermediate_size of this rank]."""
        if not self.runs_own_kernels:
            return self.act(self.fc13(hidden_states))
        # In a graph launches cost nothing.
        pays = self.planned or num_rows(hidden_states) > MANY_ROWS
        if pays and fuses_gate(self.fc13):
            return quantized_for(self.fc2, gated_linear(self.fc13, hidden_states))
        gate_and_up = self.fc13(hidden_states)
        if runs_triton(gate_and_up):
            return silu_and_mul(gate_and_up, self.fc2)
        return self.act(gate_and_up)


@support_torch_compile(
    dynamic_arg_dims={"update": 0, "residual": 0},
    enable_if=should_torch_compile_mm_encoder,
    is_encoder=True,
)
class AIMv2Block(nn.Module):
    """One layer; the residual travels beside the update to fuse add and norm."""

    def __init__(
        self,
        sizes: VisionConfig,
        disable_tp: bool,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()
        self.norm_1 = TowerRMSNorm(sizes.hidden_size, sizes.norm_eps)
        self.attn = TowerAttention(
            sizes.hidden_size,
            sizes.num_heads,
            sizes.qkv_bias,
            sizes.use_bias,
            patches=sizes.patches_per_side**2,
            qkv_name="qkv",
            proj_name="proj",
            disable_tp=disable_tp,
            quant_config=quant_config,
            prefix=f"{prefix}.attn",
        )
        self.norm_2 = TowerRMSNorm(sizes.hidden_size, sizes.norm_eps)
        self.mlp = AIMv2MLP(sizes, disable_tp, quant_config, f"{prefix}.mlp")

    def forward(
        self, update: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Add the previous layer's update, then attend and transform.

        Args:
            update: [tiles * patches, hidden_size].
            residual: The same shape, or None if `update` has been added to it; both
                may be overwritten.

        Returns:
            The same of this layer.

        """
        attn, mlp = self.attn, self.mlp
        normed, total = add_and_norm(self.norm_1, update, residual, attn.input_layer)
        update, residual = self._add(attn.output_layer, attn.attend(normed), total)
        normed, total = add_and_norm(self.norm_2, update, residual, mlp.fc13)
        return self._add(mlp.fc2, mlp.gate(normed), total)

    def _add(
        self,
        layer: nn.Module,
        x: torch.Tensor | QuantizedActivation,
        residual: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.mlp.runs_own_kernels:
            return add_linear(layer, x, residual)
        return layer(x), residual


def add_and_norm(
    norm: TowerRMSNorm,
    update: torch.Tensor,
    residual: torch.Tensor | None,
    consumer: nn.Module,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add an update to its residual, unless that has been done, and normalise the sum.

    Returns:
        The normalised rows, and the sum.

    """
    if residual is None:
        return norm(update, consumer=consumer), update
    return norm(update, residual, consumer)


class AIMv2Patchifier(nn.Module):
    """Patch embedding followed by RMSNorm."""

    def __init__(self, sizes: VisionConfig) -> None:
        super().__init__()
        self.proj = PatchEmbedding(sizes.patch_size, sizes.hidden_size)
        self.norm = TowerRMSNorm(sizes.hidden_size, sizes.norm_eps)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """[tiles, patches, padded_patch_width] to [tiles * patches, hidden_size]."""
        return self.norm(self.proj(patches))


class AIMv2Preprocessor(nn.Module):
    """Patch embedding plus learned positions."""

    def __init__(self, sizes: VisionConfig) -> None:
        super().__init__()
        self.patchifier = AIMv2Patchifier(sizes)
        self.pos_embed = nn.Parameter(
            torch.empty(1, sizes.patches_per_side**2, sizes.hidden_size),
            requires_grad=False,
        )
        self.pos_embed.weight_loader = self._load_positions  # type: ignore[attr-defined]

    @staticmethod
    def _load_positions(param: torch.Tensor, loaded: torch.Tensor) -> None:
        # The converted layout stores the table without the leading axis.
        if loaded.dim() == 2:
            loaded = loaded.unsqueeze(0)
        default_weight_loader(param, loaded)

    def forward(self, patches: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Embed patches.

        Args:
            patches: [tiles, patches, padded_patch_width].

        Returns:
            Embedded patches and the positions that the first layer adds to them, each
            [tiles * patches, hidden_size].

        """
        # A copy: the layers write over it.
        positions = self.pos_embed.repeat(patches.shape[0], 1, 1)
        return self.patchifier(patches), positions.flatten(0, 1)


class AIMv2Trunk(nn.Module):
    """The stack of layers, without the final norm that Ovis never applies."""

    def __init__(
        self,
        sizes: VisionConfig,
        disable_tp: bool,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            AIMv2Block(
                sizes=sizes,
                disable_tp=disable_tp,
                quant_config=quant_config,
                prefix=f"{prefix}.blocks.{index}",
            )
            for index in range(sizes.num_layers)
        )

    def forward(
        self, update: torch.Tensor, residual: torch.Tensor | None
    ) -> torch.Tensor:
        """Run all layers.

        Args:
            update: [tiles * patches, hidden_size].
            residual: What it is added to, as a layer takes it; both may be overwritten.

        Returns:
            The last layer's output, the same shape.

        """
        for block in self.blocks:
            update, residual = block(update, residual)
        return update if residual is None else residual + update


class AIMv2Tower(nn.Module):
    """AIMv2 up to its last block."""

    mapper = WeightsMapper(
        orig_to_new_stacked={
            ".fc1.": (".fc13.", 0),
            ".fc3.": (".fc13.", 1),
            # Apart in the converted layout only; the authors store them as one.
            ".q_proj.": (".qkv.", "q"),
            ".k_proj.": (".qkv.", "k"),
            ".v_proj.": (".qkv.", "v"),
        }
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
        self.preprocessor = AIMv2Preprocessor(sizes)
        self.trunk = AIMv2Trunk(sizes, disable_tp, quant_config, f"{prefix}.trunk")

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """Compute features of tiles.

        Args:
            patches: [tiles, patches, padded_patch_width] in the model's dtype.

        Returns:
            [tiles, patches, hidden_size]: the last block's output, before the
            tower's final norm (authors' behaviour).

        """
        features = self.trunk(*self.preprocessor(patches))
        return features.view(*patches.shape[:2], -1)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load the tower's tensors, names relative to it."""
        return load_tower_weights(
            self, weights, self.mapper, unused_prefixes=("trunk.post_trunk_norm.",)
        )
