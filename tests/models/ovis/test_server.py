# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""`vllm serve` over HTTP: golden answers, refusals, and the request after them."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from PIL import Image

from tests.models.ovis import golden
from tests.models.ovis.server import (
    chat,
    image_part,
    serve,
    text_part,
    user_message,
)

CHECKPOINT = "tiny-ovis2"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serve(
        golden.checkpoint_path(CHECKPOINT),
        *("--dtype", "float32"),
        *("--mm-processor-kwargs", '{"max_partition": 16}'),
        *("--limit-mm-per-prompt", '{"image": 8}'),
    ) as address:
        yield address


def cases(*names: str) -> list[dict[str, Any]]:
    by_name = {case["name"]: case for case in golden.array_cases(CHECKPOINT)}
    return [by_name[name] for name in names]


def as_messages(case: dict[str, Any]) -> list[dict[str, Any]]:
    """The chat request that a case's single human turn stands for.

    Markers of the golden text become image parts; a line break beside a marker is the
    server's own between parts.
    """
    assert isinstance(case["conversation"], str)
    pictures = iter(golden.case_images(case))
    parts: list[dict[str, Any]] = []
    for index, piece in enumerate(case["conversation"].split("<image>")):
        if index:
            parts.append(image_part(golden.authors_view(next(pictures))))
        if text := piece.removeprefix("\n").removesuffix("\n"):
            parts.append(text_part(text))
    return user_message(*parts)


def expected_greedy(case: dict[str, Any]) -> list[int]:
    return golden.arrays()[f"{CHECKPOINT}/{case['name']}/greedy"].tolist()


SERVED = (
    "size_112x112",
    "size_640x480",
    "size_3x50",
    "mode_L",
    "two_different_grids",
    "two_equal_size",
    "max_partition_16_wide",
    "no_image",
)


def ask(url: str, case: dict[str, Any], **options: Any) -> httpx.Response:
    return chat(
        url,
        as_messages(case),
        ignore_eos=True,
        mm_processor_kwargs={"max_partition": case["max_partition"]},
        **options,
    )


@pytest.mark.parametrize("name", SERVED)
def test_golden_answers(url: str, name: str) -> None:
    """The authors' prompt, ids and greedy tokens through the chat endpoint."""
    (case,) = cases(name)
    response = ask(url, case)
    assert response.status_code == 200, response.text
    body = response.json()
    assert len(body["prompt_token_ids"]) == case["expected"]["merged_length"]
    assert body["choices"][0]["token_ids"] == expected_greedy(case)


def test_concurrent_answers_equal_serial_ones(url: str) -> None:
    """Every case four times at once: mixed grids, counts and text-only."""
    batch = cases(*SERVED) * 4
    with ThreadPoolExecutor(len(batch)) as pool:
        responses = list(pool.map(lambda case: ask(url, case), batch))
    for case, response in zip(batch, responses, strict=True):
        assert response.status_code == 200, response.text
        token_ids = response.json()["choices"][0]["token_ids"]
        assert token_ids == expected_greedy(case), case["name"]


def test_streamed_answer_is_the_same(url: str) -> None:
    (case,) = cases("two_different_grids")
    whole = ask(url, case).json()["choices"][0]["message"]["content"]
    streamed = ask(url, case, stream=True).text
    pieces = [
        httpx.Response(200, text=line.removeprefix("data: ")).json()
        for line in streamed.splitlines()
        if line.startswith("data: {")
    ]
    deltas = [piece["choices"][0]["delta"].get("content") for piece in pieces]
    assert "".join(filter(None, deltas)) == whole


def test_images_may_stand_anywhere_in_the_message(url: str) -> None:
    """An image keeps its place among the texts of a message."""
    picture = Image.new("RGB", (112, 112), (200, 30, 30))
    orders = (
        (image_part(picture), text_part("What is this?")),
        (text_part("What is this?"), image_part(picture)),
    )
    prompts = [
        chat(url, user_message(*order)).json()["prompt_token_ids"] for order in orders
    ]
    assert sorted(prompts[0]) == sorted(prompts[1])
    assert prompts[0] != prompts[1]


PICTURE = Image.new("RGB", (300, 200), (20, 120, 220))


@pytest.mark.parametrize(
    "messages, options, words",
    [
        pytest.param(
            user_message(image_part(PICTURE), text_part("What?")),
            {"mm_processor_kwargs": {"max_partition": value}},
            ("max_partition", str(value), "16"),
            id=f"max_partition {value!r}",
        )
        for value in (0, -1, "nine", 10000, 2.5, True)
    ]
    + [
        pytest.param(
            user_message(image_part(PICTURE), text_part("What?")),
            {"mm_processor_kwargs": {"max_partitions": 4}},
            ("max_partitions", "max_partition"),
            id="misspelt option",
        ),
        pytest.param(
            user_message(image_part(PICTURE), text_part("What?")),
            {
                "mm_processor_kwargs": {
                    "max_partition": 2,
                    "images_kwargs": {"max_partition": 3},
                }
            },
            ("given twice", "2", "3"),
            id="an option twice",
        ),
        pytest.param(
            user_message(image_part(Image.new("RGB", (1000, 1))), text_part("What?")),
            {},
            ("1000", "1"),
            id="too thin",
        ),
        pytest.param(
            user_message(*[image_part(PICTURE)] * 9, text_part("What?")),
            {},
            ("At most 8 image",),
            id="too many images",
        ),
    ],
)
def test_client_mistakes_are_told(
    url: str, messages: Any, options: dict[str, Any], words: tuple[str, ...]
) -> None:
    """A 400 that names what was wrong, and the server goes on."""
    response = chat(url, messages, **options)
    assert response.status_code == 400, response.text
    message = response.json()["error"]["message"]
    for word in words:
        assert word in message
    assert "Traceback" not in response.text
    (case,) = cases("size_112x112")
    answer = ask(url, case)
    assert answer.json()["choices"][0]["token_ids"] == expected_greedy(case)


def test_scoped_image_options(url: str) -> None:
    """Options under `images_kwargs` count as the flat ones do."""
    message = user_message(image_part(PICTURE), text_part("What?"))
    lengths = [
        len(chat(url, message, mm_processor_kwargs=k).json()["prompt_token_ids"])
        for k in (
            {"max_partition": 1},
            {"images_kwargs": {"max_partition": 1}},
            {"max_partition": 16},
            {},
        )
    ]
    assert lengths[0] == lengths[1] < lengths[2] == lengths[3]


@pytest.mark.parametrize("typed", ["<image>", "<video>", "<|image_pad|>"])
def test_typed_marks_stay_text(url: str, typed: str) -> None:
    """In text, history and tool results they take no image's place."""
    plain, marked = (
        chat(
            url,
            [
                {"role": "system", "content": f"Be brief.{words}"},
                *user_message(text_part(f"See{words}"), image_part(PICTURE)),
                {"role": "assistant", "content": f"Seen{words}"},
                {"role": "tool", "tool_call_id": "1", "content": f"Result{words}"},
                *user_message(image_part(PICTURE), text_part(f"Again{words}")),
            ],
        )
        for words in ("", f" {typed}")
    )
    assert marked.status_code == 200, marked.text
    pad = 697
    ids = [answer.json()["prompt_token_ids"] for answer in (plain, marked)]
    typed_pads = 5 if typed == "<|image_pad|>" else 0
    assert ids[1].count(pad) == ids[0].count(pad) + typed_pads
    assert len(ids[1]) > len(ids[0])
