# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which quantization settings reach the visual parts."""

from typing import Any

import pytest

from vllm.config.quantization import QuantizationConfigArgs
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.layers.quantization.online.base import (
    OnlineQuantizationConfig,
)
from vllm.models.ovis.quantization import visual_quant_config

GPTQ = {"bits": 4, "group_size": 128, "desc_act": False, "sym": True}
SELF_ATTENTION = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
AWQ = {"w_bit": 4, "q_group_size": 128, "zero_point": True, "version": "gemm"}


def gptq(**extra: Any) -> Any:
    config = {"quant_method": "gptq", **GPTQ, **extra}
    return get_quantization_config("gptq").from_config(config)


def online(**settings: Any) -> OnlineQuantizationConfig:
    return OnlineQuantizationConfig(QuantizationConfigArgs(**settings))


def compressed_tensors() -> Any:
    config = {"config_groups": {}, "ignore": ["re:visual_tokenizer.*"]}
    return get_quantization_config("compressed-tensors").from_config(
        {"quant_method": "compressed-tensors", "format": "pack-quantized", **config}
    )


def test_nothing_to_decide_without_quantization() -> None:
    assert visual_quant_config(None) is None


@pytest.mark.parametrize(
    "quant_config",
    [
        gptq(),
        gptq(modules_in_block_to_quantize=SELF_ATTENTION),
        gptq(modules_in_block_to_quantize=[SELF_ATTENTION, ["mlp.down_proj"]]),
        get_quantization_config("awq").from_config(AWQ),
        online(linear="fp8_per_tensor"),
        online(targets={"*llm*": "fp8_per_tensor"}),
    ],
    ids=[
        "gptq",
        "gptq with modules",
        "gptq with blocks",
        "awq",
        "fp8 at load time",
        "fp8 for the text model",
    ],
)
def test_visual_parts_stay_in_their_float_type(quant_config: Any) -> None:
    assert visual_quant_config(quant_config) is None


@pytest.mark.parametrize(
    "quant_config",
    [
        gptq(modules_in_block_to_quantize=["visual_tokenizer.backbone.trunk"]),
        gptq(modules_in_block_to_quantize=[SELF_ATTENTION, ["visual_tokenizer.head"]]),
        online(targets={"*visual_tokenizer*": "fp8_per_tensor"}),
        Fp8Config(is_checkpoint_fp8_serialized=True),
        compressed_tensors(),
    ],
    ids=["gptq list", "gptq blocks", "fp8 target", "fp8 file", "compressed tensors"],
)
def test_settings_that_name_layers_are_followed(quant_config: Any) -> None:
    assert visual_quant_config(quant_config) is quant_config
