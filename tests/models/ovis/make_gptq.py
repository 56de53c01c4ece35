# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Quantize the text model of an Ovis checkpoint to the GPTQ file format.

python -m tests.models.ovis.make_gptq SOURCE TARGET [--bits 4|8] [--group-size N]
                                      [--list-modules] [--twin FOLDER]

Weights are rounded to nearest, symmetric, a scale for each group of input channels; the
error compensation that gives the format its name is left out, as a test of loading and
of kernels needs no calibration data. As in the published checkpoints only the linear
layers of the text model are quantized. `--twin` also writes what the quantized weights
stand for, in float: both must answer alike.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

BLOCKS = (
    ("self_attn.k_proj", "self_attn.v_proj", "self_attn.q_proj"),
    ("self_attn.o_proj",),
    ("mlp.up_proj", "mlp.gate_proj"),
    ("mlp.down_proj",),
)
"""Linear layers of a text model's block, in the order GPTQ quantizes them."""


def quantize(weight: Tensor, bits: int, group_size: int) -> tuple[Tensor, Tensor]:
    """Round a weight to integers with a scale for each group.

    Args:
        weight: [outputs, inputs], a float type.
        bits: 4 or 8.
        group_size: Inputs that share a scale.

    Returns:
        Integers [inputs, outputs] from 0 to 2**bits - 1, 2**(bits - 1) standing for
        zero; and float16 scales [inputs / group_size, outputs], rounded to bfloat16, so
        that neither type of model changes them.

    Raises:
        ValueError: The group does not divide the inputs.

    """
    outputs, inputs = weight.shape
    if inputs % group_size:
        raise ValueError(f"group size {group_size} does not divide {inputs} inputs")
    zero = 2 ** (bits - 1)
    groups = weight.float().t().reshape(inputs // group_size, group_size, outputs)
    scales = groups.abs().amax(1) / (zero - 1)
    scales = scales.clamp(min=1e-4).bfloat16().float()
    levels = (groups / scales[:, None]).round().clamp(-zero, zero - 1) + zero
    return levels.reshape(inputs, outputs).int(), scales.half()


def dequantize(levels: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Undo `quantize`: float32 [outputs, inputs]."""
    group_size = levels.shape[0] // scales.shape[0]
    wide = scales.float().repeat_interleave(group_size, 0)
    return ((levels - 2 ** (bits - 1)) * wide).t().contiguous()


def pack(levels: Tensor, bits: int) -> Tensor:
    """Pack integers of the first axis into int32, the first in the lowest bits.

    Args:
        levels: [n, m], values below 2**bits; n is a multiple of 32 / bits.
        bits: 4 or 8.

    Returns:
        int32 [n * bits / 32, m].

    """
    parts = levels.long().unflatten(0, (-1, 32 // bits))
    shifts = (torch.arange(32 // bits) * bits)[None, :, None]
    packed = (parts << shifts).sum(1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()


def packed_tensors(
    levels: Tensor, scales: Tensor, bits: int, name: str
) -> dict[str, Tensor]:
    """The four tensors that stand for the weight of layer `name` in a file."""
    groups, outputs = scales.shape
    inputs = levels.shape[0]
    # The format stores a zero point one too low.
    zeros = torch.full((outputs, groups), 2 ** (bits - 1) - 1)
    return {
        f"{name}.qweight": pack(levels, bits),
        f"{name}.qzeros": pack(zeros, bits).t().contiguous(),
        f"{name}.scales": scales,
        f"{name}.g_idx": (torch.arange(inputs) // (inputs // groups)).int(),
    }


def is_quantized(name: str) -> bool:
    """Whether a tensor is the weight of one of the text model's linear layers."""
    modules = [module for block in BLOCKS for module in block]
    return name.startswith("llm.model.layers.") and any(
        name.endswith(f".{module}.weight") for module in modules
    )


def make_gptq(
    source: Path,
    target: Path,
    bits: int = 4,
    group_size: int = 128,
    list_modules: bool = False,
    twin: Path | None = None,
) -> None:
    """Write the quantized checkpoint and, if asked for, its float twin.

    Args:
        source: Folder in the authors' layout with one model.safetensors.
        target: Folder to make.
        bits: 4 or 8.
        group_size: Inputs that share a scale.
        list_modules: Name the quantized modules in the config; most files do not.
        twin: Folder to make for the twin.

    Raises:
        ValueError: A folder exists, or the group does not divide a layer's inputs.

    """
    settings: dict[str, Any] = {
        "quant_method": "gptq",
        "checkpoint_format": "gptq",
        "bits": bits,
        "group_size": group_size,
        "desc_act": False,
        "sym": True,
        "true_sequential": True,
    }
    if list_modules:
        settings["modules_in_block_to_quantize"] = [list(block) for block in BLOCKS]

    def convert(layer: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        levels, scales = quantize(weight, bits, group_size)
        tensors = packed_tensors(levels, scales, bits, layer)
        return tensors, dequantize(levels, scales, bits)

    write_quantized(source, target, convert, settings, twin)


def write_quantized(
    source: Path,
    target: Path,
    convert: Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]],
    settings: Mapping[str, Any],
    twin: Path | None,
) -> None:
    """Write a checkpoint with other tensors for the text model's linear weights.

    Args:
        source: Folder in the authors' layout with one model.safetensors.
        target: Folder to make.
        convert: From a layer's name and weight to the tensors that stand for it in the
            file, and to what they stand for, float32 of the weight's shape.
        settings: The config's `quantization_config`.
        twin: Folder to make with the weights that the tensors stand for.

    Raises:
        ValueError: A folder exists.

    """
    made = [target] if twin is None else [target, twin]
    for folder in made:
        if folder.exists():
            raise ValueError(f"{folder} exists; name a folder that does not.")
    quantized: dict[str, Tensor] = {}
    restored: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if is_quantized(name):
            tensors, weight = convert(name.removesuffix(".weight"), tensor)
            quantized.update(tensors)
            restored[name] = weight.to(tensor.dtype)
        else:
            quantized[name] = restored[name] = tensor
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    for folder, tensors in zip(made, (quantized, restored), strict=False):
        shutil.copytree(source, folder, ignore=lambda *_: ["model.safetensors"])
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    written = {**config, "quantization_config": dict(settings)}
    (target / "config.json").write_text(json.dumps(written, indent=2) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; exit status 2 if an argument is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.models.ovis.make_gptq",
        description="Quantize an Ovis checkpoint's text model to the GPTQ format.",
    )
    parser.add_argument("source", type=Path, help="folder in the authors' layout")
    parser.add_argument("target", type=Path, help="folder to make")
    parser.add_argument("--bits", type=int, choices=(4, 8), default=4)
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--list-modules", action="store_true")
    parser.add_argument("--twin", type=Path, help="folder to make for the float twin")
    try:
        make_gptq(**vars(parser.parse_args(arguments)))
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
