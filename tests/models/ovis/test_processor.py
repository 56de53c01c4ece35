# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Processor outside the engine: golden prompts, ids and pixels, and refusals."""

import hashlib
import json
import shutil

import numpy as np
import pytest
from PIL import Image

from tests.models.ovis import golden
from vllm.models.ovis.images import normalization_table, normalize
from vllm.models.ovis.processor import (
    ImageSettings,
    OvisProcessor,
    resolve_image_pad_id,
    tokenize_with_markers,
    validate_image_kwargs,
)

ROLES = {"system": "system", "human": "user", "gpt": "assistant"}
# Where we differ on purpose; their pixels are tested in test_images.py.
OTHER_PIXELS = {"mode_RGBA", "mode_LA", "mode_PA", "mode_I_16"}
OTHER_PIXELS |= {"size_3x3", "size_1x3", "size_50x3"}


@pytest.fixture(scope="module")
def processors():
    return {
        name: OvisProcessor.from_pretrained(golden.checkpoint_path(name))
        for name in golden.CHECKPOINTS
    }


@pytest.fixture(scope="module")
def processor(processors):
    return processors["tiny-ovis2"]


def golden_cases(keep):
    for case in golden.all_cases():
        if keep(case):
            yield pytest.param(case, id=golden.case_id(case))


def messages_of(case):
    conversation = case["conversation"]
    if isinstance(conversation, str):
        conversation = [{"from": "human", "value": conversation}]
    messages = [
        {"role": ROLES[turn["from"]], "content": turn["value"]} for turn in conversation
    ]
    preface = case["generation_preface"]
    if preface:
        messages.append({"role": "assistant", "content": preface})
    return messages, bool(preface)


def prompt_of(processor, case):
    messages, preface = messages_of(case)
    return processor.apply_chat_template(
        messages,
        tokenize=False,
        add_generation_prompt=not preface,
        continue_final_message=preface,
    )


@pytest.mark.parametrize(
    "case", list(golden_cases(lambda case: "prompt" in case["expected"]))
)
def test_golden_prompt_and_pieces(processors, case):
    processor = processors[case["checkpoint"]]
    prompt = prompt_of(processor, case)
    assert prompt == case["expected"]["prompt"]
    first, *others = tokenize_with_markers(processor.tokenizer, prompt)
    with_markers = first + [i for piece in others for i in [-200, *piece]]
    assert with_markers == case["expected"]["prompt_input_ids_with_image_marker"]


def fits(case):
    """Whether the reference answered and pictures are as many as markers."""
    expected = case["expected"]
    if "input_ids" not in expected:
        return False
    markers = expected["prompt_input_ids_with_image_marker"].count(-200)
    # Once is enough for the largest picture; test_images.py has its pixels.
    return markers == len(case["images"]) and case["name"] != "size_4032x3024"


@pytest.mark.parametrize("case", list(golden_cases(fits)))
def test_golden_ids_and_pixels(processors, case):
    processor, expected = processors[case["checkpoint"]], case["expected"]
    output = processor(
        text=[prompt_of(processor, case)],
        images=golden.case_images(case),
        max_partition=case["max_partition"],
    )
    pad, per_tile = processor.image_pad_id, processor.tokens_per_tile
    expanded = []
    for token in expected["input_ids"]:
        repeat = per_tile if token == -300 else 1
        expanded += [pad if token < 0 else token] * repeat
    assert output["input_ids"] == [expanded]
    assert len(expanded) == expected["untruncated_length"]
    if not case["images"]:
        assert set(output) == {"input_ids"}
        return
    assert output["grids"].tolist() == [image["grid"] for image in expected["images"]]
    assert output["pixel_values"].dtype == np.uint8
    assert len(output["pixel_values"]) == expected["total_tiles"]
    if case["name"] not in OTHER_PIXELS:
        settings = processor.image_settings
        table = normalization_table(settings.mean, settings.std)
        pixels = normalize(output["pixel_values"], output["rectangles"], table)
        digest = hashlib.sha256(pixels.astype("<f4").tobytes()).hexdigest()
        assert digest == expected["pixel_values"]["sha256"]


@pytest.mark.parametrize(
    "case",
    list(golden_cases(lambda case: "height and width" in str(case["expected"]))),
)
def test_golden_thin_pictures_are_refused(processors, case):
    processor = processors[case["checkpoint"]]
    with pytest.raises(ValueError, match="too thin"):
        processor(prompt_of(processor, case), golden.case_images(case))


@pytest.mark.parametrize(
    ("name", "markers", "images"),
    [
        ("more_markers_than_images", 2, 1),
        ("fewer_markers_than_images", 1, 2),
        ("images_without_marker", 0, 1),
    ],
)
def test_golden_wrong_counts_are_refused(processor, name, markers, images):
    (case,) = golden_cases(
        lambda case: (case["checkpoint"], case["name"]) == ("tiny-ovis2", name)
    )
    (case,) = case.values
    message = f"{markers} <image> markers, but {images} images"
    with pytest.raises(ValueError, match=message):
        processor(prompt_of(processor, case), golden.case_images(case))


def test_gemma_has_no_system_turn(processors):
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]
    with pytest.raises(ValueError, match="no turns of role 'system'.*user, assistant"):
        processors["tiny-ovis1.6-gemma2"].apply_chat_template(messages)


@pytest.mark.parametrize("checkpoint", golden.CHECKPOINTS)
def test_preface_of_white_space(processors, checkpoint):
    """Kept by Qwen, stripped by the others (NOTES.md, Oddities)."""
    processor = processors[checkpoint]
    messages = [{"role": "user", "content": "Hi"}]
    opened = processor.apply_chat_template(messages, add_generation_prompt=True)
    messages.append({"role": "assistant", "content": "  "})
    prefaced = processor.apply_chat_template(messages, continue_final_message=True)
    assert prefaced == opened + ("  " if checkpoint == "tiny-ovis2" else "")


def test_parts_of_content(processor):
    parts = [
        {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
        {"type": "image"},
        {"type": "text", "text": "Compare."},
    ]
    plain = "<image>\n<image>\nCompare."
    texts = [
        processor.apply_chat_template([{"role": "user", "content": content}])
        for content in (parts, plain)
    ]
    assert texts[0] == texts[1]
    assert texts[0].endswith("<|im_start|>user\n" + plain + "<|im_end|>\n")


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        ([], {}, "at least one message"),
        ([{"role": "tool", "content": "x"}], {}, "no turns of role 'tool'"),
        ([{"role": "user", "content": None}], {}, "text or a list of parts, got None"),
        ([{"role": "user", "content": [{"type": "audio"}]}], {}, "got .*audio"),
        ([{"role": "user", "content": ["x"]}], {}, "got 'x'"),
        ([{"role": "user", "content": "x"}], {"tokenize": True}, "tokenize must be"),
        (
            [{"role": "user", "content": "x"}],
            {"add_generation_prompt": True, "continue_final_message": True},
            "exclude each other",
        ),
    ],
)
def test_bad_conversations_are_refused(processor, messages, options, message):
    with pytest.raises(ValueError, match=message):
        processor.apply_chat_template(messages, **options)


def test_forms_of_text_and_images(processor):
    small, wide = Image.new("RGB", (50, 50), "red"), Image.new("RGB", (300, 100))
    texts = ["<image>a", "b", "<image><image>c"]
    nested = processor(texts, [[small], [], [wide, small]])
    flat = processor(texts, [small, wide, small], return_tensors=None)
    assert nested["input_ids"] == flat["input_ids"]
    assert np.array_equal(nested["pixel_values"], flat["pixel_values"])
    assert nested["grids"].tolist() == [[1, 1], [1, 3], [1, 1]]
    single = processor("<image>a", small)
    assert single["input_ids"] == nested["input_ids"][:1]
    assert processor("<image>a", np.asarray(small))["input_ids"] == single["input_ids"]


def test_tensors(processor):
    output = processor("<image>a", Image.new("RGB", (50, 50)), return_tensors="pt")
    assert output["pixel_values"].shape == (1, 112, 112, 3)
    assert str(output["pixel_values"].dtype) == "torch.uint8"
    assert output["input_ids"].shape[0] == 1


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ([[Image.new("RGB", (5, 5))], Image.new("RGB", (5, 5))], "all lists"),
        ([[Image.new("RGB", (5, 5))]], "2 prompts but 1 lists"),
        ([[], [Image.new("RGB", (5, 5))]], "prompt 0 has 1 <image> .* but 0 images"),
        (None, "the text has 1 <image> markers, but 0 images"),
    ],
)
def test_images_that_do_not_fit_the_texts(processor, images, message):
    with pytest.raises(ValueError, match=message):
        processor(["<image>a", "b"], images)


@pytest.mark.parametrize(
    ("kwargs", "limit", "expected"),
    [
        ({}, None, (9, 0.9)),
        ({"max_partition": 12}, 12, (12, 0.9)),
        ({"max_partition": 100000}, None, (100000, 0.9)),
        ({"covering_threshold": 0}, 9, (9, 0.0)),
        ({"covering_threshold": 1, "max_partition": 1}, 9, (1, 1.0)),
        ({"max_partition": np.int64(4)}, 9, (4, 0.9)),
    ],
)
def test_image_kwargs(kwargs, limit, expected):
    result = validate_image_kwargs(kwargs, limit)
    assert result == expected
    assert [type(value) for value in result] == [int, float]


@pytest.mark.parametrize(
    ("kwargs", "limit", "message"),
    [
        ({"max_partition": 0}, None, "max_partition .* at least 1, got 0"),
        ({"max_partition": 13}, 12, "max_partition .* from 1 to 12, got 13"),
        ({}, 4, "max_partition .* from 1 to 4, got 9"),
        ({"max_partition": True}, 12, "max_partition .* got True"),
        ({"max_partition": "9"}, 12, "max_partition .* got '9'"),
        ({"max_partition": 9.0}, 12, "max_partition .* got 9.0"),
        ({"max_partition": None}, 12, "max_partition .* got None"),
        ({"covering_threshold": 1.1}, 12, "covering_threshold .* 0 to 1, got 1.1"),
        ({"covering_threshold": -0.1}, 12, "covering_threshold .* got -0.1"),
        ({"covering_threshold": False}, 12, "covering_threshold .* got False"),
        ({"covering_threshold": "0.9"}, 12, "covering_threshold .* got '0.9'"),
        ({"covering_threshold": float("nan")}, 12, "covering_threshold .* got nan"),
        ({"min_pixels": 4}, 12, "'min_pixels' .*4.* known: max_partition"),
    ],
)
def test_bad_image_kwargs_are_refused(kwargs, limit, message):
    with pytest.raises(ValueError, match=message):
        validate_image_kwargs(kwargs, limit)


def test_options_of_a_call_are_checked(processor):
    with pytest.raises(ValueError, match="max_partition .* got 0"):
        processor("<image>", Image.new("RGB", (5, 5)), max_partition=0)


CLIP = {
    "crop_size": {"height": 448, "width": 448},
    "size": {"shortest_edge": 448},
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "resample": 3,
    "rescale_factor": 0.00392156862745098,
}
SIGLIP = {
    "size": {"height": 384, "width": 384},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def test_image_settings_of_both_types():
    clip = ImageSettings.from_preprocessor_config(CLIP)
    assert clip == ImageSettings(
        448, tuple(CLIP["image_mean"]), tuple(CLIP["image_std"])
    )
    siglip = ImageSettings.from_preprocessor_config(SIGLIP | {"crop_size": None})
    assert siglip == ImageSettings(384, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    assert ImageSettings.from_preprocessor_config(CLIP | {"crop_size": 448}) == clip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"crop_size": {"height": 448, "width": 336}}, "square .*448 and width 336"),
        ({"crop_size": None}, "height and width, got size {'shortest_edge': 448}"),
        ({"crop_size": None, "size": None}, "height and width, got size None"),
        ({"crop_size": {"height": 0, "width": 0}}, "square tile of at least 1"),
        ({"image_mean": None}, "image_mean as three numbers, got None"),
        ({"image_std": [0.5]}, r"image_std as three numbers, got \[0.5\]"),
        ({"resample": 2}, "must have resample 3, got 2"),
        ({"do_normalize": False}, "must have do_normalize True, got False"),
        ({"do_rescale": False}, "must have do_rescale True, got False"),
        ({"rescale_factor": 1 / 127.5}, "rescale_factor 1/255, got 0.0078"),
    ],
)
def test_bad_preprocessor_configs_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        ImageSettings.from_preprocessor_config(CLIP | change)


@pytest.mark.parametrize("checkpoint", golden.CHECKPOINTS)
def test_image_pad_is_looked_up(processors, checkpoint):
    path = golden.GOLDEN / "checkpoints" / checkpoint / "tokenizer.json"
    added = {
        token["content"]: token["id"]
        for token in json.loads(path.read_text())["added_tokens"]
    }
    names = ["<|image_pad|>", "<unused0>", "<|reserved_special_token_0|>"]
    name = dict(zip(golden.CHECKPOINTS, names))[checkpoint]
    assert processors[checkpoint].image_pad_id == added[name]


def test_tokenizer_without_image_pad_is_refused(processors):
    gemma = processors["tiny-ovis1.6-gemma2"].tokenizer
    with pytest.raises(ValueError, match=r"no token '<\|image_pad\|>'.* type qwen2"):
        resolve_image_pad_id(gemma, "qwen2")
    with pytest.raises(
        ValueError, match="unknown text model type 'bert', known: qwen2"
    ):
        resolve_image_pad_id(gemma, "bert")


def test_other_checkpoints_are_refused(tmp_path):
    source = golden.GOLDEN / "checkpoints" / "tiny-ovis2"
    shutil.copy(source / "preprocessor_config.json", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    with pytest.raises(ValueError, match="checkpoint: it has no 'visual_tok"):
        OvisProcessor.from_pretrained(str(tmp_path))
    (tmp_path / "config.json").unlink()
    with pytest.raises(OSError, match="has no file config.json"):
        OvisProcessor.from_pretrained(str(tmp_path))
