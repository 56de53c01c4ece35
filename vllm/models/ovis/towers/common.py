# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the vision towers share: patch embedding, attention and weight loading."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from vllm.config import get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention.mm_encoder_attention import (
    MMEncoderAttention,
)
from vllm.model_executor.layers.fusion.quant_activation import QuantizedActivation
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.quantization import QuantizationConfig
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.utils import WeightsMapper
from vllm.model_executor.models.vision import get_multimodal_config
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from ..encoder_defaults import is_tuned_for_gpu
from ..ops import (
    padded_patch_width,
    padded_patches,
    quantized_for,
    rms_norm,
    runs_triton,
)
from ..products import linear


def runs_own_kernels() -> bool:
    """Whether a tower built now runs fused kernels itself, on tensors that they take.

    In the default start the engine's layers are plain torch, for its compiler to fuse.
    The tower is outside the compiled text model: there an RMSNorm would run as six
    kernels. Where the tower is compiled too, the compiler fuses more.
    """
    return not get_current_vllm_config().compilation_config.compile_mm_encoder


class TowerRMSNorm(RMSNorm):
    """RMSNorm that is one kernel, also outside the compiled text model."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps)
        self.runs_own_kernel = runs_own_kernels()

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        consumer: nn.Module | None = None,
    ) -> Any:
        """Normalise x, or x + residual; these two, [tokens, width], may be overwritten.

        Args:
            x: What is normalised, or added first.
            residual: What it is added to.
            consumer: Linear layer that gets the result, quantized where it takes it
                so.

        Returns:
            The normalised rows; with a residual, a pair of them and the sum.

        """
        if not (self.runs_own_kernel and runs_triton(x)):
            return super().forward(x, residual)
        normed = rms_norm(x, residual, self.weight, self.variance_epsilon, consumer)
        return normed if residual is None else (normed, residual)


class PatchEmbedding(nn.Module):
    """Convolution whose kernel equals its stride, as one matrix product.

    Stays in the checkpoint's float type under every quantization: it takes one percent
    of the tower's time, and its input is the picture itself.
    """

    def __init__(self, patch_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(hidden_size, padded_patch_width(patch_size)),
            requires_grad=False,
        )
        self.bias = nn.Parameter(torch.empty(hidden_size), requires_grad=False)
        self.weight.weight_loader = self._load_convolution  # type: ignore[attr-defined]

    @staticmethod
    def _load_convolution(param: torch.Tensor, loaded: torch.Tensor) -> None:
        default_weight_loader(param, padded_patches(loaded.flatten(1)))

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """Embed flattened patches.

        Args:
            patches: Normalised pixels, [tiles, patches, padded_patch_width], each
                patch in (channel, row, column) order.

        Returns:
            [tiles * patches, hidden_size].

        """
        return linear(patches.flatten(0, 1), self.weight, self.bias)


def may_plan(attention: MMEncoderAttention) -> bool:
    """Whether `planned_attention` may stand for the engine's, were its shapes known.

    The user has named no back end, and it has been measured on this GPU.
    """
    config = get_multimodal_config()
    return (
        attention.attn_backend == AttentionBackendEnum.FLASH_ATTN
        and (config is None or config.mm_encoder_attn_backend is None)
        and is_tuned_for_gpu()
    )


def planned_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, head_size: int
) -> torch.Tensor:
    """Attention by cuDNN, [tiles, patches, width] each and in return.

    For ten tiles of Ovis2 on an H200 0.073 ms instead of FlashAttention's 0.085, but
    0.07 s of planning at each new number of tiles.
    """
    query, key, value = (
        x.unflatten(-1, (-1, head_size)).transpose(1, 2) for x in (query, key, value)
    )
    with sdpa_kernel(
        [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True
    ):
        attended = F.scaled_dot_product_attention(query, key, value)
    return attended.transpose(1, 2).flatten(2)


@contextmanager
def shapes_planned(tower: nn.Module) -> Iterator[None]:
    """Let a tower use kernels that pay where a shape comes again and again: in a graph.

    They plan for a shape at its first call, or are slow to launch.
    """
    layers: list[Any] = [m for m in tower.modules() if hasattr(m, "planned")]
    for layer in layers:
        layer.planned = True
    try:
        yield
    finally:
        for layer in layers:
            layer.planned = False


class TowerAttention(nn.Module):
    """Full self-attention among the patches of one tile."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        qkv_bias: bool,
        proj_bias: bool,
        *,
        patches: int,
        qkv_name: str,
        proj_name: str,
        disable_tp: bool,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()
        self.head_size = hidden_size // num_heads
        self.patches = patches
        self.runs_own_kernels = runs_own_kernels()
        tp_size = 1 if disable_tp else get_tensor_model_parallel_world_size()
        self.num_heads = num_heads // tp_size
        # The two projections keep the checkpoint's names, which differ between
        # towers: adapters and quantization lists address modules by them.
        self.qkv_name, self.proj_name = qkv_name, proj_name
        setattr(
            self,
            qkv_name,
            QKVParallelLinear(
                hidden_size,
                self.head_size,
                num_heads,
                bias=qkv_bias,
                quant_config=quant_config,
                prefix=f"{prefix}.{qkv_name}",
                disable_tp=disable_tp,
                return_bias=False,
            ),
        )
        setattr(
            self,
            proj_name,
            RowParallelLinear(
                hidden_size,
                hidden_size,
                bias=proj_bias,
                quant_config=quant_config,
                prefix=f"{prefix}.{proj_name}",
                disable_tp=disable_tp,
                return_bias=False,
            ),
        )
        self.attn = MMEncoderAttention(
            self.num_heads, self.head_size, prefix=f"{prefix}.attn"
        )
        self.may_plan = self.runs_own_kernels and may_plan(self.attn)
        self.planned = False

    @property
    def input_layer(self) -> nn.Module:
        """The linear layer that takes the input."""
        return getattr(self, self.qkv_name)

    @property
    def output_layer(self) -> nn.Module:
        """The linear layer that gives the output."""
        return getattr(self, self.proj_name)

    def attend(
        self, hidden_states: torch.Tensor | QuantizedActivation
    ) -> torch.Tensor | QuantizedActivation:
        """Attend within each tile: what the output layer takes.

        Args:
            hidden_states: [tiles * patches, hidden_size].

        Returns:
            [tiles * patches, hidden_size of this rank].

        """
        qkv = self.input_layer(hidden_states)
        query, key, value = qkv.view(-1, self.patches, qkv.shape[-1]).chunk(3, dim=-1)
        if self.planned and self.may_plan:
            attended = planned_attention(query, key, value, self.head_size)
        else:
            attended = self.attn(query, key, value)
        attended = attended.flatten(0, 1)
        if self.runs_own_kernels:
            return quantized_for(self.output_layer, attended)
        return attended

    def forward(
        self, hidden_states: torch.Tensor | QuantizedActivation
    ) -> torch.Tensor:
        """Attend within each tile, [tiles * patches, hidden_size] to the same."""
        return self.output_layer(self.attend(hidden_states))


def load_tower_weights(
    tower: nn.Module,
    weights: Iterable[tuple[str, torch.Tensor]],
    mapper: WeightsMapper,
    unused_prefixes: tuple[str, ...],
) -> set[str]:
    """Load every tensor of a tower, refusing one that has no place.

    The engine's general loader drops unexpected biases in silence; in a tower that
    would change the answers (`use_bias` checkpoints), so here each tensor is either
    loaded, or stored by the authors without being used, or an error.

    Args:
        tower: The module to fill.
        weights: Names relative to the tower, with their tensors.
        mapper: Renames and stacked parts.
        unused_prefixes: Modules that checkpoints store and the authors never apply.

    Returns:
        Names of the parameters that were loaded.

    Raises:
        ValueError: If a tensor belongs to no parameter.

    """
    params = dict(tower.named_parameters())
    loaded: set[str] = set()
    used = (item for item in weights if not item[0].startswith(unused_prefixes))
    for name, tensor in mapper.apply(used):
        if name not in params:
            raise ValueError(
                f"The checkpoint holds {name!r}, for which the vision tower "
                f"{type(tower).__name__} has no parameter; check the bias options "
                "and the number of layers in visual_tokenizer_config."
            )
        param = params[name]
        weight_loader: Any = getattr(param, "weight_loader", default_weight_loader)
        shard = (tensor.shard_id,) if hasattr(tensor, "shard_id") else ()
        weight_loader(param, tensor, *shard)
        loaded.add(name)
    return loaded
