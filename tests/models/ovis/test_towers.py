# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The engine's visual tokenizer against the plain one, on random weights.

Options that no recording covers: other strides, biases in AIMv2, and the tokenize
functions that take one word instead of mixing all.
"""

import itertools
from typing import Any

import pytest
import torch

from tests.models.ovis.test_visual_tokenizer import (
    MEAN,
    STD,
    TEXT_WIDTH,
    load,
    random_tiles,
    run_ranks,
)
from tests.reference.model import VisualTokenizer as PlainTokenizer
from vllm.models.ovis.config import TOKENIZE_FUNCTIONS, VisionConfig
from vllm.models.ovis.images import normalization_table, normalize
from vllm.models.ovis.visual_tokenizer import VisualTokenizer

TILES = 3


def visual_config(tower: str, **options: Any) -> dict[str, Any]:
    """A small `visual_tokenizer_config`; options of the tower go to its part."""
    backbone = {
        "model_type": tower,
        # 5 x 5 patches: neither 2 nor 3 divides them.
        "image_size": 70,
        "patch_size": 14,
        "num_channels": 3,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "rms_norm_eps": 1e-5,
        "layer_norm_eps": 1e-6,
        "qkv_bias": options.pop("qkv_bias", False),
        "use_bias": options.pop("use_bias", False),
    }
    family = "aimv2" if tower == "aimv2" else "siglip"
    return {
        "model_type": f"{family}_visual_tokenizer",
        "vocab_size": 133,
        "hidden_stride": 2,
        "tokenize_function": "softmax",
        "backbone_config": backbone,
        **options,
    }


CASES = {
    f"{tower} stride {stride} {function}": visual_config(
        tower, hidden_stride=stride, tokenize_function=function
    )
    for tower, stride, function in itertools.product(
        ("aimv2", "siglip_vision_model"), (1, 2, 3), TOKENIZE_FUNCTIONS
    )
} | {
    f"aimv2 qkv_bias {qkv_bias} use_bias {use_bias}": visual_config(
        "aimv2", qkv_bias=qkv_bias, use_bias=use_bias
    )
    for qkv_bias, use_bias in ((True, False), (False, True), (True, True))
}


def both(config: dict[str, Any]) -> torch.Tensor:
    """Embeddings [2, tiles, tokens, width]: the engine's and the plain ones."""
    sizes = VisionConfig.from_dict(config)
    generator = torch.Generator().manual_seed(1)
    plain = PlainTokenizer(config)
    for parameter in plain.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    # Peaked probabilities, so that embeddings follow the features.
    norm: Any = plain.head[1]
    norm.weight.data *= 10
    table = torch.randn(sizes.vocab_size, TEXT_WIDTH, generator=generator)

    model = VisualTokenizer(
        sizes, TEXT_WIDTH, MEAN, STD, quant_config=None, prefix="visual_tokenizer"
    )
    weights = {name: p.detach() for name, p in plain.named_parameters()}
    load(model, {**weights, "head.vte.weight": table})

    pixels, rectangles = random_tiles(TILES, sizes.image_size)
    floats = torch.from_numpy(
        normalize(pixels.numpy(), rectangles.numpy(), normalization_table(MEAN, STD))
    )
    with torch.inference_mode():
        words = plain.probabilities(plain.features(floats))
        expected = words @ table[: words.shape[-1]]
        return torch.stack([model(pixels, rectangles), expected])


@pytest.fixture(scope="module")
def results() -> dict[str, torch.Tensor]:
    return run_ranks(1, {name: (both, (config,)) for name, config in CASES.items()})


@pytest.mark.parametrize("name", CASES)
def test_engine_equals_plain(name: str, results: dict[str, torch.Tensor]) -> None:
    engine, plain = results[name]
    stride = CASES[name]["hidden_stride"]
    tokens = (-(-5 // stride)) ** 2
    assert engine.shape == (TILES, tokens, TEXT_WIDTH)
    assert plain.std() > 0.1
    torch.testing.assert_close(engine, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tower", ["aimv2", "siglip_vision_model"])
def test_both_argmax_functions_are_one(
    tower: str, results: dict[str, torch.Tensor]
) -> None:
    """The noise of gumbel_argmax has its mode at the argmax, which is what we take."""
    straight, gumbel, soft = (
        results[f"{tower} stride 2 {function}"][0]
        for function in ("st_argmax", "gumbel_argmax", "softmax")
    )
    assert torch.equal(straight, gumbel)
    assert not torch.allclose(straight, soft, atol=0.1)
