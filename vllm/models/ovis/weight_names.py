# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Names of the weights in both file layouts."""

from vllm.model_executor.models.utils import WeightsMapper

_AUTHORS = WeightsMapper(
    orig_to_new_prefix={
        "vte.": "visual_tokenizer.head.vte.",
        # SigLIP's layers, which adapters name as the checkpoint does.
        "visual_tokenizer.backbone.vision_model.encoder.": (
            "visual_tokenizer.backbone.encoder."
        ),
    }
)

_TOWER = "model.vision_tower.transformer."
_BACKBONE = "visual_tokenizer.backbone."
_PATCHES = f"{_BACKBONE}preprocessor.patchifier."

# The layout of transformers' own port (Ovis2ForConditionalGeneration). Every tensor
# has its counterpart; only query, key and value of the tower are stored apart.
_CONVERTED = WeightsMapper(
    orig_to_new_substr={
        ".attention.out_proj.": ".attn.proj.",
        ".attention.": ".attn.",
        ".ffn.gate_proj.": ".mlp.fc1.",
        ".ffn.up_proj.": ".mlp.fc3.",
        ".ffn.down_proj.": ".mlp.fc2.",
        ".rms_norm1.": ".norm_1.",
        ".rms_norm2.": ".norm_2.",
    },
    orig_to_new_prefix={
        "lm_head.": "llm.lm_head.",
        "model.language_model.": "llm.model.",
        "model.visual_embeddings_table.": "visual_tokenizer.head.vte.",
        "model.vision_tower.head_linear.": "visual_tokenizer.head.0.",
        "model.vision_tower.head_norm.": "visual_tokenizer.head.1.",
        f"{_TOWER}embeddings.patch_embedding.": f"{_PATCHES}proj.",
        f"{_TOWER}embeddings.rms_norm.": f"{_PATCHES}norm.",
        f"{_TOWER}embeddings.position_embedding.weight": (
            f"{_BACKBONE}preprocessor.pos_embed"
        ),
        f"{_TOWER}encoder.layers.": f"{_BACKBONE}trunk.blocks.",
        f"{_TOWER}rms_norm.": f"{_BACKBONE}trunk.post_trunk_norm.",
    },
)

CHECKPOINT_NAMES = _AUTHORS | _CONVERTED
"""One mapper for both: no name of one layout begins as a name of the other, and
quantization lists and adapters are read through it as well."""
