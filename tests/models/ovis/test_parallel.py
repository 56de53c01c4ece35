# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Two ranks or replicas, without caches, answer as one does."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.models.ovis import golden
from tests.models.ovis.server import serve
from tests.models.ovis.test_server import (
    CHECKPOINT,
    SERVED,
    ask,
    cases,
    expected_greedy,
)
from vllm.platforms import current_platform


@pytest.fixture(
    scope="module",
    params=[
        ("--tensor-parallel-size", "2"),
        ("--tensor-parallel-size", "2", "--mm-encoder-tp-mode", "data"),
        ("--data-parallel-size", "2"),
        pytest.param(
            ("--pipeline-parallel-size", "2"),
            marks=pytest.mark.skipif(
                current_platform.is_cpu(),
                reason="vLLM 0.32's CPU runner cannot run pipeline stages",
            ),
        ),
    ],
    ids=["tensor", "encoder-data", "data", "pipeline"],
)
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    environment = {}
    if current_platform.is_cpu():
        # One core for each rank: the default binding wants a NUMA node for each.
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    with serve(
        golden.checkpoint_path(CHECKPOINT),
        *("--dtype", "float32"),
        *request.param,
        *("--mm-processor-cache-gb", "0", "--no-enable-prefix-caching"),
        *("--mm-processor-kwargs", '{"max_partition": 16}'),
        *("--limit-mm-per-prompt", '{"image": 8}'),
        **environment,
    ) as address:
        yield address


@pytest.mark.parametrize("name", SERVED)
def test_golden_answers(url: str, name: str) -> None:
    """Token-equal to the authors' greedy answers."""
    (case,) = cases(name)
    body = ask(url, case).json()
    assert body["choices"][0]["token_ids"] == expected_greedy(case)


def test_every_replica_answers(url: str) -> None:
    """Requests at once go to all replicas of the model, and are answered as alone."""
    batch = cases(*SERVED) * 2
    with ThreadPoolExecutor(len(batch)) as pool:
        responses = list(pool.map(lambda case: ask(url, case), batch))
    for case, response in zip(batch, responses, strict=True):
        tokens = response.json()["choices"][0]["token_ids"]
        assert tokens == expected_greedy(case), case["name"]
    lines = httpx.get(f"{url}/metrics", timeout=30).text.splitlines()
    answered = [
        float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith("vllm:generation_tokens_total{")
    ]
    assert min(answered) > 0, answered
