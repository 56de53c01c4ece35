# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What an option of the engine costs: engines with and without it, by stage.

An option may buy speed with precision, so nothing here has a bound; each error is told
as a multiple of the noise floor instead.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from . import trace
from .records import UNBOUNDED, Record

PLAIN, CHANGED = "as started", "with the arguments"

SHOWN = (trace.FEATURES, trace.VISUAL, trace.MERGED, trace.LOGITS, trace.GREEDY)
"""An encoder in CUDA graphs is seen from the visual embeddings on."""


def option_record(engine: str, record: Record) -> Record:
    """A line of the stages report as one of this report.

    Args:
        engine: Which engine was measured.
        record: Its errors at a stage.

    """
    floor, error = record.noise_floor, record.against_float32
    return replace(
        record,
        report="options",
        name=f"{engine}: {record.name}",
        verdict=UNBOUNDED,
        bound=None,
        times_noise_floor=error / floor if floor and error is not None else None,
    )


def records(
    measure: Callable[..., Iterator[Record]], arguments: dict[str, Any]
) -> Iterator[Record]:
    """Measure an engine as it starts and one with `arguments`.

    Args:
        measure: The stages report, of an engine that gets its arguments.
        arguments: What the second engine is given.

    """
    for name, given in ((PLAIN, {}), (CHANGED, arguments)):
        for record in measure(**given):
            if record.report == "stages" and record.name in SHOWN:
                yield option_record(name, record)
