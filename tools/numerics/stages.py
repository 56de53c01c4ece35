# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The main report: every stage of the data path, in one dtype."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.reference.model import Ovis, Reference

from . import engine, reference, trace
from .attention import other_attention
from .cases import Case, stage_cases
from .records import (
    Record,
    difference,
    magnitude,
    relative_bound,
    verdict,
)


@dataclass(frozen=True)
class References:
    """The reference in float32 and in the dtype under test."""

    float32: Ovis
    same: Ovis
    dtype: str


@dataclass(frozen=True)
class Errors:
    """Errors of one stage in one case; `scale` is what they are relative to."""

    case: str
    scale: float
    engine: float
    noise: float
    engine_wide: float
    reference_wide: float


@dataclass(frozen=True)
class Continuation(Errors):
    """What a case's greedy tokens give away, and how often they agree.

    Attributes:
        case: Its name.
        scale: Largest magnitude of the float32 reference's logits.
        engine: Largest gap between the reference's best logit and that of the engine's
            token, in the same dtype; 0 if all tokens are the reference's.
        noise: The same of the reference with the other attention.
        engine_wide: As `engine`, by the float32 reference's logits.
        reference_wide: The same for the reference's own tokens in this dtype.
        agreement: Share of steps at which engine and reference take the same token.
        noise_agreement: Share for the reference and itself with the other attention.
        first: First step that differs, None if none does.

    """

    agreement: float
    noise_agreement: float
    first: int | None


class StageErrors:
    """Errors of all cases in one dtype, gathered case by case.

    Attributes:
        references: What is compared with.
        errors: By stage or layer.
        continuations: Of each case.
        unseen: Stages and layers that the engine did not record in some case, as in a
            CUDA graph no module is called; they have no record.

    """

    def __init__(self, references: References) -> None:
        self.references = references
        self.unseen: set[str] = set()
        self.errors: dict[str, list[Errors]] = {}
        self.continuations: list[Continuation] = []

    def add(
        self,
        case: Case,
        prompt: reference.Prompt,
        traced: trace.Trace,
        tokens: Sequence[int],
    ) -> None:
        """Compare the engine's trace of a case with the reference's.

        Args:
            case: The case.
            prompt: The same as the reference reads it.
            traced: The engine's trace; its ids hold the pad token where images stand.
            tokens: The engine's greedy continuation.

        """
        models = self.references
        same, logits = reference.run(models.same, prompt, tokens)
        with other_attention(models.same):
            other, other_logits = reference.run(models.same, prompt, tokens)
        wide, wide_logits = same, logits
        if models.float32 is not models.same:
            wide, wide_logits = reference.run(models.float32, prompt, tokens)

        self.unseen |= same.keys() - traced.keys()
        for name, expected in same.items():
            if name in self.unseen:
                continue
            actual = like(traced[name], expected, name)
            self.errors.setdefault(name, []).append(
                Errors(
                    case.name,
                    magnitude(wide[name]),
                    difference(actual, expected),
                    difference(other[name], expected),
                    difference(actual, wide[name]),
                    difference(expected, wide[name]),
                )
            )
        self.continuations.append(
            compare_tokens(case.name, tokens, logits, other_logits, wide_logits)
        )

    def check_all_seen(self) -> None:
        """Refuse a report with gaps.

        Raises:
            ValueError: Something was not recorded.

        """
        if self.unseen:
            raise ValueError(
                f"the engine ran past the hooks of {', '.join(sorted(self.unseen))}"
            )

    def records(self) -> list[Record]:
        """Stages, then layers, each with its largest errors over the cases."""
        seen = [name for name in self.errors if name not in self.unseen]
        made = [
            self._record("stages", name)
            for name in trace.STAGES
            if name in seen and name != trace.GREEDY
        ]
        logits = made[-1]
        made.append(self._greedy(logits))
        layers = [name for name in seen if name not in trace.STAGES]
        return made + [self._record("layers", name) for name in layers]

    def _record(self, report: str, name: str) -> Record:
        errors, dtype = self.errors[name], self.references.dtype
        worst = max(errors, key=lambda e: e.engine / e.scale)
        engine_wide = max(e.engine_wide / e.scale for e in errors)
        reference_wide = max(e.reference_wide / e.scale for e in errors)
        relative = worst.engine / worst.scale
        equal = name in (trace.PIXELS, trace.IDS)
        noise = max(e.noise / e.scale for e in errors)
        bound = relative_bound(dtype, reference_wide, noise, equal)
        held = relative if equal or dtype == "float32" else engine_wide
        return Record(
            report=report,
            dtype=dtype,
            name=name,
            verdict=verdict(held, bound),
            max_abs=max(e.engine for e in errors),
            relative=relative,
            noise_floor=noise,
            against_float32=engine_wide,
            reference_against_float32=reference_wide,
            bound=bound,
            case=worst.case,
        )

    def _greedy(self, logits: Record) -> Record:
        """A token may differ only where the logits' bound leaves the choice open.

        Each of the two candidates may be off by the bound.
        """
        cases, dtype = self.continuations, self.references.dtype
        worst = max(cases, key=lambda c: c.engine / c.scale)
        engine_wide = max(c.engine_wide / c.scale for c in cases)
        assert logits.bound is not None
        bound = 2 * logits.bound
        relative = worst.engine / worst.scale
        differing = [c for c in cases if c.first is not None]
        where = "; ".join(f"{c.case}: from token {c.first}" for c in differing)
        return Record(
            report="stages",
            dtype=dtype,
            name=trace.GREEDY,
            verdict=verdict(relative if dtype == "float32" else engine_wide, bound),
            max_abs=max(c.engine for c in cases),
            relative=relative,
            noise_floor=max(c.noise / c.scale for c in cases),
            against_float32=engine_wide,
            reference_against_float32=max(c.reference_wide / c.scale for c in cases),
            bound=bound,
            agreement=sum(c.agreement for c in cases) / len(cases),
            noise_agreement=sum(c.noise_agreement for c in cases) / len(cases),
            case=where,
        )


def like(actual: Tensor, expected: Tensor, name: str) -> Tensor:
    """The engine's array of a stage in the reference's form.

    Args:
        actual: As recorded: patches may have zeros behind for alignment, tiles and
            patches may be one dimension, ids hold a placeholder where images stand.
        expected: The reference's array.
        name: The stage or layer.

    """
    if name == trace.IDS:
        return mark_images(actual, expected)
    if name == trace.PIXELS:
        width = expected.shape[-1]
        return actual if actual[..., width:].any() else actual[..., :width]
    if actual.numel() == expected.numel():
        return actual.reshape(expected.shape)
    return actual


def mark_images(ids: Tensor, expected: Tensor) -> Tensor:
    """Put -1 where the engine's ids hold its placeholder.

    The placeholder is the token at the first place where an image is expected; one
    that stands elsewhere shows up as a difference.
    """
    places = (expected == -1).nonzero()
    if not len(places) or int(places[0]) >= len(ids):
        return ids
    return torch.where(ids == ids[places[0]], -1, ids)


def compare_tokens(
    case: str, tokens: Sequence[int], logits: Tensor, other: Tensor, wide: Tensor
) -> Continuation:
    """Judge a continuation by the logits that the reference has at each of its steps.

    Args:
        case: Name of the case.
        tokens: The engine's tokens.
        logits: [tokens, vocabulary] of the reference in the same dtype.
        other: The same with the other attention.
        wide: The same in float32.

    """
    chosen = torch.tensor(tokens, device=logits.device)
    best, other_best = logits.argmax(-1), other.argmax(-1)
    equal = best == chosen
    return Continuation(
        case,
        magnitude(wide),
        gap(logits, chosen),
        gap(logits, other_best),
        gap(wide, chosen),
        gap(wide, best),
        float(equal.float().mean()),
        float((best == other_best).float().mean()),
        None if bool(equal.all()) else int((~equal).nonzero()[0]),
    )


def gap(logits: Tensor, tokens: Tensor) -> float:
    """Largest distance of a token's logit below the best one of its step."""
    taken = logits.gather(-1, tokens[:, None])
    return float((logits.amax(-1, keepdim=True).double() - taken.double()).max())


def records(
    ref: Reference,
    model: Ovis,
    folder: str,
    dtype: str,
    device: str,
    engines: list[dict[str, str]],
    **arguments: Any,
) -> Iterator[Record]:
    """Start an engine, record every case and compare.

    Args:
        ref: The float32 reference.
        model: The reference in `dtype`.
        folder: The checkpoint.
        dtype: The engine's dtype.
        device: `cpu` or `cuda`.
        engines: The attention back ends in use are added to it.
        arguments: More arguments of the engine; with them, stages may be missing.

    Raises:
        ValueError: Without them, one is.

    """
    errors = StageErrors(References(ref.model, model, dtype))
    with engine.started(folder, dtype, device, **arguments) as llm:
        given = {"arguments": json.dumps(arguments)} if arguments else {}
        engines.append({"dtype": dtype, **given, **engine.attention_backends(llm)})
        recorder = engine.recorder(llm)
        for case in stage_cases(ref.rule.side):
            prompt = reference.prepare(ref, case)
            traced, tokens = recorder.record(llm, engine.request(prompt.text, case))
            errors.add(case, prompt, traced, tokens)
    if not arguments:
        errors.check_all_seen()
    yield from errors.records()
