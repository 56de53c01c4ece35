# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The plain-torch reference against numbers made by the authors' code."""

import hashlib
import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.models.ovis import golden

from .model import Reference
from .preprocess import placeholder_ids, preprocess
from .prompt import expand_markers, prompt_ids

CASES = golden.all_cases()
ARRAYS = golden.arrays()
INFO = json.loads((golden.GOLDEN / "arrays.json").read_text("utf-8"))

# Relative to the largest value of the array; float32 rounding stays far below.
TOLERANCE = 1e-4

# Height 1 or 3 is taken for the colour axis by the authors' old processor; what the
# picture really contains is right here (NOTES.md, Oddities).
ARTEFACTS = {"size_1x1", "size_3x3", "size_1x3", "size_3x1", "size_50x3"}


def case_id(case: dict) -> str:
    return f"{case['checkpoint']}/{case['name']}"


ARRAY_CASES = [c for c in CASES if c["name"] in INFO[c["checkpoint"]]["cases"]]
GOOD_CASES = [
    c for c in CASES if "exception" not in c["expected"] and c["name"] not in ARTEFACTS
]


@cache
def reference(checkpoint: str) -> Reference:
    return Reference(Path(golden.checkpoint_path(checkpoint)))


def sha256(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array, "<f4").tobytes()).hexdigest()


def assert_close(actual: torch.Tensor, name: str) -> None:
    expected = ARRAYS[name]
    assert actual.shape == expected.shape
    error = np.abs(actual.numpy() - expected).max() / np.abs(expected).max()
    assert error < TOLERANCE, f"{name}: relative error {error:.2e}"


@pytest.mark.parametrize("case", GOOD_CASES, ids=case_id)
def test_pixels_are_bit_exact(case):
    ref = reference(case["checkpoint"])
    for image, expected in zip(
        golden.case_images(case), case["expected"]["images"], strict=True
    ):
        pixels, grid = preprocess(image, ref.rule, case["max_partition"])
        assert list(grid) == expected["grid"]
        assert placeholder_ids(grid) == expected["placeholder_ids"]
        assert [sha256(tile) for tile in pixels] == expected["tile_sha256"]
        assert sha256(pixels) == expected["pixel_values"]["sha256"]


@pytest.mark.parametrize("case", GOOD_CASES, ids=case_id)
def test_ids(case):
    ref, expected = reference(case["checkpoint"]), case["expected"]
    prompt = ref.format(case["conversation"], case["generation_preface"])
    assert prompt == expected["prompt"]
    marked = prompt_ids(prompt, ref.encode)
    assert marked == expected["prompt_input_ids_with_image_marker"]
    placeholders = [i["placeholder_ids"] for i in expected["images"]]
    markers = marked.count(-200)
    if markers != len(placeholders):
        # The authors ignore images without a marker; this project refuses them.
        with pytest.raises(ValueError, match="markers"):
            expand_markers(marked, placeholders)
        placeholders = placeholders[:markers]
    assert expand_markers(marked, placeholders) == expected["input_ids"]


@pytest.mark.parametrize(
    "case", [c for c in CASES if "exception" in c["expected"]], ids=case_id
)
def test_refusals(case):
    if case["name"] in ARTEFACTS:
        # These pictures are legal here, if very small.
        ref = reference(case["checkpoint"])
        assert preprocess(golden.case_images(case)[0], ref.rule)[0].shape[0] == 1
        return
    with pytest.raises(ValueError):
        reference(case["checkpoint"]).prepare(
            golden.case_images(case),
            case["conversation"],
            case["generation_preface"],
            case["max_partition"],
        )


@pytest.mark.parametrize("case", ARRAY_CASES, ids=case_id)
def test_numbers(case):
    ref, model = reference(case["checkpoint"]), reference(case["checkpoint"]).model
    ids, pixels = case["expected"]["input_ids"], torch.zeros(0, 3, 1, 1)
    key, embeds = case_id(case), None
    with torch.inference_mode():
        if case["images"]:
            tiles = [
                preprocess(image, ref.rule, case["max_partition"])[0]
                for image in golden.case_images(case)
            ]
            pixels = torch.from_numpy(np.concatenate(tiles))
            features = model.visual_tokenizer.features(pixels)
            words = model.visual_tokenizer.probabilities(features)
            assert (words.argmax(-1).numpy() == ARRAYS[f"{key}/visual_argmax"]).all()
            assert_close(words.amax(-1), f"{key}/visual_max_prob")
            visual = model.visual_embeddings(pixels)
            assert_close(visual, f"{key}/visual_embeds")
        else:
            visual = torch.zeros(0)
        embeds = model.merge(ids, visual)
        assert_close(embeds, f"{key}/inputs_embeds")
        mask = model.merge_mask(ids, INFO[case["checkpoint"]]["info"]["pad_token_id"])
        assert (mask.numpy() == ARRAYS[f"{key}/attention_mask"]).all()
        # A mask without gaps changes nothing; leaving it out keeps positions plain.
        used = None if mask.all() else mask
        assert_close(model.logits(embeds, used), f"{key}/logits")
        greedy = ARRAYS[f"{key}/greedy"].tolist()
        assert model.greedy(embeds, len(greedy), used) == greedy


def test_argmax_functions_are_one_hot():
    model = reference("tiny-ovis2").model
    features = torch.randn(2, 16, 256, generator=torch.Generator().manual_seed(0))
    soft = model.visual_tokenizer.probabilities(features)
    for function in ("st_argmax", "gumbel_argmax"):
        model.visual_tokenizer.function = function
        try:
            hard = model.visual_tokenizer.probabilities(features)
        finally:
            model.visual_tokenizer.function = "softmax"
        assert (hard.argmax(-1) == soft.argmax(-1)).all()
        assert (hard.sum(-1) == 1).all() and (hard.amax(-1) == 1).all()


def test_unknown_function_is_refused():
    model = reference("tiny-ovis2").model
    model.visual_tokenizer.function = "sparsemax"
    try:
        with pytest.raises(ValueError, match="sparsemax"):
            model.visual_tokenizer.probabilities(torch.zeros(1, 16, 256))
    finally:
        model.visual_tokenizer.function = "softmax"


def test_max_partition_below_one_is_refused():
    ref = reference("tiny-ovis2")
    with pytest.raises(ValueError, match="max_partition"):
        preprocess(golden.make_image("flat", 8, 8, 0), ref.rule, 0)
