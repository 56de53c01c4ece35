# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which quantization settings reach the tower and the visual vocabulary."""

from collections.abc import Iterable
from typing import Any

import torch

from vllm.model_executor.layers.quantization import QuantizationConfig
from vllm.model_executor.layers.quantization.utils.marlin_utils import (
    check_marlin_supported,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8StaticChannelSym,
)
from vllm.platforms import current_platform

VISUAL_PART = "visual_tokenizer"

_LISTS_WHAT_IT_SKIPS = frozenset(
    {
        "compressed-tensors",
        "fbgemm_fp8",
        "fp8",
        "modelopt",
        "modelopt_fp4",
        "modelopt_mxfp8",
        "modelopt_mixed",
        "quark",
    }
)
"""Formats whose checkpoints name every layer that stays in a float type."""


def visual_quant_config(
    quant_config: QuantizationConfig | None,
) -> QuantizationConfig | None:
    """Quantization settings for the tower, the head and the table.

    The published GPTQ checkpoints quantize the text model alone, and neither say so nor
    list its layers in names that a tower's could not match (SigLIP, too, has
    `self_attn.q_proj`). So the visual parts stay as they are stored unless

    - the format names the layers that it skips, or
    - the settings name the visual parts: a GPTQ checkpoint's list of modules, or the
      `targets` of quantization at load time.

    Returns:
        The settings themselves, or None where the visual parts are not quantized.

    """
    if quant_config is None:
        return None
    if quant_config.get_name() in _LISTS_WHAT_IT_SKIPS:
        return quant_config
    # A checkpoint's settings may carry others for what it left in a float type.
    at_load_time = quant_config.online_quantization_config
    if _names_visual_part(quant_config) or _names_visual_part(at_load_time):
        return quant_config
    return None


def at_load_time(
    quant_config: QuantizationConfig | None,
) -> QuantizationConfig | None:
    """Settings for a layer that no checkpoint has quantized: those of the start.

    The table is an embedding in every checkpoint, which quantizers leave alone without
    naming it.
    """
    if quant_config is not None and quant_config.get_name() == "online":
        return quant_config
    return None


def check_kernels(quant_config: QuantizationConfig | None) -> None:
    """Refuse quantization that this machine has no kernel for.

    The engine would stop as well, but where a kernel is missing, without a word about
    what does serve.

    Raises:
        ValueError: With what the settings need, and what serves them.

    """
    name = None if quant_config is None else quant_config.get_name()
    if name == "auto_gptq":
        _check_gptq(quant_config)
    elif name == "auto_awq" and current_platform.is_cpu() and not has_cpu_kernel():
        raise ValueError(
            "vLLM's library for this CPU has no kernel for AWQ checkpoints. CPUs with "
            "AVX-512 and CUDA GPUs serve them."
        )
    elif name == "online" and current_platform.is_cpu():
        _check_online_on_cpu(quant_config)


def _check_gptq(settings: Any) -> None:
    # The engine's CPU library for AVX2 has no such kernel.
    has_kernels = not current_platform.is_cpu() or has_cpu_kernel()
    if has_kernels and check_marlin_supported(settings.quant_type, settings.group_size):
        return
    raise ValueError(
        f"This GPTQ checkpoint has {settings.weight_bits} bits in groups of "
        f"{settings.group_size}; vLLM has no kernel for that on "
        f"{current_platform.device_type!r}. CUDA GPUs of compute capability 7.5 and "
        "above serve 4 and 8 bits in groups of 32, 64, 128 or whole columns, CPUs with "
        "AVX-512 serve 4 bits in such groups."
    )


def _check_online_on_cpu(settings: Any) -> None:
    linear, targets = settings.args.linear, settings.args.targets or {}
    refused = {name for name in targets.values() if name != "fp8_per_channel"}
    if linear is not None and linear.weight != kFp8StaticChannelSym:
        refused.add(str(linear.weight))
    if refused:
        raise ValueError(
            f"vLLM cannot quantize to {', '.join(sorted(refused))} while it loads on a "
            "CPU; use --quantization fp8_per_channel there, or a checkpoint that is "
            "quantized already (compressed-tensors FP8 or INT8, AWQ, GPTQ)."
        )


def has_cpu_kernel() -> bool:
    """Whether the engine's CPU library multiplies with 4-bit weights."""
    return hasattr(torch.ops._C, "cpu_gemm_wna16")


def _names_visual_part(quant_config: Any) -> bool:
    modules = getattr(quant_config, "modules_in_block_to_quantize", None) or []
    args = getattr(quant_config, "args", None)
    targets = getattr(args, "targets", None) or {}
    return any(VISUAL_PART in name for name in (*_flat(modules), *targets))


def _flat(names: Iterable[Any]) -> Iterable[str]:
    for name in names:
        if isinstance(name, str):
            yield name
        else:
            yield from _flat(name)
