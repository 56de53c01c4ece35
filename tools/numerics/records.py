# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""One line of a report: an error, what it is held against, and the verdict."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

FLOAT32_BOUND = 1e-4
"""Largest error in float32, relative to the largest magnitude of the reference."""

ROUNDING_FACTOR = 2.0
"""In a low precision the engine may be this much farther from the float32 reference
than rounding alone, in the reference, takes it."""

INSIDE, OUTSIDE, UNBOUNDED, FAILED = "ok", "FAULT", "-", "FAILED"


@dataclass(frozen=True)
class Record:
    """One line of a report.

    All errors but `max_abs` are relative to the largest magnitude of the float32
    reference (operators: root mean squares of both), and the largest over all cases.
    None: not measured. Infinite: arrays of different shapes, or no numbers.

    Attributes:
        report: `stages`, `layers`, `operators`, `batches` or `options`.
        dtype: The engine's dtype.
        name: Stage, layer, set of operators or way of running.
        verdict: `ok`, `FAULT`, `FAILED` (did not run) or `-` (no bound).
        max_abs: Largest difference from the reference in the same dtype.
        relative: The same, relative.
        noise_floor: Reference in this dtype against itself with another attention.
        against_float32: Engine against the float32 reference.
        reference_against_float32: Reference in this dtype against the float32 one.
        bound: Largest allowed; of `relative` in float32 and where values must be equal,
            else of `against_float32`.
        agreement: Share of tokens that agree.
        noise_agreement: The same of the reference against itself.
        change: Distance from the engine as it starts (operators).
        share: Part of that engine's squared distance that is gone (operators).
        times_noise_floor: `against_float32` over `noise_floor` (options).
        case: Where the largest error is, or why a run failed.

    """

    report: str
    dtype: str
    name: str
    verdict: str
    max_abs: float | None = None
    relative: float | None = None
    noise_floor: float | None = None
    against_float32: float | None = None
    reference_against_float32: float | None = None
    bound: float | None = None
    agreement: float | None = None
    noise_agreement: float | None = None
    change: float | None = None
    share: float | None = None
    times_noise_floor: float | None = None
    case: str = ""

    def to_json(self) -> dict[str, Any]:
        """Fields that were measured; JSON has no infinity."""
        return {
            key: value
            for key, value in asdict(self).items()
            if value is not None and value != math.inf and value != ""
        }


def bad(records: Sequence[Record]) -> list[Record]:
    """Records which make the exit status 1."""
    return [r for r in records if r.verdict in (OUTSIDE, FAILED)]


def difference(actual: Tensor, expected: Tensor) -> float:
    """Largest absolute difference; infinite where shapes differ or a value is none."""
    if actual.shape != expected.shape:
        return math.inf
    if not actual.numel():
        return 0.0
    wide = actual.detach().to(expected.device).double() - expected.detach().double()
    largest = wide.abs().max()
    return math.inf if torch.isnan(largest) else float(largest)


def magnitude(expected: Tensor) -> float:
    """Largest magnitude, to which errors are relative; 1 where all is zero."""
    return float(expected.abs().max()) or 1.0 if expected.numel() else 1.0


def relative_bound(
    dtype: str,
    reference_against_float32: float,
    noise_floor: float,
    equal: bool = False,
) -> float:
    """The rule.

    What rounding does is known from single draws, each of which may be small by chance;
    the larger of the two stands for it.

    Args:
        dtype: The engine's dtype.
        reference_against_float32: Relative error of the reference in that dtype.
        noise_floor: Relative difference between two ways to compute the reference.
        equal: Whether the values must be equal whatever the dtype.

    """
    if equal:
        return 0.0
    if dtype == "float32":
        return FLOAT32_BOUND
    return ROUNDING_FACTOR * max(reference_against_float32, noise_floor)


def verdict(value: float, bound: float) -> str:
    """Whether a value keeps its bound; one that is not a number does not."""
    return INSIDE if value <= bound else OUTSIDE
