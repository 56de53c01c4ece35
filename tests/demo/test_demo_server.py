# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""`vllm serve demo/tiny-ovis2` sees: held-out pictures through the chat endpoint."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from PIL import Image

from tests.models.ovis.server import chat, data_url, image_part, serve, text_part
from tests.models.ovis.server import user_message as message
from tools.demo_data.scenes import make_sample

DEMO = Path(__file__).resolve().parents[2] / "demo"
PLAN = json.loads((DEMO / "heldout.json").read_text("utf-8"))
SAMPLES = json.loads((DEMO / "samples.json").read_text("utf-8"))

# The hardest task is measured on every held-out picture, the others on enough of them
# that one in twenty wrong would show.
COUNTS = {"small_text": 250}
COUNT = 60


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serve(str(DEMO / "tiny-ovis2")) as address:
        yield address


def is_right(url: str, task: str, seed: int, max_partition: int) -> bool:
    images, question, answer = make_sample(task, seed)
    response = chat(
        url,
        message(*map(image_part, images), text_part(question)),
        timeout=600,
        mm_processor_kwargs={"max_partition": max_partition},
    )
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"] == answer


@pytest.mark.parametrize(
    "check", PLAN["checks"], ids=lambda c: f"{c['task']}-{c['max_partition']}"
)
def test_heldout_pictures(url: str, check: dict[str, Any]) -> None:
    """Share of exact answers, in bounds with all cells and without."""
    first = PLAN["seeds"][0]
    seeds = range(first, first + COUNTS.get(check["task"], COUNT))
    with ThreadPoolExecutor(16) as pool:
        right = list(
            pool.map(
                lambda seed: is_right(url, check["task"], seed, check["max_partition"]),
                seeds,
            )
        )
    share = sum(right) / len(right)
    print(f"{check['task']}, max_partition {check['max_partition']}: {share:.3f}")
    assert check.get("at_least", 0) <= share <= check.get("at_most", 1)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s["images"][0])
def test_sample_through_the_openai_client(url: str, sample: dict[str, Any]) -> None:
    """As the demo asks: the checkpoint's own generation settings, bare request."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    parts: list[Any] = [
        {"type": "image_url", "image_url": {"url": data_url(Image.open(DEMO / name))}}
        for name in sample["images"]
    ]
    parts.append({"type": "text", "text": sample["question"]})
    completion = client.chat.completions.create(
        model=str(DEMO / "tiny-ovis2"),
        messages=[{"role": "user", "content": parts}],
        temperature=0,
    )
    assert completion.choices[0].message.content == sample["answer"]
