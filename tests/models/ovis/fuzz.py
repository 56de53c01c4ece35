# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Bodies of requests, each right in most places and odd in one or two."""

import json
import random
from typing import Any

import pybase64
from PIL import Image

from tests.models.ovis.pictures import picture
from tests.models.ovis.server import data_url, image_part, text_part

TEXTS = (
    "What do you see?",
    "",
    " ",
    "<image>",
    "<image><image>\n<image>",
    "<|image_pad|>" * 20,
    "<|im_end|>\n<|im_start|>system\n<image>",
    "<|vision_start|><|image_pad|><|vision_end|>",
    "\u0000\ufffd\u202e",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 🦉" * 50,
    "word " * 9000,
)

ODD_VALUES: tuple[Any, ...] = (
    *(0, -1, 1, 17, 10**9, 2**63, 2**70, -(2**70), 0.5, 1e308, float("nan")),
    *(float("inf"), True, None, "", "nine", "\u0000", [], [1], {}, {"a": 1}),
)

KWARGS = ("max_partition", "covering_threshold", "images_kwargs", "max_partitions")


def fuzzed_request(rng: random.Random, model: str) -> tuple[str, bytes]:
    """Make one request.

    Args:
        rng: Source of every choice.
        model: Name of the served model.

    Returns:
        The path, and the body: JSON in most cases, broken now and then.

    """
    if rng.random() < 0.25:
        path, body = "/v1/completions", _completion(rng)
    else:
        path, body = "/v1/chat/completions", _chat(rng)
    body = {"model": model, "temperature": 0, "max_tokens": 4, **body}
    if rng.random() < 0.15:
        key = rng.choice(
            (*body, "seed", "logprobs", "n", "stop", "truncate_prompt_tokens")
        )
        body[key] = rng.choice(ODD_VALUES)
    encoded = json.dumps(body).encode()
    if rng.random() < 0.03:
        encoded = encoded[: rng.randrange(len(encoded))]
    return path, encoded


def _completion(rng: random.Random) -> dict[str, Any]:
    ids = [rng.choice((0, 5, 697, 687, 767)) for _ in range(rng.randrange(40))]
    if rng.random() < 0.3:
        ids.insert(rng.randrange(len(ids) + 1), rng.choice((-1, 768, 10**6, 2**40)))
    return {"prompt": rng.choice((ids, [ids, ids], rng.choice(TEXTS), [ids[:1], "a"]))}


def _chat(rng: random.Random) -> dict[str, Any]:
    parts = [_part(rng) for _ in range(rng.randrange(1, 6))]
    messages: list[Any] = [{"role": "user", "content": parts}]
    if rng.random() < 0.3:
        role = rng.choice(("system", "assistant", "tool", "user", "nobody"))
        content = rng.choice((rng.choice(TEXTS), [_part(rng)], None))
        messages.insert(0, {"role": role, "content": content})
    if rng.random() < 0.05:
        messages = rng.choice(([], [{}], [{"role": "user"}], ["hello"]))
    body: dict[str, Any] = {"messages": messages}
    if rng.random() < 0.4:
        body["mm_processor_kwargs"] = {
            rng.choice(KWARGS): rng.choice(ODD_VALUES)
            for _ in range(rng.randrange(1, 3))
        }
    if rng.random() < 0.05:
        body["mm_processor_kwargs"] = rng.choice(ODD_VALUES)
    return body


def _part(rng: random.Random) -> Any:
    kind = rng.random()
    if kind < 0.4:
        return text_part(rng.choice(TEXTS))
    if kind < 0.7:
        return image_part(picture(rng.randrange(6)))
    if kind < 0.95:
        return {"type": "image_url", "image_url": {"url": _odd_url(rng)}}
    return rng.choice(
        (
            {"type": "image_url"},
            {"type": "image_url", "image_url": None},
            {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,AAAA"}},
            {"type": "image_embeds", "image_embeds": "AAAA"},
            {"type": "image_embeds", "image_embeds": None, "uuid": "x"},
            {"type": "nothing"},
            {"type": "text"},
            "bare text",
        )
    )


def _odd_url(rng: random.Random) -> str:
    whole = data_url(picture(rng.randrange(6)))
    head, content = whole.split(",", 1)
    raw = bytearray(pybase64.b64decode(content))
    cut = bytes(raw[: rng.randrange(len(raw))])
    for _ in range(5):
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    thin = Image.new("L", rng.choice(((1, 1), (1000, 1), (1, 1000), (3, 3), (500, 19))))
    palette = picture(rng.randrange(6)).convert("P")
    return rng.choice(
        (
            *("", "data:", "data:image/png;base64,", whole[:-7]),
            f"{head},{pybase64.b64encode(b'no picture').decode()}",
            f"data:text/plain;base64,{content}",
            "data:image/png,abc",
            *(f"{head},{pybase64.b64encode(b).decode()}" for b in (cut, bytes(raw))),
            *(data_url(thin), data_url(palette)),
        )
    )
