# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Requests up to the engine's door, without weights: marks, kinds of input, refusals."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import vllm
from tests.models.ovis import golden
from vllm.config import ModelConfig
from vllm.exceptions import VLLMValidationError
from vllm.models.ovis.marks import chat_mark
from vllm.models.ovis.processor import OvisProcessor
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.processing import BaseMultiModalProcessor
from vllm.renderers.chat_utils import parse_chat_messages

FALLBACK_TEMPLATE = Path(vllm.__file__).parent.joinpath(
    "transformers_utils", "chat_templates", "template_ovis.jinja"
)
PICTURE = Image.new("RGB", (100, 80), (20, 120, 220))


@cache
def model_config(checkpoint: str) -> ModelConfig:
    return ModelConfig(
        golden.checkpoint_path(checkpoint),
        dtype="float32",
        max_model_len=8192,
        enable_mm_embeds=True,
        mm_processor_kwargs={"max_partition": 16},
    )


@cache
def engine_processor(checkpoint: str) -> BaseMultiModalProcessor:
    """The engine's processor, as its API process has it."""
    return MULTIMODAL_REGISTRY.create_processor(model_config(checkpoint))


@cache
def plain_processor(checkpoint: str) -> OvisProcessor:
    return OvisProcessor.from_pretrained(golden.checkpoint_path(checkpoint))


def process(
    checkpoint: str,
    prompt: str | list[int],
    data: Mapping[str, Any],
    **options: Any,
) -> Any:
    """What the engine gets of a prompt and its multi-modal data."""
    processor = engine_processor(checkpoint)
    return processor(
        prompt,
        processor.info.parse_mm_data(data),  # type: ignore[arg-type]
        hf_processor_mm_kwargs=options,
    )


def chat_prompt(
    checkpoint: str, messages: list[dict[str, Any]]
) -> tuple[str, Mapping[str, Any]]:
    """The text and data of a chat request, as the engine writes them."""
    conversation, data, _ = parse_chat_messages(
        messages,  # type: ignore[arg-type]
        model_config(checkpoint),
        content_format="string",
    )
    prompt = plain_processor(checkpoint).tokenizer.apply_chat_template(
        conversation,
        chat_template=FALLBACK_TEMPLATE.read_text(),
        tokenize=False,
        add_generation_prompt=True,
    )
    return prompt, data or {}


def image(picture: Image.Image = PICTURE) -> dict[str, Any]:
    return {"type": "image_pil", "image_pil": picture}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def slots(inputs: Any, modality: str = "image") -> list[tuple[int, int]]:
    return [(p.offset, p.length) for p in inputs["mm_placeholders"][modality]]


def expected_ids(checkpoint: str, written: str, pictures: list[Image.Image]) -> Any:
    """Ids of a text in which "\\0" stands for a picture and `<image>` for itself."""
    processor = plain_processor(checkpoint)
    pieces = [
        processor.tokenizer.encode(piece, add_special_tokens=False) if piece else []
        for piece in written.split("\0")
    ]
    ids = pieces[0]
    for piece, picture in zip(pieces[1:], pictures, strict=True):
        (one,) = processor(text="<image>", images=[picture])["input_ids"]
        ids = [*ids, *one, *piece]
    return ids


TYPED = ("<image>", "<video>", "{pad}", "<image>{pad}<image>", "<image:abc>")


@pytest.mark.parametrize("checkpoint", golden.CHECKPOINTS)
@pytest.mark.parametrize("typed", TYPED)
def test_typed_marks_stay_text_in_chat(checkpoint: str, typed: str) -> None:
    """Words of any role never take the place of an image, and stay as they are."""
    processor = plain_processor(checkpoint)
    typed = typed.format(pad=processor.tokenizer.decode([processor.image_pad_id]))
    messages = [
        {"role": "user", "content": [text(f"a {typed} b"), image(), text(typed)]},
        {"role": "assistant", "content": f"You wrote {typed}?"},
        {"role": "user", "content": [image(), text(f"Yes, {typed}!")]},
    ]
    prompt, data = chat_prompt(checkpoint, messages)
    inputs = process(checkpoint, prompt, data)
    written = prompt.replace(chat_mark("image"), "\0")
    assert written.count("\0") == 2 and written.count(typed) == 4
    assert inputs["prompt_token_ids"] == expected_ids(
        checkpoint, written, [PICTURE] * 2
    )
    before = written.split("\0")[0]
    first = len(processor.tokenizer.encode(before, add_special_tokens=False))
    (start, length), (other, _) = slots(inputs)
    assert start == first and other > start + length


def test_typed_marks_of_system_and_tool_stay_text() -> None:
    """System text and tool results are words too."""
    messages = [
        {"role": "system", "content": "Never write <image> or <|image_pad|>."},
        {"role": "user", "content": [image(), text("Look.")]},
        {"role": "tool", "tool_call_id": "1", "content": "<image> <|image_pad|>"},
    ]
    prompt, data = chat_prompt("tiny-ovis2", messages)
    inputs = process("tiny-ovis2", prompt, data)
    assert len(slots(inputs)) == 1
    written = prompt.replace(chat_mark("image"), "\0")
    assert inputs["prompt_token_ids"] == expected_ids("tiny-ovis2", written, [PICTURE])


def golden_cases() -> list[Any]:
    return [
        pytest.param(case, id=f"{case['checkpoint']}-{case['name']}")
        for case in golden.all_cases()
        if case["images"]
        and "input_ids" in case["expected"]
        # The difference on purpose: a typed pad token is one more mark here.
        and case["name"]
        not in (
            "text_with_special_tokens",
            "more_markers_than_images",
            "fewer_markers_than_images",
            "images_without_marker",
        )
        # Large pictures add time, not marks.
        and all(i["w"] * i["h"] < 10**6 for i in case["images"])
    ]


@pytest.mark.parametrize("case", golden_cases())
def test_golden_ids(case: dict[str, Any]) -> None:
    """Literal marks of a plain prompt give the authors' ids, with or without chat marks."""
    checkpoint, prompt = case["checkpoint"], case["expected"]["prompt"]
    pictures = [golden.authors_view(i) for i in golden.case_images(case)]
    options = {"max_partition": case["max_partition"]}
    plain = process(checkpoint, prompt, {"image": pictures}, **options)
    marked = process(
        checkpoint,
        prompt.replace("<image>", chat_mark("image")),
        {"image": pictures},
        **options,
    )
    expected = plain_processor(checkpoint)(text=prompt, images=pictures, **options)
    assert plain["prompt_token_ids"] == expected["input_ids"][0]
    assert marked["prompt_token_ids"] == expected["input_ids"][0]
    assert len(plain["prompt_token_ids"]) == case["expected"]["merged_length"]
    assert slots(plain) == slots(marked)


@pytest.mark.parametrize(
    "prompt, images, words",
    [
        ("<image> <|image_pad|>", 1, "2 image mark"),
        ("none", 1, "0 image mark"),
        (chat_mark("image") * 2, 1, "2 image mark"),
        ("<image>" + chat_mark("image"), 2, "1 image mark"),
        (chat_mark("video") + chat_mark("image"), 1, "1 video mark"),
    ],
)
def test_wrong_mark_counts_are_refused(prompt: str, images: int, words: str) -> None:
    with pytest.raises(VLLMValidationError, match=words):
        process("tiny-ovis2", prompt, {"image": [PICTURE] * images})
