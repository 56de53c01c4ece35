# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The same requests alone, together, in pieces and from the caches."""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from vllm.models.ovis.tiling import num_tiles

from . import engine, reference, trace
from .cases import batch_cases
from .records import UNBOUNDED, Record, difference, magnitude, verdict

if TYPE_CHECKING:
    from vllm import LLM

FLOAT32_BOUND = 1e-5
"""Largest error between two ways of running in float32, relative to the largest
magnitude."""

VISUAL, LOGITS = "visual embeddings", "first-token logits"


@dataclass
class Run:
    """What one way of running the requests made.

    Attributes:
        tokens: Answered ids of each request.
        visual: Embeddings of each picture that was encoded, [tokens, hidden], by what
            `picture_keys` says of it.
        logits: Rows of logits, [vocabulary], of every step and request.

    """

    tokens: list[list[int]]
    visual: dict[str, Tensor]
    logits: list[Tensor]


class Taps:
    """Keeps what the engine's model returns to the engine."""

    def __init__(self, model: Any) -> None:
        self.run = Run([], {}, [])
        embed, compute = model.embed_multimodal, model.compute_logits

        def embed_multimodal(**inputs: Any) -> Any:
            items = embed(**inputs)
            for key, item in zip(picture_keys(inputs), items, strict=True):
                self.run.visual[key] = item.detach().clone()
            return items

        def compute_logits(hidden_states: Tensor) -> Any:
            logits = compute(hidden_states)
            self.run.logits += logits.detach().clone().unbind()
            return logits

        model.embed_multimodal = embed_multimodal
        model.compute_logits = compute_logits

    def together(self, llm: "LLM", requests: Sequence[dict[str, Any]]) -> Run:
        """Run requests in one call."""
        self.run = Run([], {}, [])
        answers = engine.generate(llm, list(requests), trace.COUNT)
        self.run.tokens = [tokens for _, tokens in answers]
        return self.run

    def alone(self, llm: "LLM", requests: Sequence[dict[str, Any]]) -> list[Run]:
        """Run requests one after the other."""
        return [self.together(llm, [request]) for request in requests]


def picture_keys(inputs: Mapping[str, Any]) -> list[str]:
    """Names of the pictures in a call of `embed_multimodal`: hashes of their tiles."""
    tiles = [num_tiles(*grid) for grid in inputs["grids"].tolist()]
    parts = inputs["pixel_values"].cpu().split(tiles)
    return [hashlib.sha256(part.numpy().tobytes()).hexdigest() for part in parts]


def joined(runs: Sequence[Run]) -> Run:
    """Runs of single requests as one."""
    return Run(
        [tokens for run in runs for tokens in run.tokens],
        {key: item for run in runs for key, item in run.visual.items()},
        [row for run in runs for row in run.logits],
    )


def nearest(wanted: Tensor, found: Sequence[Tensor]) -> float:
    """Smallest difference from any row.

    The order in which an engine answers requests is its own; rows of different
    requests are far apart.
    """
    return min(difference(row, wanted) for row in found)


def agreement(
    tokens: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]]
) -> float:
    """Share of tokens before each request's first difference."""
    equal = 0
    for one, other in zip(tokens, wanted, strict=True):
        pairs = list(zip(one, other, strict=True))
        equal += next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    return equal / sum(map(len, wanted))


def check_all_seen(alone: Sequence[Run], pictures: int) -> None:
    """Refuse to compare embeddings that were not recorded.

    Raises:
        ValueError: The engine encoded pictures past `embed_multimodal`.

    """
    seen = len(joined(alone).visual)
    if seen != pictures:
        raise ValueError(
            f"of {pictures} pictures, {seen} were seen to be encoded by "
            "embed_multimodal; an engine that encodes otherwise cannot be compared"
        )


def compare(
    way: str, dtype: str, alone: Sequence[Run], run: Run, bound: float | None
) -> Iterator[Record]:
    """Records of one way against each request alone.

    Args:
        way: How the requests were run.
        dtype: The engine's dtype.
        alone: Each request by itself.
        run: What the way made; its tokens in the order of `alone`.
        bound: Largest relative error, with all tokens equal; None: published only.

    """
    share = agreement(run.tokens, [one.tokens[0] for one in alone])
    first = [one.logits[0] for one in alone]
    rows = [(nearest(row, run.logits), magnitude(row)) for row in first]
    pictures = [
        (difference(run.visual[key], item), magnitude(item))
        for key, item in joined(alone).visual.items()
        if key in run.visual
    ]
    for what, errors in ((VISUAL, pictures), (LOGITS, rows)):
        # A picture whose tokens the prefix cache holds is not encoded again.
        if not errors:
            continue
        relative = max(error / scale for error, scale in errors)
        # Tokens come after the logits: one that differs breaks the logits' bound.
        held = math.inf if what == LOGITS and share < 1 else relative
        yield Record(
            report="batches",
            dtype=dtype,
            name=f"{way}: {what}",
            verdict=UNBOUNDED if bound is None else verdict(held, bound),
            max_abs=max(error for error, _ in errors),
            relative=relative,
            bound=bound,
            agreement=share if what == LOGITS else None,
            case=f"{len(errors)} compared",
        )


def records(
    folder: str, dtype: str, device: str, batch_invariant: bool
) -> Iterator[Record]:
    """Run the requests in every way and compare with each alone.

    Args:
        folder: The checkpoint.
        dtype: The engines' dtype.
        device: `cpu` or `cuda`.
        batch_invariant: The engines run in batch-invariant mode: bitwise equal.

    """
    bound = 0.0 if batch_invariant else FLOAT32_BOUND if dtype == "float32" else None
    layout = reference.layout(folder)
    cases = batch_cases(layout.side)
    requests = [engine.request(layout.format(case.text), case) for case in cases]

    with engine.started(folder, dtype, device) as llm:
        taps: Taps = llm.apply_model(Taps)[0]
        alone = taps.alone(llm, requests)
        check_all_seen(alone, sum(len(case.sizes) for case in cases))
        runs = {"batched": taps.together(llm, requests)}
        backwards = taps.together(llm, requests[::-1])
        backwards.tokens.reverse()
        runs["batched, reversed"] = backwards
    for way, run in runs.items():
        yield from compare(way, dtype, alone, run, bound)

    # Less than most pictures and no multiple of a tile.
    piece = 3 * layout.tokens_per_tile + 7
    with engine.started(
        folder,
        dtype,
        device,
        enable_prefix_caching=True,
        enable_chunked_prefill=True,
        mm_processor_cache_gb=4,
        max_num_batched_tokens=piece,
    ) as llm:
        taps = llm.apply_model(Taps)[0]
        runs = {f"in pieces of {piece} tokens": joined(taps.alone(llm, requests))}
        runs["prefix cache, batched"] = taps.together(llm, requests)
        llm.reset_prefix_cache()
        runs["processor cache, batched in pieces"] = taps.together(llm, requests)
    for way, run in runs.items():
        yield from compare(way, dtype, alone, run, bound)
