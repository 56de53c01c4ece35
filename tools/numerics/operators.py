# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Where the text model's difference comes from: fused operators on and off.

Every engine gets the same merged embeddings, those of the reference, so tower and head
have no part in what is measured: a text layer's output at all positions, as the root
mean square of the difference over that of the reference. After the first layer an
operator's own rounding shows; after the last it has set off all the others', and any
change moves the result by about the noise floor.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tests.reference.model import Ovis, Reference
from tests.reference.preprocess import placeholder_ids, preprocess

from . import engine, reference, trace
from .attention import other_attention
from .cases import LONG_TEXT, Case
from .records import FAILED, UNBOUNDED, Record, difference

AS_STARTED = "as started"


def _custom_ops(*off: str) -> dict[str, Any]:
    return {"custom_ops": ["all", *(f"-{name}" for name in off)]}


NATIVE_NORM = {
    "ir_op_priority": {"rms_norm": ["native"], "fused_add_rms_norm": ["native"]}
}
"""vLLM 0.32 takes norms by a list of providers, not by `custom_ops`."""

ROTARY, ACTIVATION = "rotary_embedding", "silu_and_mul"

VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "cpu": {
        "native rotary": {"compilation_config": _custom_ops(ROTARY)},
    },
    "cuda": {
        "native RMSNorm": {"kernel_config": NATIVE_NORM},
        "native rotary": {"compilation_config": _custom_ops(ROTARY)},
        "native activation": {
            "compilation_config": _custom_ops(ACTIVATION, "gelu_and_mul")
        },
        "Triton attention": {"attention_config": {"backend": "TRITON_ATTN"}},
        "native norm, rotary, activation; Triton attention": {
            "kernel_config": NATIVE_NORM,
            "compilation_config": _custom_ops(ROTARY, ACTIVATION, "gelu_and_mul"),
            "attention_config": {"backend": "TRITON_ATTN"},
        },
    },
}
"""Options of an engine with some operators exchanged, by device."""

ONE_IMPLEMENTATION = {"cpu": ("RMSNorm", "activation", "attention"), "cuda": ()}
"""Operators for which vLLM 0.32 has no second implementation on the device."""


def cases(side: int) -> list[Case]:
    """Words only, and a picture of ten tiles."""
    return [
        Case("words", (), LONG_TEXT),
        Case("tiles", ((3 * side, 3 * side),), LONG_TEXT),
    ]


PLACES = ("first layer", "last layer")

Outputs = list[Tensor]
"""Output of the text layers at PLACES, [prompt, hidden] each."""


@dataclass(frozen=True)
class Expected:
    """What the reference makes of a case.

    Attributes:
        request: The engine's request, with the reference's embeddings as its picture.
        same: In the engine's dtype.
        other: The same with the other attention.
        wide: In float32, on the same merged embeddings.

    """

    request: dict[str, Any]
    same: Outputs
    other: Outputs
    wide: Outputs


def expected(ref: Reference, model: Ovis, case: Case) -> Expected:
    """Run a case through the reference in the dtype of `model`."""
    prompt = reference.prepare(ref, case)
    made, _ = reference.run(model, prompt)
    merged = made[trace.MERGED]
    with other_attention(model):
        other = reference.run_text(model, merged)
    request: dict[str, Any] = {"prompt": prompt.text}
    if case.sizes:
        (picture,) = case.pictures()
        _, grid = preprocess(picture, ref.rule, case.max_partition)
        start = int((made[trace.IDS] == -1).nonzero()[0])
        length = len(reference.expanded_ids(model, placeholder_ids(grid)))
        rows = merged[start : start + length].cpu().clone()
        request["multi_modal_data"] = {"image": rows[None]}
    wide = reference.run_text(ref.model, merged)
    return Expected(request, ends(made), ends(other), ends(wide))


def ends(made: trace.Trace) -> Outputs:
    """Outputs of the first and the last text layer of a trace."""
    names = [name for name in made if name.startswith("text layer")]
    return [made[names[0]], made[names[-1]]]


def distance(actual: Tensor, wanted: Tensor, scale: Tensor) -> float:
    """Root mean square of a difference over that of `scale`."""
    wide = (actual.to(wanted.device).double() - wanted.double()).square().mean()
    return math.sqrt(float(wide / scale.double().square().mean()))


def records(
    ref: Reference, model: Ovis, folder: str, dtype: str, device: str
) -> Iterator[Record]:
    """Start an engine for each set of operators and compare.

    Args:
        ref: The float32 reference.
        model: The reference in `dtype`.
        folder: The checkpoint.
        dtype: The engines' dtype.
        device: `cpu` or `cuda`.

    """
    wanted = [expected(ref, model, case) for case in cases(ref.rule.side)]
    base: list[Outputs] = []
    for name, options in {AS_STARTED: {}, **VARIANTS[device]}.items():
        try:
            outputs = _layers(folder, dtype, device, options, wanted)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            yield Record("operators", dtype, name, FAILED, case=reason)
            continue
        base = base or outputs
        for place, where in enumerate(PLACES):
            rows = [
                (out[place], was[place], want.same[place], want.wide[place])
                for out, was, want in zip(outputs, base, wanted, strict=True)
            ]
            errors, before = (
                max(distance(row[which], row[2], row[3]) for row in rows)
                for which in (0, 1)
            )
            floor = [(w.other[place], w.same[place], w.wide[place]) for w in wanted]
            yield Record(
                report="operators",
                dtype=dtype,
                name=f"{name}: {where}",
                verdict=UNBOUNDED,
                max_abs=max(difference(out, same) for out, _, same, _ in rows),
                relative=errors,
                noise_floor=max(distance(*arrays) for arrays in floor),
                against_float32=max(
                    distance(out, wide, wide) for out, _, _, wide in rows
                ),
                reference_against_float32=max(
                    distance(same, wide, wide) for _, _, same, wide in rows
                ),
                change=None
                if outputs is base
                else max(distance(out, was, wide) for out, was, _, wide in rows),
                share=None if outputs is base else 1 - (errors / before) ** 2,
            )
    for name in ONE_IMPLEMENTATION[device]:
        yield Record(
            "operators", dtype, name, UNBOUNDED, case="one implementation on a CPU"
        )


def _layers(
    folder: str,
    dtype: str,
    device: str,
    options: dict[str, Any],
    wanted: list[Expected],
) -> list[Outputs]:
    settings = {"enable_mm_embeds": True, **options}
    with engine.started(folder, dtype, device, **settings) as llm:
        recorder = engine.recorder(llm)
        return [ends(recorder.record(llm, one.request)[0]) for one in wanted]
