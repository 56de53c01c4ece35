# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Adapters and checkpoints with known weights, written for the tests."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.models.ovis import golden
from tests.reference.model import Ovis

RANK = 4
ALPHA = 8

TEXT = [
    f"llm.model.layers.{layer}.{name}"
    for layer in range(3)
    for name in (
        *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        *("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    )
]
"""Linear layers of the text model of the golden checkpoint tiny-ovis2."""

TOWER = [
    f"visual_tokenizer.backbone.trunk.blocks.{block}.{name}"
    for block in range(2)
    for name in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2", "mlp.fc3")
]
"""Linear layers of its vision tower."""

HEAD = ["visual_tokenizer.head.0"]

SIGLIP = [
    f"visual_tokenizer.backbone.vision_model.encoder.layers.{layer}.{name}"
    for layer in range(2)
    for name in (
        *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        *("self_attn.out_proj", "mlp.fc1", "mlp.fc2"),
    )
]
"""Linear layers of the vision tower of tiny-ovis1.6-llama."""


def write_adapter(
    folder: Path, checkpoint: Path, modules: Sequence[str], seed: int
) -> Path:
    """Write an adapter in peft's files, its parts as large as the weights they change.

    Args:
        folder: Made anew.
        checkpoint: Its weights give the shapes and the size of the change.
        modules: Names as in the authors' model.
        seed: Of the random parts.

    """
    weights = load_file(checkpoint / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module in modules:
        weight = weights[f"{module}.weight"]
        rows, columns = weight.shape
        down = torch.randn(RANK, columns, generator=generator)
        up = torch.randn(rows, RANK, generator=generator)
        up *= 0.5 * weight.std() / (ALPHA / RANK) / RANK**0.5
        name = f"base_model.model.{module}"
        tensors[f"{name}.lora_A.weight"] = down
        tensors[f"{name}.lora_B.weight"] = up
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": sorted({module.rsplit(".", 1)[-1] for module in modules}),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def changed_weights(adapter: Path) -> dict[str, torch.Tensor]:
    """What an adapter adds to each weight."""
    tensors = load_file(adapter / "adapter_model.safetensors")
    changes = {}
    for name, down in tensors.items():
        if name.endswith(".lora_A.weight"):
            module = name.removesuffix(".lora_A.weight")
            up = tensors[f"{module}.lora_B.weight"]
            weight = module.removeprefix("base_model.model.") + ".weight"
            changes[weight] = ALPHA / RANK * up @ down
    return changes


def write_merged(
    folder: Path, checkpoint: Path, changes: Mapping[str, torch.Tensor]
) -> Path:
    """Write a checkpoint with the changes added to its weights."""
    shutil.copytree(checkpoint, folder)
    weights = load_file(checkpoint / "model.safetensors")
    for name, change in changes.items():
        weights[name] = weights[name] + change
    (folder / "model.safetensors").unlink()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_random(folder: Path) -> Path:
    """Write tiny-ovis2 with a wider MLP, which groups of 128 divide, and new weights.

    Args:
        folder: Made anew.

    """
    shutil.copytree(golden.checkpoint_path("tiny-ovis2"), folder)
    config = json.loads((folder / "config.json").read_text())
    config["llm_config"]["intermediate_size"] = 256
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    weights = Ovis(config).state_dict()
    del weights["llm.lm_head.weight"]  # Tied, and not stored.
    # A text model's initial weights are so small that its layers change nothing.
    scaled = {k: v * 5 if "_proj" in k else v for k, v in weights.items()}
    save_file(scaled, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_draft(folder: Path, checkpoint: Path, seed: int) -> Path:
    """Write a random EAGLE-3 drafter of one layer for the checkpoint's text model.

    It guesses badly, but what it guesses right or wrong never changes an answer.
    """
    target = json.loads((checkpoint / "config.json").read_text())["llm_config"]
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": target["vocab_size"],
        "rope_theta": target["rope_theta"],
        "torch_dtype": "float32",
        "tie_word_embeddings": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
    }
    for key in (
        *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads"),
        *("num_key_value_heads", "max_position_embeddings", "rms_norm_eps"),
        *("hidden_act", "bos_token_id", "eos_token_id"),
    ):
        config[key] = target[key]
    width, inner = target["hidden_size"], target["intermediate_size"]
    head = width // target["num_attention_heads"]
    kv = head * target["num_key_value_heads"]
    shapes = {
        "fc.weight": (width, 3 * width),
        "midlayer.self_attn.q_proj.weight": (width, 2 * width),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * width),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * width),
        "midlayer.self_attn.o_proj.weight": (width, width),
        "midlayer.mlp.gate_proj.weight": (inner, width),
        "midlayer.mlp.up_proj.weight": (inner, width),
        "midlayer.mlp.down_proj.weight": (width, inner),
        "lm_head.weight": (target["vocab_size"], width),
    }
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.randn(shape, generator=generator) * shape[1] ** -0.5
        for name, shape in shapes.items()
    }
    for norm in ("midlayer.input_layernorm", "midlayer.hidden_norm", "norm"):
        weights[f"{norm}.weight"] = torch.ones(width)
    weights["midlayer.post_attention_layernorm.weight"] = torch.ones(width)
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder
