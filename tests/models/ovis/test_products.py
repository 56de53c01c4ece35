# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Fused products against the plain formula."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import (
    cleanup_dist_env_and_memory,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8DynamicTokenSym,
)
from vllm.models.ovis.ops import quantized_for
from vllm.models.ovis.products import (
    FEW_ROWS,
    add_linear,
    fuses_gate,
    gated_linear,
    is_plain,
)
from vllm.models.ovis.towers.common import planned_attention
from vllm.platforms import current_platform

DEVICE = "cuda" if current_platform.is_cuda() else "cpu"
HOPPER = current_platform.is_cuda() and current_platform.is_device_capability(90)


def gated(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    gate, up = F.linear(x.double(), weight.double()).to(dtype).chunk(2, dim=-1)
    return F.silu(gate.double()).to(dtype).double() * up.double()


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


@pytest.mark.skipif(not HOPPER, reason="the kernel needs a Hopper GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width, inputs", [(2816, 1024), (352, 72), (8, 8)])
@pytest.mark.parametrize("rows", [1, 300, FEW_ROWS, FEW_ROWS + 1])
def test_gated_linear(dtype: torch.dtype, width: int, inputs: int, rows: int) -> None:
    torch.manual_seed(rows)
    x = torch.randn(rows, inputs, device="cuda").to(dtype)
    weight = torch.randn(2 * width, inputs, device="cuda").mul(inputs**-0.5).to(dtype)
    layer: Any = SimpleNamespace(weight=weight)
    actual = gated_linear(layer, x)
    assert actual.shape == (rows, width)
    expected = gated(x, weight, dtype)
    assert relative_error(actual, expected) < 2 * torch.finfo(dtype).eps


@pytest.mark.skipif(not HOPPER, reason="the kernel needs a Hopper GPU")
@pytest.mark.parametrize("width, inputs", [(2816, 1024), (360, 80)])
@pytest.mark.parametrize("rows", [300, FEW_ROWS + 1])
def test_gated_linear_of_quantized_rows(width: int, inputs: int, rows: int) -> None:
    torch.manual_seed(rows)
    consumer: Any = SimpleNamespace(_input_quant_key=kFp8DynamicTokenSym)
    x: Any = quantized_for(
        consumer, torch.randn(rows, inputs, device="cuda").bfloat16()
    )
    weight = torch.randn(2 * width, inputs, device="cuda")
    scale = weight.abs().amax(-1, keepdim=True) / 448 / inputs**0.5
    weight = (weight / scale / inputs**0.5).to(x.data.dtype)
    layer: Any = SimpleNamespace(weight=weight.t(), weight_scale=scale)
    actual = gated_linear(layer, x)
    assert actual.dtype == torch.bfloat16
    expected = gated(x.data.double() * x.scale, weight.double() * scale, torch.bfloat16)
    # The products are summed in fewer bits than float32 has.
    assert relative_error(actual, expected) < 0.01


@pytest.mark.skipif(not HOPPER, reason="the kernel needs a Hopper GPU")
def test_rows_do_not_depend_on_each_other() -> None:
    x = torch.randn(FEW_ROWS + 128, 1024, device="cuda").bfloat16()
    layer: Any = SimpleNamespace(
        weight=torch.randn(5632, 1024, device="cuda").bfloat16()
    )
    once = gated_linear(layer, x)
    assert torch.equal(gated_linear(layer, torch.cat([x, x])), torch.cat([once, once]))


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(DEVICE))):
        init_distributed_environment(
            1, 0, f"file://{tmp_path}/rendezvous", 0, backend="gloo"
        )
        initialize_model_parallel(1, 1)
        yield
    cleanup_dist_env_and_memory()


def wide(bias: bool = False) -> Any:
    return MergedColumnParallelLinear(8, [16, 16], bias=bias, return_bias=False)


def narrow(bias: bool = False) -> Any:
    layer = RowParallelLinear(16, 8, bias=bias, return_bias=False)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    layer.to(DEVICE)
    layer.quant_method.process_weights_after_loading(layer)
    return layer


@pytest.mark.usefixtures("one_rank")
def test_only_plain_layers_are_fused() -> None:
    quantized = narrow()
    quantized.quant_method = SimpleNamespace()
    assert is_plain(wide(), MergedColumnParallelLinear)
    assert is_plain(narrow(), RowParallelLinear)
    assert not is_plain(narrow(), MergedColumnParallelLinear)
    assert not is_plain(narrow(bias=True), RowParallelLinear)
    assert not is_plain(quantized, RowParallelLinear)
    # float32 has no such kernel on any GPU.
    assert not fuses_gate(wide())
    assert fuses_gate(wide().to(DEVICE, torch.bfloat16)) == HOPPER


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("bias", [False, True])
def test_product_on_top_of_a_residual(bias: bool) -> None:
    layer = narrow(bias)
    x, residual = torch.randn(3, 16).to(DEVICE), torch.randn(3, 8).to(DEVICE)
    expected = residual + layer(x)
    total, rest = add_linear(layer, x, residual)
    assert (rest is None) == (DEVICE == "cuda" and not bias)
    if rest is not None:
        assert rest is residual
        total = total + rest
    torch.testing.assert_close(total, expected)


@pytest.mark.skipif(not HOPPER, reason="planned for on Hopper GPUs alone")
def test_planned_attention() -> None:
    query, key, value = torch.randn(3, 2, 64, 256, device="cuda").bfloat16()
    heads = [x.unflatten(-1, (2, 128)).transpose(1, 2) for x in (query, key, value)]
    expected = F.scaled_dot_product_attention(*(x.double() for x in heads))
    actual = planned_attention(query, key, value, 128)
    assert actual.is_contiguous()
    error = relative_error(actual, expected.transpose(1, 2).flatten(2))
    assert error < 2 * torch.finfo(torch.bfloat16).eps
