# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Configuration of Ovis 1.6 and Ovis 2, in the authors' and in the converted layout.

docs/checkpoints.md compares the layouts.
"""

from dataclasses import dataclass
from typing import Any, Literal

from transformers import CONFIG_MAPPING, PreTrainedConfig

NUM_INDICATORS = 5
"""Rows of the visual embedding table kept for layout marks, at its very end:
image start, prefix, column separator, row separator, image end (authors' code,
measured bit for bit on every golden case with an image)."""

_TOWER_BY_MODEL_TYPE: dict[str, Literal["aimv2", "siglip"]] = {
    "aimv2": "aimv2",
    "siglip_vision_model": "siglip",
}

_ARCHITECTURE_BY_TEXT_MODEL_TYPE = {
    "qwen2": "Qwen2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
}

TOKENIZE_FUNCTIONS = ("softmax", "gumbel_argmax", "st_argmax")


@dataclass(frozen=True)
class VisionConfig:
    """Sizes of the visual tokenizer, read once from the checkpoint's config."""

    tower: Literal["aimv2", "siglip"]
    image_size: int
    """Side of a tile in pixels."""
    patch_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    norm_eps: float
    qkv_bias: bool
    use_bias: bool
    """Biases in the attention projection and the MLP."""
    hidden_act: str
    vocab_size: int
    """Rows of the visual embedding table, indicators included."""
    hidden_stride: int
    """Side of the square of neighbouring features joined into one token."""
    tokenize_function: str

    @property
    def patches_per_side(self) -> int:
        """Patches along one side; pixels beyond the last full patch are unused."""
        return self.image_size // self.patch_size

    @property
    def tokens_per_side(self) -> int:
        """Visual tokens along one side, the feature grid padded to the stride."""
        return -(-self.patches_per_side // self.hidden_stride)

    @property
    def tokens_per_tile(self) -> int:
        return self.tokens_per_side**2

    @property
    def encoder_graph_tokens(self) -> list[int]:
        """Visual tokens of each number of tiles that has a CUDA graph of its own.

        From one tile to those of the largest picture at the authors' max_partition. A
        picture of nine tiles in a graph of ten would take a ninth longer.
        """
        return [tiles * self.tokens_per_tile for tiles in range(1, 11)]

    @property
    def merged_size(self) -> int:
        """Width of the joined features that enter the head."""
        return self.hidden_size * self.hidden_stride**2

    @property
    def num_visual_words(self) -> int:
        """Outputs of the head: the vocabulary without the indicator rows."""
        return self.vocab_size - NUM_INDICATORS

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> "VisionConfig":
        """Read `visual_tokenizer_config` of the authors' config.json.

        Raises:
            ValueError: If the tower, the tokenize function or an option is one
                this implementation does not compute.

        """
        backbone = config["backbone_config"]
        model_type = backbone.get("model_type")
        if model_type not in _TOWER_BY_MODEL_TYPE:
            raise ValueError(
                f"Unknown vision tower {model_type!r} in visual_tokenizer_config; "
                f"supported: {sorted(_TOWER_BY_MODEL_TYPE)}."
            )
        tower = _TOWER_BY_MODEL_TYPE[model_type]

        tokenize_function = config.get("tokenize_function", "softmax")
        if tokenize_function not in TOKENIZE_FUNCTIONS:
            raise ValueError(
                f"Unknown tokenize_function {tokenize_function!r}; "
                f"supported: {list(TOKENIZE_FUNCTIONS)}."
            )
        for option in ("drop_cls_token", "depths"):
            # Neither tower has a class token to drop, and no published checkpoint
            # mixes features of several depths.
            if config.get(option):
                raise ValueError(
                    f"visual_tokenizer_config.{option}={config[option]!r} is not "
                    "supported; the published checkpoints leave it unset."
                )

        is_aimv2 = tower == "aimv2"
        return cls(
            tower=tower,
            image_size=backbone["image_size"],
            patch_size=backbone["patch_size"],
            hidden_size=backbone["hidden_size"],
            intermediate_size=backbone["intermediate_size"],
            num_layers=backbone["num_hidden_layers"],
            num_heads=backbone["num_attention_heads"],
            norm_eps=backbone.get(
                "rms_norm_eps" if is_aimv2 else "layer_norm_eps",
                1e-5 if is_aimv2 else 1e-6,
            ),
            qkv_bias=backbone.get("qkv_bias", False) if is_aimv2 else True,
            use_bias=backbone.get("use_bias", False) if is_aimv2 else True,
            hidden_act="silu"
            if is_aimv2
            else backbone.get("hidden_act", "gelu_pytorch_tanh"),
            vocab_size=config["vocab_size"],
            hidden_stride=config.get("hidden_stride", 1),
            tokenize_function=tokenize_function,
        )


_DEFAULT_VISUAL_TOKENIZER_CONFIG: dict[str, Any] = {
    "model_type": "aimv2_visual_tokenizer",
    "vocab_size": 65536,
    "hidden_stride": 2,
    "tokenize_function": "softmax",
    "backbone_config": {
        "model_type": "aimv2",
        "image_size": 448,
        "patch_size": 14,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "rms_norm_eps": 1e-5,
    },
}


class OvisConfig(PreTrainedConfig):
    """Ovis 1.6 and 2 (`model_type` "ovis"), as the authors' config.json has it.

    The text model's config becomes a transformers config of its own type, so that
    the engine reads head counts and lengths from it; the visual tokenizer's stays
    a dictionary, with its sizes behind `vision`.
    """

    model_type = "ovis"

    # An explicit constructor: without one, transformers 5 generates a dataclass
    # constructor that skips the base class's handling of keyword arguments.
    def __init__(
        self,
        llm_config: PreTrainedConfig | dict[str, Any] | None = None,
        visual_tokenizer_config: dict[str, Any] | None = None,
        multimodal_max_length: int = 8192,
        hidden_size: int | None = None,
        conversation_formatter_class: str | None = None,
        disable_tie_weight: bool = False,
        image_token_id: int | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(llm_config, PreTrainedConfig):
            llm_config = dict(llm_config or {"model_type": "qwen2"})
            text_model_type = llm_config.pop("model_type", None)
            if text_model_type not in _ARCHITECTURE_BY_TEXT_MODEL_TYPE:
                raise ValueError(
                    f"Unknown text model {text_model_type!r} in llm_config; "
                    f"supported: {sorted(_ARCHITECTURE_BY_TEXT_MODEL_TYPE)}."
                )
            llm_config = CONFIG_MAPPING[text_model_type].from_dict(llm_config)
            assert llm_config is not None
        if disable_tie_weight:
            # The authors then keep the head that the checkpoint stores.
            llm_config.tie_word_embeddings = False
        if not llm_config.architectures:
            llm_config.architectures = [
                _ARCHITECTURE_BY_TEXT_MODEL_TYPE[llm_config.model_type]
            ]
        self.llm_config = llm_config
        self.visual_tokenizer_config = (
            visual_tokenizer_config or _DEFAULT_VISUAL_TOKENIZER_CONFIG
        )
        self.multimodal_max_length = multimodal_max_length
        self.hidden_size = hidden_size or llm_config.hidden_size
        self.conversation_formatter_class = conversation_formatter_class
        self.disable_tie_weight = disable_tie_weight
        # The token that holds image positions, where a layout names one.
        self.image_token_id = image_token_id
        kwargs["tie_word_embeddings"] = llm_config.tie_word_embeddings
        super().__init__(**kwargs)

    def get_text_config(self, decoder: Any = None, encoder: Any = None) -> Any:
        """Return the text model's configuration."""
        return self.llm_config

    @property
    def vision(self) -> VisionConfig:
        """Sizes of the visual tokenizer."""
        return VisionConfig.from_dict(self.visual_tokenizer_config)

    @property
    def embedding_scale(self) -> float | None:
        """Factor on the whole merged sequence, visual embeddings included.

        Gemma 2 multiplies its input embeddings by sqrt(hidden_size) whatever they
        came from (authors' behaviour, golden case family tiny-ovis1.6-gemma2).
        """
        if self.llm_config.model_type == "gemma2":
            return self.llm_config.hidden_size**0.5
        return None


_CONVERTED_VISION_DEFAULTS: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "image_size": 224,
    "patch_size": 14,
    "rms_norm_eps": 1e-5,
    "qkv_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "vocab_size": 16384,
    "hidden_stride": 1,
    "num_visual_indicator_tokens": NUM_INDICATORS,
    "tokenize_function": "softmax",
}
"""What a key missing from the converted layout's `vision_config` means: files written
by transformers 4 leave defaults out."""


def authors_visual_config(vision_config: dict[str, Any]) -> dict[str, Any]:
    """Write the converted layout's `vision_config` as `visual_tokenizer_config`.

    Raises:
        ValueError: If the tower's activation, its biases or the number of indicator
            rows are not those of the authors' models.

    """
    given = {**_CONVERTED_VISION_DEFAULTS, **vision_config}
    for key, needed in (
        ("hidden_act", "silu"),
        ("num_visual_indicator_tokens", NUM_INDICATORS),
    ):
        if given[key] != needed:
            raise ValueError(
                f"vision_config.{key} must be {needed!r}, got {given[key]!r}."
            )
    if given["qkv_bias"] != given["mlp_bias"]:
        # There qkv_bias covers the output projection too, which the authors' use_bias
        # does; no published checkpoint has either.
        raise ValueError(
            "vision_config.qkv_bias and mlp_bias must be equal, got "
            f"{given['qkv_bias']!r} and {given['mlp_bias']!r}."
        )
    tower_keys = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "image_size",
        "patch_size",
        "rms_norm_eps",
        "qkv_bias",
    )
    return {
        "model_type": "aimv2_visual_tokenizer",
        "vocab_size": given["vocab_size"],
        "hidden_stride": given["hidden_stride"],
        "tokenize_function": given["tokenize_function"],
        "backbone_config": {
            "model_type": "aimv2",
            **{key: given[key] for key in tower_keys},
            "use_bias": given["mlp_bias"],
        },
    }


class Ovis2HfConfig(OvisConfig):
    """Ovis 2 in the layout of transformers' own port (`model_type` "ovis2").

    Only names differ from the authors' layout, so after construction it is an
    `OvisConfig` like any other. As in that port, the outer `tie_word_embeddings`
    decides, and the text model's own is not looked at.
    """

    model_type = "ovis2"

    def __init__(
        self,
        text_config: dict[str, Any] | None = None,
        vision_config: dict[str, Any] | None = None,
        tie_word_embeddings: bool = True,
        **kwargs: Any,
    ) -> None:
        text_config = {"model_type": "qwen2", **(text_config or {})}
        text_config["tie_word_embeddings"] = tie_word_embeddings
        super().__init__(
            llm_config=text_config,
            visual_tokenizer_config=authors_visual_config(vision_config or {}),
            **kwargs,
        )
