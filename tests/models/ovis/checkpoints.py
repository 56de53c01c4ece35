# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Configurations of the published checkpoints, written from their sizes."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Published:
    """Sizes of a published checkpoint.

    Attributes:
        text_type: `model_type` of the text model.
        hidden, layers, heads, kv_heads, inner, vocabulary: Its sizes.
        tower: `model_type` of the vision tower.
        tower_sizes: Its hidden size, layers, heads and MLP width.
        head_dim: Where it is not hidden / heads.

    """

    text_type: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    vocabulary: int
    tower: str
    tower_sizes: tuple[int, int, int, int]
    head_dim: int | None = None

    @property
    def max_length(self) -> int:
        """Longest context of the text model's config."""
        return {"gemma2": 8192, "llama": 131072, "qwen2": 32768}[self.text_type]


_SO400M = ("siglip_vision_model", (1152, 27, 16, 4304))
_LARGE = ("aimv2", (1024, 24, 8, 2816))
_HUGE = ("aimv2", (1536, 24, 12, 4096))
_1B = ("aimv2", (2048, 24, 16, 5632))

PUBLISHED = {
    "Ovis1.6-Gemma2-9B": Published(
        *("gemma2", 3584, 42, 16, 8, 14336, 256000), *_SO400M, head_dim=256
    ),
    "Ovis1.6-Gemma2-27B": Published(
        *("gemma2", 4608, 46, 32, 16, 36864, 256000), *_SO400M, head_dim=128
    ),
    "Ovis1.6-Llama3.2-3B": Published("llama", 3072, 28, 24, 8, 8192, 128256, *_SO400M),
    "Ovis2-1B": Published("qwen2", 896, 24, 14, 2, 4864, 151936, *_LARGE),
    "Ovis2-2B": Published("qwen2", 1536, 28, 12, 2, 8960, 151936, *_LARGE),
    "Ovis2-4B": Published("qwen2", 2048, 36, 16, 2, 11008, 151936, *_HUGE),
    "Ovis2-8B": Published("qwen2", 3584, 28, 28, 4, 18944, 152064, *_HUGE),
    "Ovis2-16B": Published("qwen2", 5120, 48, 40, 8, 13824, 152064, *_HUGE),
    "Ovis2-34B": Published("qwen2", 5120, 64, 40, 8, 27648, 152064, *_1B),
}

GPTQ_BITS = {
    "Ovis1.6-Gemma2-9B": 4,
    "Ovis1.6-Llama3.2-3B": 4,
    "Ovis2-2B": 4,
    "Ovis2-4B": 4,
    "Ovis2-8B": 4,
    "Ovis2-16B": 4,
    "Ovis2-34B": 8,
}
"""Bits of the GPTQ variants (34B also has one with 4)."""


def config_json(name: str, gptq_bits: int | None = None) -> dict[str, Any]:
    """The config.json of a published checkpoint in the authors' layout."""
    sizes = PUBLISHED[name]
    is_siglip = sizes.tower == "siglip_vision_model"
    width, layers, heads, inner = sizes.tower_sizes
    text: dict[str, Any] = {
        "model_type": sizes.text_type,
        "hidden_size": sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "intermediate_size": sizes.inner,
        "vocab_size": sizes.vocabulary,
        "max_position_embeddings": sizes.max_length,
        "torch_dtype": "bfloat16",
    }
    if sizes.head_dim is not None:
        text["head_dim"] = sizes.head_dim
    config: dict[str, Any] = {
        "architectures": ["Ovis"],
        "model_type": "ovis",
        "hidden_size": sizes.hidden,
        "multimodal_max_length": 8192 if is_siglip else 32768,
        "torch_dtype": "bfloat16",
        "llm_config": text,
        "visual_tokenizer_config": {
            "model_type": "siglip_visual_tokenizer"
            if is_siglip
            else "aimv2_visual_tokenizer",
            "vocab_size": 65536,
            "hidden_stride": 2,
            "tokenize_function": "softmax",
            "tau": 1.0,
            "drop_cls_token": False,
            "depths": None,
            "backbone_config": {
                "model_type": sizes.tower,
                "image_size": 384 if is_siglip else 448,
                "patch_size": 14,
                "hidden_size": width,
                "num_hidden_layers": layers,
                "num_attention_heads": heads,
                "intermediate_size": inner,
            },
        },
        "auto_map": {"AutoConfig": "configuration_ovis.OvisConfig"},
    }
    if gptq_bits is not None:
        config["quantization_config"] = {
            "quant_method": "gptq",
            "bits": gptq_bits,
            "group_size": 128,
            "desc_act": False,
            "sym": True,
        }
    return config
