# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A checkpoint folder with the sizes of Ovis2-2B, or small ones, and no weights.

For engines started with `load_format="dummy"`: config, preprocessor, tokenizer in the
authors' layout. The tokenizer is a small one whose special tokens were moved to the
released ids, because vLLM's own Ovis has those ids written into its code.

    python benchmarks/ovis/checkpoint.py TOKENIZER_FOLDER OUTPUT_FOLDER
"""

import copy
import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FIRST_SPECIAL_ID = 151643
"""Id of the first special token of the released Qwen2 vocabulary."""

CONFIG: dict[str, Any] = {
    "architectures": ["Ovis"],
    "model_type": "ovis",
    "conversation_formatter_class": "QwenConversationFormatter",
    "disable_tie_weight": False,
    "hidden_size": 1536,
    "multimodal_max_length": 32768,
    "torch_dtype": "bfloat16",
    "llm_config": {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "torch_dtype": "bfloat16",
    },
    "visual_tokenizer_config": {
        "model_type": "aimv2_visual_tokenizer",
        "vocab_size": 65536,
        "hidden_stride": 2,
        "tokenize_function": "softmax",
        "tau": 1.0,
        "drop_cls_token": False,
        "depths": None,
        "backbone_kwargs": {},
        "backbone_config": {
            "model_type": "aimv2",
            "image_size": 448,
            "patch_size": 14,
            "num_channels": 3,
            "hidden_size": 1024,
            "intermediate_size": 2816,
            "num_hidden_layers": 24,
            "num_attention_heads": 8,
            "rms_norm_eps": 1e-5,
            "qkv_bias": False,
            "use_bias": False,
            "attention_dropout": 0.0,
            "projection_dropout": 0.0,
        },
    },
}


def small_config() -> dict[str, Any]:
    """Tiles and tokens as in Ovis2-2B, so little arithmetic that a CPU serves it."""
    config = copy.deepcopy(CONFIG)
    config["hidden_size"] = 64
    config["llm_config"] |= {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    visual = config["visual_tokenizer_config"]
    visual["vocab_size"] = 512
    visual["backbone_config"] |= {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    return config


def write_checkpoint(
    tokenizer_folder: Path, folder: Path, config: Mapping[str, Any] = CONFIG
) -> None:
    """Write the folder.

    Args:
        tokenizer_folder: Has a small Qwen2 tokenizer and the settings of images
            (preprocessor_config.json).
        folder: Where to write, made if missing.
        config: Content of config.json, for tiles of 448 pixels.

    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))

    preprocessor = json.loads(
        (tokenizer_folder / "preprocessor_config.json").read_text()
    )
    preprocessor["crop_size"] = {"height": 448, "width": 448}
    preprocessor["size"] = {"shortest_edge": 448}
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))

    tokenizer = json.loads((tokenizer_folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    small = len(vocabulary)
    for index in range(small, FIRST_SPECIAL_ID):
        vocabulary[f"<filler {index}>"] = index
    shift = FIRST_SPECIAL_ID - min(t["id"] for t in tokenizer["added_tokens"])
    for token in tokenizer["added_tokens"]:
        token["id"] += shift
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))

    settings = json.loads((tokenizer_folder / "tokenizer_config.json").read_text())
    settings["added_tokens_decoder"] = {
        str(int(index) + shift): token
        for index, token in settings["added_tokens_decoder"].items()
    }
    # The general class reads tokenizer.json and nothing beside it.
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    shutil.copy(tokenizer_folder / "special_tokens_map.json", folder)


if __name__ == "__main__":
    write_checkpoint(Path(sys.argv[1]), Path(sys.argv[2]))
