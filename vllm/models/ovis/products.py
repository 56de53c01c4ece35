# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Matrix products of the visual tokenizer, fused with what stands beside them."""

from typing import Any

import torch
import torch.nn.functional as F

from vllm import envs
from vllm.model_executor.determinism.batch_invariant import linear_batch_invariant
from vllm.model_executor.layers.fusion.quant_activation import QuantizedActivation
from vllm.model_executor.layers.linear import (
    LinearBase,
    MergedColumnParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.platforms import current_platform
from vllm.triton_utils import HAS_TRITON, tl, triton

from .encoder_defaults import is_tuned_for_gpu
from .ops import takes_fp8

if HAS_TRITON:
    from triton.tools.tensor_descriptor import TensorDescriptor

FEW_ROWS = 4096
"""Up to so many rows `gated_linear` works on smaller blocks, which keep all
multiprocessors busy: one tile, 1024 rows, takes 0.022 ms instead of 0.027 on an H200.
"""

MANY_ROWS = 16384
"""Beyond so many rows `gated_linear` pays outside of graphs: launching it takes some
0.1 ms of processor time, for which the device would wait with fewer."""


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Matrix product outside the engine's linear layers.

    Args:
        x: [rows, inputs].
        weight: [outputs, inputs].
        bias: [outputs].

    Returns:
        [rows, outputs]. In the engine's batch-invariant mode no row depends on how many
        there are; the matrix library picks its kernel by that number.

    """
    if envs.VLLM_BATCH_INVARIANT and x.is_cuda:
        return linear_batch_invariant(x, weight, bias)
    return F.linear(x, weight, bias)


def is_plain(layer: Any, kind: type[LinearBase]) -> bool:
    """Whether a layer is one product with its weight: no scale, adapter or bias."""
    return (
        type(layer) is kind
        and type(layer.quant_method) is UnquantizedLinearMethod
        and layer.bias is None
    )


def add_linear(
    layer: Any, x: torch.Tensor | QuantizedActivation, residual: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Apply a row-parallel layer whose result is to be added to a residual.

    Where the layer is a single product on a GPU, the product adds to the residual: the
    norm behind it then moves half as many bytes, and the sum is rounded once instead of
    twice.

    Args:
        layer: The layer.
        x: [tokens, inputs], or such rows quantized for the layer.
        residual: [tokens, outputs]; may be overwritten.

    Returns:
        The sum and None; or the layer's result and the residual, not added yet.

    """
    if (
        isinstance(x, torch.Tensor)
        and x.is_cuda
        and is_plain(layer, RowParallelLinear)
        and layer.tp_size == 1
        and not envs.VLLM_BATCH_INVARIANT
    ):
        return residual.addmm_(x, layer.weight.t()), None
    return layer(x), residual


def fuses_gate(layer: Any) -> bool:
    """Whether `gated_linear` takes this layer: gate and up projection on a Hopper GPU.

    The kernel's blocks are chosen for that architecture, and by the number of rows.
    """
    if not (HAS_TRITON and is_tuned_for_gpu()):
        return False
    if takes_fp8(layer):
        # Laid out for the matrix library: transposed, scales by output, and where
        # sizes are odd padded, and then not in halves.
        rows = layer.weight.t()
        sizes = layer.output_size_per_partition, layer.input_size_per_partition
        return (
            type(layer) is MergedColumnParallelLinear
            and layer.bias is None
            and rows.shape == sizes
            and rows.is_contiguous()
            and layer.weight_scale.shape == (rows.shape[0], 1)
            and _is_aligned(rows)
        )
    return (
        is_plain(layer, MergedColumnParallelLinear)
        and layer.weight.dtype in (torch.bfloat16, torch.float16)
        and _is_aligned(layer.weight)
    )


def _is_aligned(weight: torch.Tensor) -> bool:
    # Rows that are copied as blocks start at multiples of 16 bytes.
    outputs, inputs = weight.shape
    return outputs % 16 == 0 and inputs * weight.element_size() % 16 == 0


def num_rows(x: torch.Tensor | QuantizedActivation) -> int:
    """Rows of what a linear layer takes, [rows, inputs]."""
    return (x.orig_shape if isinstance(x, QuantizedActivation) else x.shape)[0]


def gated_linear(layer: Any, x: torch.Tensor | QuantizedActivation) -> torch.Tensor:
    """silu(gate x) * (up x), of a layer that `fuses_gate` accepts.

    One kernel computes the same columns of both and writes their product alone. For ten
    tiles of Ovis2 it takes 0.176 ms on an H200, product and gate apart 0.162 and 0.042.

    Args:
        layer: Gate and up projection, as one.
        x: [rows, inputs], contiguous, quantized where the layer takes it so.

    Returns:
        [rows, width]. Both products and silu are rounded to the result's type, as the
        authors' separate steps do. No row depends on the others.

    """
    scales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    if isinstance(x, QuantizedActivation):
        scales = x.scale, layer.weight_scale
        weight, data, dtype = layer.weight.t(), x.data, x.orig_dtype
    else:
        weight, data, dtype = layer.weight, x, x.dtype
    rows, inputs = data.shape
    width = weight.shape[0] // 2
    output = data.new_empty(rows, width, dtype=dtype)
    if not rows:
        return output
    few = rows <= FEW_ROWS
    block_rows, block_width = 128, 64 if few else 128
    block_inputs = 128 // data.element_size()
    tiles = triton.cdiv(rows, block_rows) * triton.cdiv(width, block_width)
    programs = min(tiles, current_platform.num_compute_units())
    _gated_linear_kernel[(programs,)](
        TensorDescriptor.from_tensor(data, [block_rows, block_inputs]),
        TensorDescriptor.from_tensor(
            weight.view(2, width, inputs), [2, block_width, block_inputs]
        ),
        TensorDescriptor.from_tensor(output, [block_rows, block_width]),
        *scales,
        rows,
        width,
        inputs,
        programs,
        BLOCK_ROWS=block_rows,
        BLOCK_WIDTH=block_width,
        BLOCK_INPUTS=block_inputs,
        GROUP=16,
        STAGES=4,
        num_warps=4 if few else 8,
    )
    return output


@triton.jit
def _gated_linear_kernel(
    x,
    weight,
    output,
    x_scales,
    weight_scales,
    rows,
    width,
    inputs,
    programs,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
):
    dtype = output.dtype
    tiles_down = tl.cdiv(rows, BLOCK_ROWS)
    tiles_across = tl.cdiv(width, BLOCK_WIDTH)
    in_group = GROUP * tiles_across
    # Flattened, the next tile's loads overlap with this tile's end.
    for tile in tl.range(
        tl.program_id(0), tiles_down * tiles_across, programs, flatten=True
    ):
        # Neighbours in time share rows and columns in the cache.
        first = tile // in_group * GROUP
        height = tl.minimum(tiles_down - first, GROUP)
        row = (first + tile % in_group % height) * BLOCK_ROWS
        column = tile % in_group // height * BLOCK_WIDTH
        total = tl.zeros((BLOCK_ROWS, 2 * BLOCK_WIDTH), tl.float32)
        for k in tl.range(0, inputs, BLOCK_INPUTS, num_stages=STAGES):
            both = weight.load([0, column, k])
            both = tl.reshape(both, (2 * BLOCK_WIDTH, BLOCK_INPUTS))
            total = tl.dot(x.load([row, k]), both.T, total)
        if x_scales is not None:
            place = row + tl.arange(0, BLOCK_ROWS)
            scale = tl.load(x_scales + place, mask=place < rows, other=0.0)
            total *= scale[:, None]
            place = tl.arange(0, 2 * BLOCK_WIDTH)
            inside = column + place % BLOCK_WIDTH
            place = inside + place // BLOCK_WIDTH * width
            scale = tl.load(weight_scales + place, mask=inside < width, other=0.0)
            total *= scale[None, :]
        parts = tl.reshape(total.to(dtype), (BLOCK_ROWS, 2, BLOCK_WIDTH))
        gate, up = tl.split(tl.permute(parts, (0, 2, 1)))
        gate = gate.to(tl.float32)
        gate = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)
        output.store([row, column], (gate * up.to(tl.float32)).to(dtype))
