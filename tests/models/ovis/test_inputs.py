# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Requests up to the engine, without weights: marks, kinds of input, refusals."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
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
    """Literal marks and chat marks give the authors' ids."""
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


@pytest.mark.parametrize("checkpoint", golden.CHECKPOINTS)
def test_video_has_the_ids_of_its_frames(checkpoint: str) -> None:
    """Golden case video_4_frames, as frames and as an array, plain and in chat."""
    (case,) = (
        c
        for c in golden.all_cases()
        if c["checkpoint"] == checkpoint and c["name"] == "video_4_frames"
    )
    frames = golden.case_images(case)
    prompt = case["expected"]["prompt"]
    expected = plain_processor(checkpoint)(text=prompt, images=frames, max_partition=1)
    for mark in ("<video>", chat_mark("video")):
        written = prompt.replace("\n".join(["<image>"] * 4), mark)
        videos: list[Any] = [frames, np.stack(frames), [np.stack(frames)]]
        for video in videos:
            inputs = process(checkpoint, written, {"video": video})
            assert inputs["prompt_token_ids"] == expected["input_ids"][0]
            item = inputs["mm_kwargs"]["video"][0]
            pixels = item["video_pixels"].data
            assert torch.equal(pixels, torch.from_numpy(expected["pixel_values"]))
            (place,) = inputs["mm_placeholders"]["video"]
            pad = plain_processor(checkpoint).image_pad_id
            assert place.get_num_embeds() == inputs["prompt_token_ids"].count(pad)


def test_images_and_videos_keep_their_order() -> None:
    """Of a mixed prompt, each item has its own place and count."""
    tokens = engine_processor("tiny-ovis2").info.tokens_per_frame
    inputs = process(
        "tiny-ovis2",
        "a <video> b <image> c <video> d",
        {"image": PICTURE, "video": [[PICTURE] * 2, [PICTURE] * 3]},
    )
    places = inputs["mm_placeholders"]
    first, second = places["video"]
    (single,) = places["image"]
    assert first.offset < single.offset < second.offset
    assert [first.get_num_embeds(), second.get_num_embeds()] == [2 * tokens, 3 * tokens]


@pytest.mark.parametrize(
    "video, words",
    [
        ([PICTURE] * 9, "1 to 8 frames.*num_frames.*got 9"),
        (np.zeros((0, 8, 8, 3), np.uint8), "got 0"),
        (np.zeros((2, 8, 8, 5), np.uint8), "uint8 .8, 8, 5."),
        (np.zeros((2, 8, 8, 3), np.float32), "float32"),
        (["frame.png"], "list of frames"),
    ],
)
def test_videos_that_are_refused(video: Any, words: str) -> None:
    with pytest.raises(VLLMValidationError, match=words):
        process("tiny-ovis2", "<video>", {"video": video})


def test_frames_that_are_grey_or_transparent() -> None:
    """Frame arrays become RGB by the rules of pictures."""
    grey = np.full((2, 40, 60), 90, np.uint8)
    clear = np.dstack([grey[0]] * 3 + [np.zeros_like(grey[0])])
    pixels = [
        process("tiny-ovis2", "<video>", {"video": frames})["mm_kwargs"]["video"][0][
            "video_pixels"
        ].data
        for frames in (
            grey,
            np.stack([grey] * 3, -1),
            np.stack([clear] * 2),
            np.full((2, 40, 60, 3), 255, np.uint8),
        )
    ]
    assert torch.equal(pixels[0], pixels[1])
    assert torch.equal(pixels[2], pixels[3])


SIDE, TOKENS, HIDDEN = 112, 16, 128


def tiles(count: int = 3, grid: Any = (1, 2), **extra: Any) -> dict[str, Any]:
    return {
        "pixel_values": np.zeros((count, SIDE, SIDE, 3), np.uint8),
        "grid": grid,
        **extra,
    }


@pytest.mark.parametrize(
    "given, words",
    [
        (tiles(grid=(2, 2)), r"\[5, 112, 112, 3\].*got uint8 \[3,"),
        (tiles(grid=(4, 5)), "1 to 16 cells"),
        (tiles(grid=(0, 1)), "1 to 16 cells"),
        (tiles(grid=2), "1 to 16 cells"),
        (tiles(pixel_values=np.zeros((3, 3, SIDE, SIDE), np.uint8)), "got uint8"),
        (tiles(pixel_values=np.zeros((3, SIDE, SIDE, 3), np.int64)), "got int64"),
        (tiles(pixel_values=None), "got object"),
        (
            tiles(pixel_values=torch.full((3, 3, SIDE, SIDE), torch.nan)),
            "NaN",
        ),
        (tiles(rectangles=np.zeros((3, 4), np.int32)), "top, left, height, width"),
        (tiles(rectangles=np.full((3, 4), 100)), "inside a tile of 112"),
        (tiles(rectangles=np.ones((2, 4), np.int32)), r"\[3, 4\]"),
        (
            tiles(
                pixel_values=np.zeros((3, 3, SIDE, SIDE), np.float32),
                rectangles=np.ones((3, 4), np.int32),
            ),
            "go with uint8",
        ),
        (tiles(mask=1), "got .*mask"),
        ({"pixel_values": 1}, "got .'pixel_values'."),
        ("picture.png", "str"),
        ([PICTURE, 7], "int"),
        (
            [PICTURE, tiles(pixel_values=np.zeros((3, 3, SIDE, SIDE), np.float32))],
            "mixed",
        ),
    ],
)
def test_ready_tiles_that_are_refused(given: Any, words: str) -> None:
    with pytest.raises(VLLMValidationError, match=words):
        process("tiny-ovis2", "<image>" * 2, {"image": given})


def test_ready_tiles_beside_pictures() -> None:
    """8-bit tiles and pictures share a request; the place is as long as the grid."""
    inputs = process("tiny-ovis2", "<image> <image>", {"image": [tiles(), PICTURE]})
    (_, length), (_, other) = slots(inputs)
    assert (length, other) == (3 * TOKENS + 4, TOKENS + 3)
    rectangles = inputs["mm_kwargs"]["image"][0]["rectangles"].data
    assert rectangles.tolist() == [[0, 0, SIDE, SIDE]] * 3


@pytest.mark.parametrize(
    "given, words",
    [
        (torch.zeros(1, TOKENS + 3, HIDDEN + 1), rf"\[tokens, {HIDDEN}\]"),
        (torch.zeros(1, TOKENS, HIDDEN), "16 rows; .* 19, 52"),
        (torch.zeros(1, TOKENS + 3, HIDDEN, dtype=torch.int64), "int64"),
        (torch.full((1, TOKENS + 3, HIDDEN), torch.nan), "NaN"),
        (torch.full((TOKENS + 3, HIDDEN), torch.inf), "NaN or infinity"),
        ([torch.zeros(TOKENS + 3)], rf"got torch.float32 \[{TOKENS + 3}\]"),
        ([PICTURE, torch.zeros(TOKENS + 3, HIDDEN)], "got Image"),
        (torch.zeros(2, TOKENS + 3, HIDDEN), "1 image mark"),
        (
            {
                "image_embeds": torch.zeros(1, TOKENS + 3, HIDDEN),
                "grids": torch.tensor([[1, 2]]),
            },
            r"must have \[52\] rows, got \[19\]",
        ),
        ({"grids": torch.tensor([[1, 2]])}, "image_embeds"),
    ],
)
def test_embeddings_that_are_refused(given: Any, words: str) -> None:
    with pytest.raises(VLLMValidationError, match=words):
        process("tiny-ovis2", "<image>", {"image": given})


@pytest.mark.parametrize(
    "given",
    [
        torch.zeros(TOKENS + 3, HIDDEN),
        torch.zeros(1, TOKENS + 3, HIDDEN, dtype=torch.bfloat16),
        [torch.zeros(TOKENS + 3, HIDDEN)],
        {"image_embeds": torch.zeros(1, TOKENS + 3, HIDDEN)},
        {
            "image_embeds": [torch.zeros(TOKENS + 3, HIDDEN)],
            "grids": torch.tensor([[1, 1]]),
        },
    ],
)
def test_forms_of_embeddings(given: Any) -> None:
    inputs = process("tiny-ovis2", "<image>", {"image": given})
    assert slots(inputs) == [(0, TOKENS + 3)]
    embeds = inputs["mm_kwargs"]["image"][0]["image_embeds"].data
    assert (embeds.dtype, embeds.shape) == (torch.float32, (TOKENS + 3, HIDDEN))


def test_max_partition_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable that another server reads is told to have no effect, once."""
    from vllm.models.ovis import environment

    told = []
    monkeypatch.setattr(
        environment.logger, "warning_once", lambda text, *a: told.append(text % a)
    )
    monkeypatch.delenv("MAX_PARTITION", raising=False)
    environment.warn_about_environment()
    assert not told
    monkeypatch.setenv("MAX_PARTITION", "4")
    model_config.__wrapped__("tiny-ovis2")  # What a start does.
    (message,) = told
    assert "MAX_PARTITION (4) has no effect" in message
    limits = engine_processor("tiny-ovis2").info
    assert limits.get_image_kwargs({}) == (16, 0.9)


@pytest.mark.parametrize("modality", ["image", "video"])
def test_the_profile_has_the_largest_item(modality: str) -> None:
    """What memory is planned for at the start has the most tokens that are allowed."""
    processor = engine_processor("tiny-ovis2")
    counts = {modality: 1}
    data = processor.dummy_inputs.get_dummy_mm_data(8192, counts, {})
    prompt = processor.dummy_inputs.get_dummy_text(counts)
    inputs = process(
        "tiny-ovis2", prompt, {key: value for key, value in data.items() if value}
    )
    (place,) = inputs["mm_placeholders"][modality]
    most = processor.info.get_mm_max_tokens_per_item(8192, counts)[modality]
    assert place.get_num_embeds() == most
    # 4 x 4 cells and an overview of 16 tokens each; 8 frames of one tile.
    assert most == {"image": 17 * 16 + 18, "video": 8 * 19}[modality]


@pytest.mark.parametrize("threshold", [0.3, 1.0])
def test_the_profile_is_the_largest_for_any_threshold(threshold: float) -> None:
    """A request may set another threshold than the engine, and have more tiles."""
    config = ModelConfig(
        golden.checkpoint_path("tiny-ovis2"),
        dtype="float32",
        max_model_len=8192,
        mm_processor_kwargs={"images_kwargs": {"covering_threshold": threshold}},
    )
    processor: Any = MULTIMODAL_REGISTRY.create_processor(config)
    inputs = processor.get_dummy_mm_inputs({"image": 1})
    (place,) = inputs["mm_placeholders"]["image"]
    most = processor.info.get_mm_max_tokens_per_item(8192, {"image": 1})["image"]
    assert place.get_num_embeds() == most


def test_a_device_of_the_processor_changes_nothing() -> None:
    """The engine may set one by itself; a request may not."""
    config = ModelConfig(
        golden.checkpoint_path("tiny-ovis2"),
        dtype="float32",
        mm_processor_kwargs={"max_partition": 4},
        mm_processor_device="cpu",
    )
    info: Any = MULTIMODAL_REGISTRY.create_processor(config).info
    assert info.get_image_kwargs({"max_partition": 2, "device": "cpu"}) == (2, 0.9)
    with pytest.raises(VLLMValidationError, match="unknown image option 'device'"):
        info.get_image_kwargs({"device": "cuda"})


def test_pruning_of_videos_is_refused() -> None:
    """The engine would drop the option in silence."""
    with pytest.raises(ValueError, match="--video-pruning-rate"):
        ModelConfig(golden.checkpoint_path("tiny-ovis2"), video_pruning_rate=0.5)


def test_language_model_only() -> None:
    """Images and videos are refused, and no tokens are set aside for them."""
    config = ModelConfig(
        golden.checkpoint_path("tiny-ovis2"), dtype="float32", language_model_only=True
    )
    info = MULTIMODAL_REGISTRY.create_processor(config).info
    assert info.allowed_mm_limits == {"image": 0, "video": 0}
    for data in ({"image": PICTURE}, {"video": [PICTURE]}):
        with pytest.raises(VLLMValidationError, match="At most 0"):
            info.parse_mm_data(data)


def test_options_are_checked_beside_embeddings() -> None:
    """An option that nothing would read is still refused if it is wrong."""
    with pytest.raises(VLLMValidationError, match="max_partition"):
        process(
            "tiny-ovis2",
            "<image>",
            {"image": torch.zeros(TOKENS + 3, HIDDEN)},
            max_partition=99,
        )
