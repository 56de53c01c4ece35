# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Kernels of the visual tokenizer, with plain torch where Triton does not run."""

import torch
import torch.nn.functional as F

from vllm import envs
from vllm.model_executor.layers.fusion.quant_activation import (
    QuantizedActivation,
    get_input_quant_key,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8DynamicTokenSym,
)
from vllm.platforms import current_platform
from vllm.triton_utils import HAS_TRITON, tl, triton
from vllm.utils.math_utils import round_up

PATCH_ALIGNMENT = 16
"""Columns of flattened patches are padded to a multiple of this. 588 columns (14 x 14
patches) are no multiple of 16 bytes: on an H200 ten tiles then take 0.088 ms instead of
0.026."""


def runs_triton(x: torch.Tensor) -> bool:
    """Whether the Triton kernels take this tensor: on a GPU of NVIDIA or AMD."""
    return HAS_TRITON and x.is_cuda


def padded_patch_width(patch_size: int) -> int:
    """Columns of a flattened patch, zeros at its end included."""
    return round_up(3 * patch_size**2, PATCH_ALIGNMENT)


def normalized_patches(
    pixels: torch.Tensor,
    rectangles: torch.Tensor,
    table: torch.Tensor,
    patches_per_side: int,
    patch_size: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Normalise 8-bit tiles by table and cut them into patches.

    Args:
        pixels: uint8, [tiles, side, side, 3]; rows and columns that make no whole
            patch are left out.
        rectangles: int32, [tiles, 4]: top, left, height and width of the picture
            inside its tile; zero outside, after normalisation.
        table: float32, [3, 256]: normalised value of each channel's pixel values.
        patches_per_side: Patches along a tile's side.
        patch_size: Side of a patch in pixels.
        dtype: Type of the result; the table's values are rounded to it.

    Returns:
        [tiles, patches, padded_patch_width], each patch in (channel, row, column)
        order and then zeros, patches row by row.

    """
    tiles, grid, patch = pixels.shape[0], patches_per_side, patch_size
    width = padded_patch_width(patch_size)
    if runs_triton(pixels):
        patches = pixels.new_empty(tiles, grid**2, width, dtype=dtype)
        if tiles:
            _normalized_patches_kernel[(tiles * grid**2,)](
                pixels,
                rectangles,
                table,
                patches,
                pixels.stride(0),
                pixels.stride(1),
                GRID=grid,
                PATCH=patch,
                WIDTH=width,
                BLOCK=triton.next_power_of_2(width),
                num_warps=4,
            )
        return patches

    used = grid * patch
    patches = pixels.new_zeros(tiles, grid**2, width, dtype=dtype)
    table = table.to(dtype)
    # Tile by tile: what is read and written stays in a processor's cache.
    for index, (top, left, rows, columns) in enumerate(rectangles.tolist()):
        bottom, right = min(top + rows, used), min(left + columns, used)
        content = pixels[index, top:bottom, left:right].permute(2, 0, 1).int()
        tile = pixels.new_zeros(3, used, used, dtype=dtype)
        for values, channel, line in zip(tile, content, table):
            looked_up = line.index_select(0, channel.flatten()).view(channel.shape)
            values[top:bottom, left:right] = looked_up
        cut = tile.view(3, grid, patch, grid, patch).permute(1, 3, 0, 2, 4)
        patches[index, :, : 3 * patch**2] = cut.flatten(2).flatten(0, 1)
    return patches


def padded_patches(patches: torch.Tensor) -> torch.Tensor:
    """Append zeros to patches, [tiles, patches, 3 * patch_size**2], for alignment."""
    width = patches.shape[-1]
    return F.pad(patches, (0, round_up(width, PATCH_ALIGNMENT) - width))


@triton.jit
def _normalized_patches_kernel(
    pixels,
    rectangles,
    table,
    patches,
    tile_stride,
    row_stride,
    GRID: tl.constexpr,
    PATCH: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    tile = program // (GRID * GRID)
    place = program % (GRID * GRID)
    element = tl.arange(0, BLOCK)
    channel = element // (PATCH * PATCH)
    row = place // GRID * PATCH + element % (PATCH * PATCH) // PATCH
    column = place % GRID * PATCH + element % PATCH

    top = tl.load(rectangles + tile * 4)
    left = tl.load(rectangles + tile * 4 + 1)
    height = tl.load(rectangles + tile * 4 + 2)
    width = tl.load(rectangles + tile * 4 + 3)
    inside = (row >= top) & (row < top + height)
    inside = inside & (column >= left) & (column < left + width)
    inside = inside & (element < 3 * PATCH * PATCH)

    source = pixels + tile.to(tl.int64) * tile_stride
    value = tl.load(source + row * row_stride + column * 3 + channel, mask=inside)
    normalized = tl.load(table + channel * 256 + value, mask=inside, other=0.0)
    target = patches + program.to(tl.int64) * WIDTH
    normalized = normalized.to(patches.dtype.element_ty)
    tl.store(target + element, normalized, mask=element < WIDTH)


def word_probabilities(
    logits: torch.Tensor,
    num_words: int,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    consumer: torch.nn.Module,
) -> torch.Tensor | QuantizedActivation:
    """Turn rows of logits into probabilities: softmax(LayerNorm(logits)).

    Statistics run over the first `num_words` columns; the rest, padding, becomes zero.
    The normalised logits are rounded to the logits' type before the softmax, as the
    authors' two separate steps do.

    Args:
        logits: [tokens, padded words], contiguous rows; overwritten unless the result
            is quantized. Padding is zero.
        num_words: Columns that stand for words.
        weight: [padded words], LayerNorm's weight; padding is zero.
        bias: [padded words], LayerNorm's bias; padding is minus infinity.
        eps: LayerNorm's epsilon.
        consumer: Linear layer that gets the result, quantized where it takes it so.

    Returns:
        [tokens, padded words].

    """
    if runs_triton(logits):
        tokens, padded = logits.shape
        quantized = _empty_fp8(logits, padded) if takes_fp8(consumer) else None
        block = min(8192, triton.next_power_of_2(padded))
        _word_probabilities_kernel[(min(tokens, _resident_rows(logits.device)),)](
            logits,
            weight,
            bias,
            logits if quantized is None else quantized.data,
            None if quantized is None else quantized.scale,
            logits.stride(0),
            tokens,
            num_words,
            padded,
            eps,
            WHOLE=padded % block == 0,
            BLOCK=block,
            num_warps=max(1, block // 512),
        )
        return logits if quantized is None else quantized
    words = logits[:, :num_words]
    normed = F.layer_norm(
        words, (num_words,), weight[:num_words], bias[:num_words], eps
    )
    logits[:, :num_words] = normed.softmax(dim=-1)
    logits[:, num_words:] = 0
    return logits


def _resident_rows(device: torch.device) -> int:
    """Rows of logits at work at once: a row is read three times, and two on each
    multiprocessor stay in the cache between (34 of 50 MB on an H200)."""
    return 2 * current_platform.num_compute_units(device.index or 0)


# One compiled kernel for all numbers of tokens, also those that only a request brings.
@triton.jit(do_not_specialize=["tokens"])
def _word_probabilities_kernel(
    logits,
    weight,
    bias,
    output,
    scales,
    row_stride,
    tokens,
    num_words,
    padded,
    eps,
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)
    for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        # A tensor once compiled, which a checker of types cannot know.
        row = logits + token.to(tl.int64) * row_stride  # type: ignore[attr-defined]
        # Sums are taken around a mean of the first block, so that their squares stay
        # small. Padding is zero in them, and taken out again.
        centre = tl.sum(_loaded(row, columns, padded, 0.0, WHOLE), 0) / BLOCK
        sums = tl.zeros((BLOCK,), tl.float32)
        squares = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, padded, BLOCK):
            place = start + columns
            x = _loaded(row, place, padded, 0.0, WHOLE) - centre
            if not WHOLE:
                x = tl.where(place < padded, x, 0.0)
            sums += x
            squares += x * x
        padding = padded - num_words
        offset = (tl.sum(sums, 0) + padding * centre) / num_words
        variance = (tl.sum(squares, 0) - padding * centre * centre) / num_words
        mean = centre + offset
        scale = tl.rsqrt(variance - offset * offset + eps)

        top = float("-inf")
        totals = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, padded, BLOCK):
            place = start + columns
            z = _normalized(row, weight, bias, place, padded, mean, scale, WHOLE)
            higher = tl.maximum(top, tl.max(z, 0))
            totals = totals * tl.exp(top - higher) + tl.exp(z - higher)
            top = higher
        share = 1.0 / tl.sum(totals, 0)
        if scales is not None:
            # The largest probability, of exp(0), becomes the type's largest number.
            tl.store(scales + token, share / 448.0)
            share = 448.0
        target = output + token.to(tl.int64) * row_stride  # type: ignore[attr-defined]

        for start in range(0, padded, BLOCK):
            place = start + columns
            z = _normalized(row, weight, bias, place, padded, mean, scale, WHOLE)
            y = (tl.exp(z - top) * share).to(output.dtype.element_ty)
            if WHOLE:
                tl.store(target + place, y)
            else:
                tl.store(target + place, y, mask=place < padded)


@triton.jit
def _normalized(row, weight, bias, place, width, mean, scale, WHOLE: tl.constexpr):
    x = _loaded(row, place, width, 0.0, WHOLE)
    gain = _loaded(weight, place, width, 0.0, WHOLE)
    shift = _loaded(bias, place, width, float("-inf"), WHOLE)
    z = (x - mean) * scale * gain + shift
    return z.to(row.dtype.element_ty).to(tl.float32)


@triton.jit
def _loaded(row, place, width, other, WHOLE: tl.constexpr):
    if WHOLE:
        value = tl.load(row + place)
    else:
        value = tl.load(row + place, mask=place < width, other=other)
    return value.to(tl.float32)


def takes_fp8(layer: torch.nn.Module) -> bool:
    """Whether a linear layer takes rows that come quantized, each with its scale.

    Not in the engine's batch-invariant mode, where such a layer multiplies otherwise.
    """
    return (
        get_input_quant_key(layer) == kFp8DynamicTokenSym
        and HAS_TRITON
        and current_platform.is_cuda()
        and not envs.VLLM_BATCH_INVARIANT
    )


def quantized_for(
    layer: torch.nn.Module, x: torch.Tensor
) -> torch.Tensor | QuantizedActivation:
    """Quantize rows, [rows, width] and contiguous, for a layer that takes them so."""
    if not takes_fp8(layer):
        return x
    output = _empty_fp8(x, x.shape[1])
    block = triton.next_power_of_2(x.shape[1])
    _quantize_rows_kernel[(x.shape[0],)](
        x,
        output.data,
        output.scale,
        x.shape[1],
        BLOCK=block,
        num_warps=4 if block <= 4096 else 16,
    )
    return output


def _empty_fp8(x: torch.Tensor, width: int) -> QuantizedActivation:
    shape = torch.Size((x.shape[0], width))
    return QuantizedActivation(
        data=x.new_empty(shape, dtype=current_platform.fp8_dtype()),
        scale=x.new_empty(x.shape[0], 1, dtype=torch.float32),
        orig_dtype=x.dtype,
        orig_shape=shape,
        quant_key=kFp8DynamicTokenSym,
    )


@triton.jit
def _store_fp8(x, output, scales, row, place, exists):
    # The engine's rule for dynamic scales of rows: the largest magnitude becomes the
    # largest number of the type, and a scale is at least 1 / (448 * 512).
    scale = tl.maximum(tl.max(tl.abs(x), 0) / 448.0, 1.0 / (448.0 * 512.0))
    tl.store(scales + row, scale)
    x = (x * (1.0 / scale)).to(output.dtype.element_ty)
    tl.store(output + place, x, mask=exists)


@triton.jit
def _quantize_rows_kernel(x, output, scales, width, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    exists = columns < width
    row = tl.program_id(0).to(tl.int64)
    place = row * width + columns
    value = tl.load(x + place, mask=exists, other=0.0).to(tl.float32)
    _store_fp8(value, output, scales, row, place, exists)


def rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    consumer: torch.nn.Module | None,
) -> torch.Tensor | QuantizedActivation:
    """Normalise rows, or their sum with a residual; Triton only.

    The sum is rounded to the tensors' type before it is normalised, and the normalised
    value before it is weighted, as the authors' separate steps do.

    Args:
        x: [tokens, width], contiguous; overwritten if there is a residual.
        residual: The same shape; becomes the sum.
        weight: [width], RMSNorm's weight.
        eps: RMSNorm's epsilon.
        consumer: Linear layer that gets the result, quantized where it takes it so.

    Returns:
        The normalised rows.

    """
    tokens, width = x.shape
    quantizes = consumer is not None and takes_fp8(consumer)
    quantized = _empty_fp8(x, width) if quantizes else None
    output = x
    if residual is None and quantized is None:
        output = torch.empty_like(x)
    _rms_norm_kernel[(tokens,)](
        x,
        residual,
        weight,
        output if quantized is None else quantized.data,
        None if quantized is None else quantized.scale,
        width,
        eps,
        BLOCK=triton.next_power_of_2(width),
        num_warps=4,
    )
    return output if quantized is None else quantized


@triton.jit
def _rms_norm_kernel(
    x, residual, weight, output, scales, width, eps, BLOCK: tl.constexpr
):
    columns = tl.arange(0, BLOCK)
    exists = columns < width
    row = tl.program_id(0).to(tl.int64)
    place = row * width + columns
    dtype = x.dtype.element_ty
    value = tl.load(x + place, mask=exists, other=0.0).to(tl.float32)
    if residual is not None:
        value += tl.load(residual + place, mask=exists, other=0.0).to(tl.float32)
        total = value.to(dtype)
        tl.store(residual + place, total, mask=exists)
        value = total.to(tl.float32)
    value = value * tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    gain = tl.load(weight + columns, mask=exists, other=0.0).to(tl.float32)
    normed = (value.to(dtype).to(tl.float32) * gain).to(dtype)
    if scales is None:
        tl.store(output + place, normed, mask=exists)
    else:
        _store_fp8(normed.to(tl.float32), output, scales, row, place, exists)


def silu_and_mul(
    x: torch.Tensor, consumer: torch.nn.Module
) -> torch.Tensor | QuantizedActivation:
    """silu(gate) * up; Triton only.

    Args:
        x: [tokens, 2 * width], contiguous: gate, then up.
        consumer: Linear layer that gets the result, quantized where it takes it so.

    Returns:
        [tokens, width]. silu is rounded to the tensor's type before the product, as
        the authors' separate steps do.

    """
    tokens, width = x.shape[0], x.shape[1] // 2
    quantized = _empty_fp8(x, width) if takes_fp8(consumer) else None
    output = x.new_empty(tokens, width) if quantized is None else quantized.data
    _silu_and_mul_kernel[(tokens,)](
        x,
        output,
        None if quantized is None else quantized.scale,
        width,
        BLOCK=triton.next_power_of_2(width),
        num_warps=8,
    )
    return output if quantized is None else quantized


@triton.jit
def _silu_and_mul_kernel(x, output, scales, width, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    exists = columns < width
    row = tl.program_id(0).to(tl.int64)
    source = x + row * 2 * width + columns
    place = row * width + columns
    dtype = x.dtype.element_ty
    gate = tl.load(source, mask=exists, other=0.0).to(tl.float32)
    up = tl.load(source + width, mask=exists, other=0.0).to(tl.float32)
    gate = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)
    product = (gate * up).to(dtype)
    if scales is None:
        tl.store(output + place, product, mask=exists)
    else:
        _store_fp8(product.to(tl.float32), output, scales, row, place, exists)
