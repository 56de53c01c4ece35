# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""An answer does not depend on what else the engine does or remembers.

The same requests, with 0 to 4 pictures of 1 to 17 tiles: each alone without any cache,
then in batches, in pieces of a few tokens, and from the caches; float32.
"""

from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.models.ovis.pictures import mixed_requests
from tests.models.ovis.test_features import started
from vllm import LLM, SamplingParams

TOLERANCE = 1e-5
"""Largest difference of logits over their largest magnitude."""

PIECE = 48
"""Tokens in one step: less than most pictures, and no multiple of a tile's 16."""

COUNT = 12

SAMPLING = SamplingParams(temperature=0, max_tokens=6, logprobs=-1, ignore_eos=True)


class Answer(NamedTuple):
    tokens: list[int]
    logits: np.ndarray
    """[tokens, vocabulary]."""


def requests() -> list[dict[str, Any]]:
    made = []
    for pictures, max_partition in mixed_requests(COUNT, seed=1):
        marks = "<image>\n" * len(pictures)
        prompt = (
            "<|im_start|>user\n" + marks + "What do you see?<|im_end|>\n"
            "<|im_start|>assistant\n"
        )
        request: dict[str, Any] = {"prompt": prompt}
        if pictures:
            request["multi_modal_data"] = {"image": pictures}
            request["mm_processor_kwargs"] = {"max_partition": max_partition}
        made.append(request)
    return made


def answers(llm: LLM, batch: list[dict[str, Any]]) -> list[Answer]:
    done = []
    for output in llm.generate(batch, SAMPLING, use_tqdm=False):
        completion = output.outputs[0]
        steps: Any = completion.logprobs
        logits = [[step[i].logprob for i in range(len(step))] for step in steps]
        done.append(Answer(list(completion.token_ids), np.array(logits)))
    return done


def alone(llm: LLM, batch: list[dict[str, Any]]) -> list[Answer]:
    return [answers(llm, [request])[0] for request in batch]


@pytest.fixture(scope="module")
def runs() -> dict[str, list[Answer]]:
    """Answers to the same requests by way of running them."""
    batch = requests()
    done = {}
    with started(
        enable_prefix_caching=False, mm_processor_cache_gb=0, max_num_seqs=32
    ) as llm:
        done["alone"] = alone(llm, batch)
        done["batched"] = answers(llm, batch)
        # Another order puts other neighbours beside each request.
        done["reversed"] = answers(llm, batch[::-1])[::-1]
    with started(
        enable_prefix_caching=True,
        enable_chunked_prefill=True,
        max_num_batched_tokens=PIECE,
        max_num_seqs=32,
    ) as llm:
        done["in pieces"] = alone(llm, batch)
        done["from the caches"] = answers(llm, batch)
        llm.reset_prefix_cache()
        done["from the processor's cache"] = answers(llm, batch)
        llm.reset_mm_cache()
        llm.reset_prefix_cache()
        done["in pieces, batched"] = answers(llm, batch)
    return done


@pytest.mark.parametrize(
    "way",
    [
        "batched",
        "reversed",
        "in pieces",
        "from the caches",
        "from the processor's cache",
        "in pieces, batched",
    ],
)
def test_answers_equal_those_alone(runs: dict[str, list[Answer]], way: str) -> None:
    """Token-equal, and logits within float32's rounding."""
    worst = 0.0
    for index, (one, other) in enumerate(zip(runs["alone"], runs[way], strict=True)):
        assert other.tokens == one.tokens, f"request {index}"
        error = np.abs(other.logits - one.logits).max() / np.abs(one.logits).max()
        worst = max(worst, float(error))
    print(f"{way}: largest relative difference of logits {worst:.1e}")
    assert worst < TOLERANCE


def test_requests_are_mixed() -> None:
    """The requests are what the module says: every count of pictures, many budgets."""
    made = mixed_requests(COUNT, seed=1)
    assert {len(pictures) for pictures, _ in made} == {0, 1, 2, 3, 4}
    assert {budget for pictures, budget in made if pictures} >= {1, 4, 9, 16}
