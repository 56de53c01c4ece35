# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Every published checkpoint is understood from its config.json alone."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from tests.models.ovis.checkpoints import GPTQ_BITS, PUBLISHED, config_json
from vllm.config import ModelConfig, ParallelConfig
from vllm.model_executor.models import vision
from vllm.models.ovis.config import OvisConfig, VisionConfig, authors_visual_config
from vllm.models.ovis.visual_tokenizer import VOCABULARY_ALIGNMENT, padded_words
from vllm.transformers_utils.chat_templates import get_chat_template_fallback_path
from vllm.transformers_utils.config import get_config

VARIANTS = [(name, None) for name in PUBLISHED] + list(GPTQ_BITS.items())


def write_config(folder: Path, config: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def tensor_parallel(size: int) -> ParallelConfig:
    # The back end is named so that none is looked for: no rank is started.
    return ParallelConfig(
        tensor_parallel_size=size, distributed_executor_backend="external_launcher"
    )


@pytest.mark.parametrize(
    ("name", "bits"), VARIANTS, ids=[f"{n}-{b or 'float'}" for n, b in VARIANTS]
)
def test_engine_reads_every_published_config(
    name: str, bits: int | None, tmp_path: Path
) -> None:
    sizes = PUBLISHED[name]
    path = write_config(tmp_path, config_json(name, bits))
    config = ModelConfig(path, skip_tokenizer_init=True)
    assert config.architecture == "Ovis"
    assert isinstance(config.hf_config, OvisConfig)
    assert config.is_multimodal_model
    assert config.get_hidden_size() == sizes.hidden
    assert config.get_vocab_size() == sizes.vocabulary
    assert config.get_head_size() == (sizes.head_dim or sizes.hidden // sizes.heads)
    assert config.max_model_len == sizes.max_length
    assert config.quantization == (None if bits is None else "auto_gptq")

    vision = config.hf_config.vision
    tokens = 196 if sizes.tower == "siglip_vision_model" else 256
    assert vision.tokens_per_tile == tokens
    assert vision.num_visual_words == 65531
    width, layers, heads, inner = sizes.tower_sizes
    assert (vision.hidden_size, vision.num_layers) == (width, layers)
    assert (vision.num_heads, vision.intermediate_size) == (heads, inner)

    for tp in range(1, 9):
        parallel = tensor_parallel(tp)
        if sizes.heads % tp:
            with pytest.raises(ValueError, match=f"attention heads .{sizes.heads}."):
                config.verify_with_parallel_config(parallel)
            continue
        config.verify_with_parallel_config(parallel)
        assert config.get_num_attention_heads(parallel) == sizes.heads // tp
        assert config.get_num_kv_heads(parallel) == max(1, sizes.kv_heads // tp)
    two_stages = ParallelConfig(
        pipeline_parallel_size=2, distributed_executor_backend="external_launcher"
    )
    assert config.get_num_layers(two_stages) == sizes.layers // 2


@pytest.mark.parametrize("tp", range(1, 9))
def test_head_rows_divide_among_any_ranks(tp: int) -> None:
    """65531 words: each rank gets equally many rows, an aligned number of them."""
    rows = padded_words(65531, tp)
    assert rows >= 65531
    assert rows % (tp * VOCABULARY_ALIGNMENT) == 0
    assert rows - 65531 < tp * VOCABULARY_ALIGNMENT


def test_loading_twice_gives_one_registered_class(tmp_path: Path) -> None:
    """The engine registers its class again on every load; that changes nothing."""
    path = write_config(tmp_path, config_json("Ovis2-2B"))
    first, second = (get_config(path, trust_remote_code=False) for _ in range(2))
    assert type(first) is type(second) is OvisConfig
    assert type(AutoConfig.from_pretrained(path)) is OvisConfig
    assert first.model_type == "ovis"


def test_a_stored_head_is_kept(tmp_path: Path) -> None:
    """`disable_tie_weight`, as Ovis2-2B stores its own lm_head."""
    config = config_json("Ovis2-2B")
    config["llm_config"]["tie_word_embeddings"] = True
    tied = get_config(write_config(tmp_path, config), trust_remote_code=False)
    assert tied.llm_config.tie_word_embeddings
    config["disable_tie_weight"] = True
    untied = get_config(write_config(tmp_path, config), trust_remote_code=False)
    assert not untied.llm_config.tie_word_embeddings


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("drop_cls_token", True, "drop_cls_token=True"),
        ("depths", [-1, -5], "depths"),
        ("tokenize_function", "sparsemax", "'sparsemax'; supported: .*'softmax'"),
    ],
)
def test_options_that_are_not_computed_are_refused(
    key: str, value: Any, words: str
) -> None:
    config = config_json("Ovis2-2B")["visual_tokenizer_config"]
    with pytest.raises(ValueError, match=words):
        VisionConfig.from_dict({**config, key: value})


def test_unknown_text_model_is_refused() -> None:
    with pytest.raises(ValueError, match="'phi3'.*supported: .*'qwen2'"):
        OvisConfig(llm_config={"model_type": "phi3"})


def converted_config(name: str) -> dict[str, Any]:
    """The same checkpoint's config.json in the layout of transformers' port."""
    config = config_json(name)
    visual = config["visual_tokenizer_config"]
    tower = visual["backbone_config"]
    return {
        "architectures": ["Ovis2ForConditionalGeneration"],
        "model_type": "ovis2",
        "hidden_size": config["hidden_size"],
        "image_token_id": 151665,
        "visual_indicator_token_ids": list(range(151666, 151671)),
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "text_config": config["llm_config"],
        "vision_config": {
            **{key: value for key, value in tower.items() if key != "model_type"},
            "vocab_size": visual["vocab_size"],
            "hidden_stride": visual["hidden_stride"],
        },
    }


@pytest.mark.parametrize("name", ["Ovis2-1B", "Ovis2-34B"])
def test_converted_layout_has_the_same_sizes(name: str, tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    path = write_config(tmp_path / "hf", converted_config(name))
    converted = ModelConfig(path, skip_tokenizer_init=True)
    authors = ModelConfig(
        write_config(tmp_path, config_json(name)), skip_tokenizer_init=True
    )
    assert converted.hf_config.vision == authors.hf_config.vision
    assert converted.hf_config.model_type == "ovis2"
    assert converted.hf_config.image_token_id == 151665
    for size in ("total_num_attention_heads", "total_num_kv_heads", "hidden_size"):
        ours = getattr(converted.model_arch_config, size)
        assert ours == getattr(authors.model_arch_config, size)
    assert not converted.hf_config.llm_config.tie_word_embeddings
    assert OvisConfig.model_type == "ovis"


def test_converted_layout_fills_in_what_its_files_leave_out() -> None:
    """Keys left out have the port's defaults, not the authors'."""
    from transformers.models.ovis2.configuration_ovis2 import Ovis2VisionConfig

    defaults = Ovis2VisionConfig().to_dict()
    assert authors_visual_config({}) == authors_visual_config(defaults)
    sizes = VisionConfig.from_dict(authors_visual_config({}))
    assert (sizes.image_size, sizes.hidden_stride, sizes.vocab_size) == (224, 1, 16384)


@pytest.mark.parametrize(
    ("key", "value"),
    [("hidden_act", "gelu"), ("num_visual_indicator_tokens", 4), ("qkv_bias", True)],
)
def test_converted_layout_of_another_model_is_refused(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{key} .*must be .*, got {value!r}"):
        authors_visual_config({key: value})


def test_both_layouts_have_a_chat_template_to_fall_back_on() -> None:
    fallback = get_chat_template_fallback_path("ovis", "any/name")
    assert fallback is not None and fallback.name == "template_ovis.jinja"
    assert get_chat_template_fallback_path("ovis2", "any/name") == fallback


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_tower_that_ranks_do_not_divide_is_replicated(
    monkeypatch: pytest.MonkeyPatch, name: str, ranks: int
) -> None:
    """12 heads on 8 ranks: each encodes whole tiles, where an assertion would stop."""
    monkeypatch.setattr(vision, "get_tensor_model_parallel_world_size", lambda: ranks)
    monkeypatch.setattr(vision, "get_multimodal_config", lambda: None)
    heads = PUBLISHED[name].tower_sizes[2]
    assert vision.is_vit_use_data_parallel(heads) == (heads == 12 and ranks == 8)
