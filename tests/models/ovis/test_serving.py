# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Serving features over HTTP, on one server that reads pictures in pieces."""

import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.models.ovis import golden
from tests.models.ovis.fuzz import fuzzed_request
from tests.models.ovis.pictures import mixed_requests, picture
from tests.models.ovis.server import (
    chat,
    image_part,
    serve,
    text_part,
    user_message,
)

CHECKPOINT = "tiny-ovis2"
FUZZED_REQUESTS = 150
SECONDS_TO_STOP = 60


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serve(
        golden.checkpoint_path(CHECKPOINT),
        *("--dtype", "float32", "--served-model-name", CHECKPOINT),
        *("--mm-processor-kwargs", '{"max_partition": 16}'),
        *("--limit-mm-per-prompt", '{"image": 4}'),
        *("--max-num-batched-tokens", "128"),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        "--enable-prompt-tokens-details",
        # A model that was never trained would fill its answers with white space.
        *("--structured-outputs-config.backend", "xgrammar"),
        "--structured-outputs-config.disable_any_whitespace=true",
    ) as address:
        yield address


def metric(url: str, name: str) -> float:
    """Sum of a metric over its labels."""
    lines = httpx.get(f"{url}/metrics", timeout=30).text.splitlines()
    return sum(float(x.rsplit(" ", 1)[1]) for x in lines if x.startswith(name + "{"))


def test_64_concurrent_answers_equal_serial_ones(url: str) -> None:
    """0 to 4 pictures each, every budget, all at once."""
    requests = [
        (
            user_message(*map(image_part, pictures), text_part("What do you see?")),
            {"mm_processor_kwargs": {"max_partition": budget}} if pictures else {},
        )
        for pictures, budget in mixed_requests(16, seed=2)
    ]

    def tokens(request: tuple[Any, dict[str, Any]]) -> list[int]:
        messages, options = request
        response = chat(url, messages, max_tokens=12, ignore_eos=True, **options)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["token_ids"]

    serial = [tokens(request) for request in requests]
    with ThreadPoolExecutor(64) as pool:
        assert list(pool.map(tokens, requests * 4)) == serial * 4


COLOURS = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green", "blue"]}},
    "required": ["colour"],
    "additionalProperties": False,
}


def test_structured_output(url: str) -> None:
    """An answer about a picture in the shape of a JSON schema."""
    response = chat(
        url,
        user_message(image_part(picture(1)), text_part("Which colour?")),
        max_tokens=60,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "colours", "schema": COLOURS, "strict": True},
        },
    )
    assert response.status_code == 200, response.text
    answer = json.loads(response.json()["choices"][0]["message"]["content"])
    assert answer["colour"] in ("red", "green", "blue")


TOOL = {
    "type": "function",
    "function": {"name": "paint", "parameters": COLOURS, "strict": True},
}


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "paint"}}]
)
def test_tool_call(url: str, choice: Any) -> None:
    """A demanded call has the tool's name and arguments of its schema."""
    response = chat(
        url,
        user_message(image_part(picture(1)), text_part("Paint it.")),
        max_tokens=100,
        tools=[TOOL],
        tool_choice=choice,
    )
    assert response.status_code == 200, response.text
    (call,) = response.json()["choices"][0]["message"]["tool_calls"][:1]
    assert call["function"]["name"] == "paint"
    arguments = json.loads(call["function"]["arguments"])
    assert arguments["colour"] in ("red", "green", "blue")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_call_that_the_model_decides_on(url: str, stream: bool) -> None:
    """The parser finds a call in the model's words, here the only words allowed."""
    words = '{"name": "paint", "arguments": {"colour": "green"}}'
    response = chat(
        url,
        user_message(image_part(picture(1)), text_part("Paint it.")),
        max_tokens=200,
        tools=[TOOL],
        tool_choice="auto",
        structured_outputs={"choice": [f"<tool_call>\n{words}\n</tool_call>"]},
        stream=stream,
    )
    assert response.status_code == 200, response.text
    if stream:
        events = [
            json.loads(line.removeprefix("data: "))["choices"][0]["delta"]
            for line in response.text.splitlines()
            if line.startswith("data: {")
        ]
        parts = [part["function"] for e in events for part in e.get("tool_calls") or ()]
        name = "".join(part.get("name") or "" for part in parts)
        arguments = "".join(part.get("arguments") or "" for part in parts)
    else:
        (choice,) = response.json()["choices"]
        assert choice["finish_reason"] == "tool_calls"
        (call,) = choice["message"]["tool_calls"]
        name, arguments = call["function"]["name"], call["function"]["arguments"]
    assert name == "paint"
    assert json.loads(arguments) == {"colour": "green"}


def test_tool_result_in_the_history(url: str) -> None:
    """A turn after a tool's result is answered; its text takes no picture's place."""
    call = {
        "id": "call-1",
        "type": "function",
        "function": {"name": "paint", "arguments": '{"colour": "red"}'},
    }
    messages = [
        *user_message(image_part(picture(1)), text_part("Paint it.")),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call-1", "content": "painted"},
    ]
    response = chat(url, messages, tools=[TOOL], tool_choice="none")
    assert response.status_code == 200, response.text


def test_prefix_cache_tells_pictures_apart(url: str) -> None:
    """The same picture is remembered; one that differs in a pixel is another."""
    first = picture(7).resize((448, 448))
    other = first.copy()
    first.putpixel((0, 0), (10, 20, 30))
    other.putpixel((0, 0), (11, 20, 30))

    def cached_tokens(image: Any) -> int:
        usage = chat(
            url, user_message(image_part(image), text_part("What do you see?"))
        ).json()["usage"]
        assert usage["prompt_tokens"] > 256
        return (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0

    assert cached_tokens(first) == 0
    assert cached_tokens(first) > 0
    assert cached_tokens(other) == 0


def test_streamed_tokens_are_counted(url: str) -> None:
    """A stream ends with its usage, and the metrics grow by the same numbers."""
    before = metric(url, "vllm:prompt_tokens_total")
    response = chat(
        url,
        user_message(image_part(picture(3)), text_part("What?")),
        stream=True,
        stream_options={"include_usage": True},
    )
    events = [
        json.loads(line.removeprefix("data: "))
        for line in response.text.splitlines()
        if line.startswith("data: {")
    ]
    assert len(events) > 3
    grown = metric(url, "vllm:prompt_tokens_total") - before
    assert grown == events[-1]["usage"]["prompt_tokens"] > 0


def wait_until_idle(url: str) -> None:
    deadline = time.monotonic() + SECONDS_TO_STOP
    while True:
        left = metric(url, "vllm:num_requests_running")
        left += metric(url, "vllm:num_requests_waiting")
        if not left:
            return
        assert time.monotonic() < deadline, f"{left} requests go on without a client"
        time.sleep(0.2)


def test_a_client_that_leaves_stops_its_request(url: str) -> None:
    """Its tokens are never made: the answer would be far longer."""
    before = metric(url, "vllm:generation_tokens_total")
    body = {
        "messages": user_message(image_part(picture(4)), text_part("Tell all.")),
        "max_tokens": 6000,
        "ignore_eos": True,
        "stream": True,
    }
    with httpx.stream(
        "POST", f"{url}/v1/chat/completions", json=body, timeout=60
    ) as response:
        for number, _ in enumerate(response.iter_lines()):
            if number == 8:
                break
    wait_until_idle(url)
    assert metric(url, "vllm:generation_tokens_total") - before < 6000


def test_a_client_that_times_out_stops_its_request(url: str) -> None:
    """One that waits for a whole answer is gone without a word, too."""
    before = metric(url, "vllm:generation_tokens_total")
    messages = user_message(image_part(picture(6)), text_part("Tell all."))
    with pytest.raises(httpx.ReadTimeout):
        chat(url, messages, timeout=2, max_tokens=6000, ignore_eos=True)
    wait_until_idle(url)
    assert metric(url, "vllm:generation_tokens_total") - before < 6000


def test_fuzzed_bodies_never_break_the_server(url: str) -> None:
    """Nonsense is answered or refused, never a 500, and the next request is right."""
    good = user_message(image_part(picture(5)), text_part("What do you see?"))
    right = chat(url, good).json()["choices"][0]["token_ids"]
    rng = random.Random(1)
    statuses = []
    with httpx.Client(base_url=url, timeout=120) as client:
        for number in range(FUZZED_REQUESTS):
            path, body = fuzzed_request(rng, CHECKPOINT)
            response = client.post(
                path, content=body, headers={"content-type": "application/json"}
            )
            statuses.append(response.status_code)
            assert response.status_code < 500, (
                number,
                path,
                body[:1500],
                response.text,
            )
            assert "Traceback" not in response.text
    print({status: statuses.count(status) for status in set(statuses)})
    assert 200 in statuses and 400 in statuses
    assert chat(url, good).json()["choices"][0]["token_ids"] == right
