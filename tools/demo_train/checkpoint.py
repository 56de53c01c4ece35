# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The demo checkpoint as files: sizes, tokeniser and weights in the authors' layout."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from tools.demo_data.scenes import COLOURS, PLACES, SHAPES

SIDE = 112
VISUAL_WORDS = 512
TEXT_WORDS = 512

SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
ORDINARY = [
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
]
# Qwen2's published split rule: one token for each digit.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{%- if messages[0]['role'] == 'system' %}"
    "{{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}"
    "{%- else %}"
    "{{- '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}"
    "{%- endif %}"
    "{%- for message in messages %}"
    "{%- if (message.role != 'system') or (not loop.first) %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


def _corpus() -> list[str]:
    """Text that decides the merges: whole words of the prompts become one token.

    No word is in capitals, so the strings to read stay one token a character.
    """
    lines = [
        "You are a helpful assistant.",
        "system user assistant",
        "What colour is the shape?",
        "What colour is the shape in image 1? image 2?",
        "What shape is it? What shape is in image 1?",
        "Where is the shape? Describe the picture.",
        "What shape is the small mark?",
        "Read the text. Read the small text.",
    ]
    lines += [f"Which image shows the {shape}?" for shape in SHAPES]
    lines += [f"{c} {s}, {p}" for c in COLOURS for s in SHAPES for p in PLACES]
    lines += [word for word in [*COLOURS, *SHAPES, *PLACES] for _ in range(20)]
    return lines * 4


def _write_json(path: Path, content: object) -> None:
    text = json.dumps(content, indent=1, ensure_ascii=False)
    path.write_text(text + "\n", "utf-8")


def build_tokenizer() -> Tokenizer:
    """Train the byte-level BPE tokeniser of Qwen2 type; takes well under a second."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(
        add_prefix_space=False, trim_offsets=False, use_regex=False
    )
    trainer = trainers.BpeTrainer(
        vocab_size=TEXT_WORDS - len(SPECIAL) - len(ORDINARY),
        special_tokens=[],
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    tokenizer.add_special_tokens(
        [AddedToken(s, special=True, normalized=False) for s in SPECIAL]
    )
    tokenizer.add_tokens(
        [AddedToken(s, special=False, normalized=False) for s in ORDINARY]
    )
    return tokenizer


def _write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    model = json.loads(tokenizer.to_str())["model"]
    vocab = sorted(model["vocab"].items(), key=lambda item: item[1])
    _write_json(folder / "vocab.json", dict(vocab))
    pairs = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    merges = "\n".join(["#version: 0.2", *pairs])
    (folder / "merges.txt").write_text(merges + "\n", "utf-8")
    ids = {s: tokenizer.token_to_id(s) for s in ORDINARY + SPECIAL}
    _write_json(folder / "added_tokens.json", ids)
    plain = {
        "lstrip": False,
        "normalized": False,
        "rstrip": False,
        "single_word": False,
    }
    decoder = {
        str(ids[s]): {"content": s, **plain, "special": s in SPECIAL}
        for s in SPECIAL + ORDINARY
    }
    _write_json(
        folder / "tokenizer_config.json",
        {
            "add_bos_token": False,
            "add_prefix_space": False,
            "added_tokens_decoder": decoder,
            "additional_special_tokens": SPECIAL[1:],
            "bos_token": None,
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
            "eos_token": "<|im_end|>",
            "errors": "replace",
            "model_max_length": 32768,
            "pad_token": "<|endoftext|>",
            "split_special_tokens": False,
            "tokenizer_class": "Qwen2Tokenizer",
            "unk_token": None,
        },
    )
    _write_json(
        folder / "special_tokens_map.json",
        {
            "additional_special_tokens": SPECIAL[1:],
            "eos_token": {"content": "<|im_end|>", **plain},
            "pad_token": {"content": "<|endoftext|>", **plain},
        },
    )


def model_config(tokenizer: Tokenizer) -> dict:
    """Content of config.json: AIMv2 4 x 192 and Qwen2 3 x 256, 3.7 M weights."""
    end, text_end = (tokenizer.token_to_id(s) for s in ("<|im_end|>", "<|endoftext|>"))
    return {
        "architectures": ["Ovis"],
        "conversation_formatter_class": "QwenConversationFormatter",
        "disable_tie_weight": False,
        "hidden_size": 256,
        "llm_attn_implementation": None,
        "llm_config": {
            "model_type": "qwen2",
            "architectures": ["Qwen2ForCausalLM"],
            "attention_dropout": 0.0,
            "bos_token_id": text_end,
            "eos_token_id": end,
            "hidden_act": "silu",
            "hidden_size": 256,
            "initializer_range": 0.02,
            "intermediate_size": 384,
            "max_position_embeddings": 32768,
            "max_window_layers": 3,
            "num_attention_heads": 4,
            "num_hidden_layers": 3,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "sliding_window": 131072,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "use_sliding_window": False,
            "vocab_size": TEXT_WORDS,
        },
        "model_type": "ovis",
        "multimodal_max_length": 32768,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.46.2",
        "use_cache": True,
        "visual_tokenizer_config": {
            "model_type": "aimv2_visual_tokenizer",
            "backbone_config": {
                "model_type": "aimv2",
                "architectures": ["AIMv2Model"],
                "attention_dropout": 0.0,
                "hidden_size": 192,
                "image_size": SIDE,
                "intermediate_size": 384,
                "num_attention_heads": 6,
                "num_channels": 3,
                "num_hidden_layers": 4,
                "patch_size": 14,
                "projection_dropout": 0.0,
                "qkv_bias": False,
                "rms_norm_eps": 1e-5,
                "torch_dtype": "bfloat16",
                "use_bias": False,
            },
            "backbone_kwargs": {},
            "depths": None,
            "drop_cls_token": False,
            "hidden_stride": 2,
            "tau": 1.0,
            "tokenize_function": "softmax",
            "torch_dtype": "bfloat16",
            "use_indicators": False,
            "vocab_size": VISUAL_WORDS,
        },
    }


def preprocessor_config() -> dict:
    """Content of preprocessor_config.json: CLIP's numbers, tile side 112."""
    return {
        "crop_size": {"height": SIDE, "width": SIDE},
        "do_center_crop": False,
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_processor_type": "CLIPImageProcessor",
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "resample": 3,
        "rescale_factor": 0.00392156862745098,
        "size": {"shortest_edge": SIDE},
    }


def write_checkpoint(
    folder: Path, weights: dict[str, torch.Tensor], tokenizer: Tokenizer
) -> None:
    """Write the whole folder; weights are rounded to bfloat16.

    The final norm of the tower is stored, as in the published checkpoints, though
    nothing applies it.

    Args:
        folder: Made if missing.
        weights: State dict of the reference model.
        tokenizer: The tokeniser the model was trained with.

    """
    folder.mkdir(parents=True, exist_ok=True)
    config = model_config(tokenizer)
    width = config["visual_tokenizer_config"]["backbone_config"]["hidden_size"]
    stored = {k: v for k, v in weights.items() if k != "llm.lm_head.weight"}
    stored["visual_tokenizer.backbone.trunk.post_trunk_norm.weight"] = torch.ones(width)
    stored = {k: v.detach().cpu().bfloat16().contiguous() for k, v in stored.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", config)
    _write_json(folder / "preprocessor_config.json", preprocessor_config())
    ids = {s: tokenizer.token_to_id(s) for s in ("<|im_end|>", "<|endoftext|>")}
    # Greedy by default: answers are names and strings, chance has no place in them.
    _write_json(
        folder / "generation_config.json",
        {
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
            "pad_token_id": ids["<|endoftext|>"],
            "do_sample": True,
            "repetition_penalty": 1.0,
            "temperature": 1.0,
            "top_k": 1,
            "top_p": 1.0,
        },
    )
    _write_tokenizer(folder, tokenizer)
