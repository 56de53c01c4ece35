# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Quantize the text model of an Ovis checkpoint to AWQ, FP8 or INT8 files.

Rounded to nearest, without calibration, as `make_gptq` does; the linear layers of the
text model only.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from tests.models.ovis.make_gptq import dequantize, pack, quantize, write_quantized

GROUP_SIZE = 128
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Column, of eight, in each four bits of a word of an AWQ file, from the lowest."""


def awq(layer: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """4 bits in groups of inputs, eight outputs to a word, zero points as they are."""
    levels, scales = quantize(weight, 4, GROUP_SIZE)
    tensors = {
        f"{layer}.qweight": pack_outputs(levels),
        f"{layer}.qzeros": pack_outputs(torch.full(scales.shape, 8)),
        f"{layer}.scales": scales,
    }
    return tensors, dequantize(levels, scales, 4)


def pack_outputs(values: Tensor) -> Tensor:
    """Pack values below 16, [n, m], to int32 [n, m / 8] in AWQ's order."""
    ordered = values.unflatten(1, (-1, 8))[..., list(AWQ_ORDER)].flatten(1)
    return pack(ordered.t(), 4).t().contiguous()


def fp8(layer: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """8-bit floats with a scale for each output channel."""
    top = torch.finfo(torch.float8_e4m3fn).max
    scale = weight.float().abs().amax(1, keepdim=True) / top
    levels = (weight.float() / scale).to(torch.float8_e4m3fn)
    tensors = {f"{layer}.weight": levels, f"{layer}.weight_scale": scale}
    return tensors, levels.float() * scale


def int8(layer: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """8-bit integers with a scale for each output channel."""
    scale = weight.float().abs().amax(1, keepdim=True) / 127
    levels = (weight.float() / scale).round().to(torch.int8)
    tensors = {f"{layer}.weight": levels, f"{layer}.weight_scale": scale}
    return tensors, levels.float() * scale


def compressed(kind: str, layout: str) -> dict[str, Any]:
    """Settings of a compressed-tensors file with 8-bit weights and activations."""
    number = {"num_bits": 8, "type": kind, "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**number, "strategy": "channel", "dynamic": False},
                "input_activations": {**number, "strategy": "token", "dynamic": True},
            }
        },
    }


Convert = Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]]

FORMATS: dict[str, tuple[Convert, dict[str, Any]]] = {
    "awq": (
        awq,
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": GROUP_SIZE,
            "zero_point": True,
            "version": "gemm",
        },
    ),
    "fp8": (fp8, compressed("float", "float-quantized")),
    "int8": (int8, compressed("int", "int-quantized")),
}


def make_quantized(source: Path, target: Path, twin: Path, form: str) -> None:
    """Write the quantized checkpoint and its float twin.

    Args:
        source: Folder in the authors' layout with one model.safetensors.
        target: Folder to make.
        twin: Folder to make with the weights that the quantized ones stand for.
        form: One of FORMATS.

    Raises:
        ValueError: A folder exists, or the group does not divide a layer's inputs.

    """
    convert, settings = FORMATS[form]
    if settings["quant_method"] == "compressed-tensors":
        settings = {**settings, "ignore": float_layers(source)}
    write_quantized(source, target, convert, settings, twin)


def float_layers(source: Path) -> list[str]:
    """Layers that stay in a float type, name by name, as quantizers list them."""
    with safe_open(source / "model.safetensors", "pt") as stored:
        return ["llm.lm_head"] + [
            name.removesuffix(".weight")
            for name in stored.keys()  # noqa: SIM118
            if name.startswith("visual_tokenizer.")
            and name.endswith(".weight")
            and len(stored.get_slice(name).get_shape()) == 2
        ]
