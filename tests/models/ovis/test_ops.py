# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Kernels against the plain formula, on whatever device there is."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from vllm import _custom_ops as ops
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8DynamicTokenSym,
)
from vllm.models.ovis.images import normalization_table, normalize
from vllm.models.ovis.ops import (
    normalized_patches,
    padded_patch_width,
    quantized_for,
    rms_norm,
    silu_and_mul,
    word_probabilities,
)
from vllm.platforms import current_platform

# Rounding a normalised logit of about 8 moves its probability by 8 times the type's
# relative step.
TOLERANCE = {torch.float32: 5e-5, torch.bfloat16: 0.06, torch.float16: 0.008}
DEVICE = "cuda" if current_platform.is_cuda_alike() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "words, padded", [(507, 512), (64, 64), (9000, 9024), (65531, 65536)]
)
def test_word_probabilities(dtype: torch.dtype, words: int, padded: int) -> None:
    torch.manual_seed(words)
    # On a GPU more rows than are at work at once.
    rows = 9 if DEVICE == "cpu" else 600
    logits = torch.randn(rows, padded, device=DEVICE).mul(3).add(4).to(dtype)
    padded_weight = torch.randn(padded, device=DEVICE).mul(2).to(dtype)
    padded_bias = torch.randn(padded, device=DEVICE).to(dtype)
    logits[:, words:] = 0
    padded_weight[words:] = 0
    padded_bias[words:] = float("-inf")
    weight, bias = padded_weight[:words], padded_bias[:words]

    normed = F.layer_norm(
        logits[:, :words].double(), (words,), weight.double(), bias.double(), 1e-5
    )
    expected = normed.to(dtype).double().softmax(-1)
    actual: Any = word_probabilities(
        logits, words, padded_weight, padded_bias, 1e-5, torch.nn.Identity()
    )

    assert actual.data_ptr() == logits.data_ptr()
    assert not actual[:, words:].any()
    error = (actual[:, :words].double() - expected).norm() / expected.norm()
    assert error < TOLERANCE[dtype]


@pytest.mark.skipif(not current_platform.is_cuda(), reason="the kernels need a GPU")
@pytest.mark.parametrize("words, padded", [(507, 512), (65531, 65536)])
def test_word_probabilities_come_quantized(words: int, padded: int) -> None:
    torch.manual_seed(words)
    logits = torch.randn(300, padded, device=DEVICE).mul(3).bfloat16()
    weight, bias = torch.ones(2, padded, device=DEVICE).bfloat16()
    logits[:, words:], weight[words:], bias[words:] = 0, 0, float("-inf")
    layer: Any = torch.nn.Identity()
    layer._input_quant_key = kFp8DynamicTokenSym

    quantized: Any = word_probabilities(logits, words, weight, bias, 1e-5, layer)
    values = quantized.data.float() * quantized.scale
    expected: Any = word_probabilities(
        logits, words, weight, bias, 1e-5, torch.nn.Identity()
    )
    assert quantized.orig_shape == logits.shape
    # Three bits behind the leading one; the largest of a row is exact.
    close = {"rtol": 2**-4 + 2**-8, "atol": float(quantized.scale.max()) * 2**-10}
    torch.testing.assert_close(values, expected.float(), **close)
    assert (quantized.data.float().amax(-1) == 448).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("patch, grid", [(14, 32), (14, 3), (16, 2)])
def test_patches_are_bit_equal(dtype: torch.dtype, patch: int, grid: int) -> None:
    torch.manual_seed(grid)
    # Rows and columns beyond the last whole patch are left out.
    side = patch * grid + 5
    pixels = torch.randint(0, 256, (4, side, side, 3), dtype=torch.uint8)
    rectangles = torch.tensor(
        [[0, 0, side, side], [7, 0, side - 12, side], [0, 9, side, 3], [0, 0, 0, 0]],
        dtype=torch.int32,
    )
    table = normalization_table((0.48, 0.46, 0.41), (0.27, 0.26, 0.28))
    tiles = torch.from_numpy(normalize(pixels.numpy(), rectangles.numpy(), table))
    used = tiles[:, :, : patch * grid, : patch * grid]
    expected = F.unfold(used, patch, stride=patch).transpose(1, 2).to(dtype)

    actual = normalized_patches(
        pixels.to(DEVICE),
        rectangles.to(DEVICE),
        torch.from_numpy(table).to(DEVICE),
        grid,
        patch,
        dtype,
    ).cpu()
    assert actual.shape[-1] == padded_patch_width(patch)
    assert torch.equal(actual[..., : 3 * patch**2], expected)
    assert not actual[..., 3 * patch**2 :].any()


@pytest.mark.skipif(DEVICE == "cpu", reason="the kernel needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1024, 1536, 72])
@pytest.mark.parametrize("adds", [True, False])
def test_rms_norm(dtype: torch.dtype, width: int, adds: bool) -> None:
    torch.manual_seed(width)
    x, residual = torch.randn(2, 33, width, device=DEVICE).to(dtype)
    weight = torch.rand(width, device=DEVICE).to(dtype)
    total = x + residual if adds else x.clone()
    normed = F.rms_norm(total.double(), (width,), eps=1e-5).to(dtype)
    expected = normed.double() * weight.double()

    actual: Any = rms_norm(x, residual if adds else None, weight, 1e-5, None)
    if adds:
        assert torch.equal(residual, total)
    assert (actual.data_ptr() == x.data_ptr()) == adds
    error = (actual.double() - expected).norm() / expected.norm()
    assert error < torch.finfo(dtype).eps


@pytest.mark.skipif(DEVICE == "cpu", reason="the kernel needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [2816, 4096, 40])
def test_silu_and_mul(dtype: torch.dtype, width: int) -> None:
    torch.manual_seed(width)
    x = torch.randn(33, 2 * width, device=DEVICE).mul(3).to(dtype)
    gate, up = x.chunk(2, dim=-1)
    expected = F.silu(gate.double()).to(dtype).double() * up.double()
    actual: Any = silu_and_mul(x, torch.nn.Identity())
    error = (actual.double() - expected).norm() / expected.norm()
    assert error < torch.finfo(dtype).eps


@pytest.mark.skipif(not current_platform.is_cuda(), reason="the kernels need a GPU")
@pytest.mark.parametrize("width", [1024, 2816, 40])
def test_rows_come_quantized_for_a_layer_that_takes_them(width: int) -> None:
    """The engine's own quantization of what the kernel gives without."""
    torch.manual_seed(width)
    layer: Any = torch.nn.Identity()
    layer._input_quant_key = kFp8DynamicTokenSym
    plain = torch.nn.Identity()
    x = torch.randn(33, 2 * width, device=DEVICE).bfloat16()
    rows = x[:, :width].contiguous()
    residual = torch.randn_like(rows)
    weight = torch.rand(width, device=DEVICE).bfloat16()
    pairs: list[Any] = [
        (rows, quantized_for(layer, rows)),
        (silu_and_mul(x, plain), silu_and_mul(x, layer)),
        (
            rms_norm(rows.clone(), residual.clone(), weight, 1e-5, plain),
            rms_norm(rows.clone(), residual.clone(), weight, 1e-5, layer),
        ),
    ]
    for values, quantized in pairs:
        data, scale = ops.scaled_fp8_quant(values, use_per_token_if_dynamic=True)
        assert quantized.orig_shape == values.shape
        torch.testing.assert_close(quantized.scale, scale)
        # A value between two of the type may go to either.
        difference = quantized.data.float() - data.float()
        assert (difference.abs() <= data.float().abs() / 8).all()
        assert (difference != 0).float().mean() < 0.01
