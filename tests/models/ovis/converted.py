# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Writes an Ovis2 checkpoint in the layout of transformers' own port."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, Ovis2Config

ADDED_TOKENS = (
    "<IMG_ATOM>",
    "<IMG_START>",
    "<IMG_GRID>",
    "<IMG_COL>",
    "<IMG_ROW>",
    "<IMG_END>",
)

_RENAMED = (
    ("vte.", "model.visual_embeddings_table."),
    ("llm.lm_head.", "lm_head."),
    ("llm.model.", "model.language_model."),
    ("visual_tokenizer.head.0.", "model.vision_tower.head_linear."),
    ("visual_tokenizer.head.1.", "model.vision_tower.head_norm."),
    (
        "visual_tokenizer.backbone.preprocessor.patchifier.proj.",
        "model.vision_tower.transformer.embeddings.patch_embedding.",
    ),
    (
        "visual_tokenizer.backbone.preprocessor.patchifier.norm.",
        "model.vision_tower.transformer.embeddings.rms_norm.",
    ),
    (
        "visual_tokenizer.backbone.preprocessor.pos_embed",
        "model.vision_tower.transformer.embeddings.position_embedding.weight",
    ),
    (
        "visual_tokenizer.backbone.trunk.post_trunk_norm.",
        "model.vision_tower.transformer.rms_norm.",
    ),
    (
        "visual_tokenizer.backbone.trunk.blocks.",
        "model.vision_tower.transformer.encoder.layers.",
    ),
    (".attn.proj.", ".attention.out_proj."),
    (".attn.qkv.", ".attention.qkv."),
    (".mlp.fc1.", ".ffn.gate_proj."),
    (".mlp.fc2.", ".ffn.down_proj."),
    (".mlp.fc3.", ".ffn.up_proj."),
    (".norm_1.", ".rms_norm1."),
    (".norm_2.", ".rms_norm2."),
)


def converted_tensors(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same numbers under the port's names."""
    converted = {}
    for name, tensor in weights.items():
        for old, new in _RENAMED:
            name = name.replace(old, new)
        if name.endswith("position_embedding.weight"):
            tensor = tensor.squeeze(0)
        if ".attention.qkv." in name:
            for part, rows in zip("qkv", tensor.chunk(3), strict=True):
                converted[name.replace(".qkv.", f".{part}_proj.")] = rows.contiguous()
        else:
            converted[name] = tensor
    return converted


def converted_config(config: dict[str, Any], image_token_id: int) -> dict[str, Any]:
    """The port's config.json, from the authors'."""
    visual = config["visual_tokenizer_config"]
    tower = dict(visual["backbone_config"])
    for key in ("model_type", "architectures", "torch_dtype", "projection_dropout"):
        tower.pop(key, None)
    tower["mlp_bias"] = tower.pop("use_bias", False)
    text = {k: v for k, v in config["llm_config"].items() if k != "architectures"}
    written = Ovis2Config(
        vision_config={
            **tower,
            "vocab_size": visual["vocab_size"],
            "hidden_stride": visual["hidden_stride"],
            "tokenize_function": visual["tokenize_function"],
        },
        text_config=text,
        image_token_id=image_token_id,
        visual_indicator_token_ids=[image_token_id + 1 + k for k in range(5)],
        vocab_size=text["vocab_size"],
        hidden_size=config["hidden_size"],
        tie_word_embeddings=text["tie_word_embeddings"],
        architectures=["Ovis2ForConditionalGeneration"],
        dtype="float32",
    )
    return json.loads(written.to_json_string(use_diff=True))


def write_converted(source: str, target: Path) -> None:
    """Convert a checkpoint folder; the tokenizer gets the port's added tokens."""
    target.mkdir()
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.add_tokens(list(ADDED_TOKENS), special_tokens=True)
    tokenizer.save_pretrained(target)
    atom = tokenizer.convert_tokens_to_ids(ADDED_TOKENS[0])
    config = json.loads(Path(source, "config.json").read_text())
    (target / "config.json").write_text(json.dumps(converted_config(config, atom)))
    images = json.loads(Path(source, "preprocessor_config.json").read_text())
    side = images["crop_size"]
    processor = {
        "processor_class": "Ovis2Processor",
        "image_token": ADDED_TOKENS[0],
        "image_processor": {
            "image_processor_type": "Ovis2ImageProcessor",
            "size": side,
            **{
                key: images[key]
                for key in images
                if key not in ("size", "crop_size", "image_processor_type")
            },
        },
    }
    (target / "processor_config.json").write_text(json.dumps(processor))
    weights = load_file(Path(source, "model.safetensors"))
    save_file(
        converted_tensors(weights),
        target / "model.safetensors",
        metadata={"format": "pt"},
    )
