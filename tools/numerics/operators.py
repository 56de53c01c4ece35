# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Where the text model's difference comes from: fused operators on and off.

Every engine gets the same merged embeddings, those of the reference, so tower and head
have no part in what is measured: the last text layer's output at all positions, as the
root mean square of the difference over that of the reference.
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


@dataclass(frozen=True)
class Expected:
    """What the reference makes of a case.

    Attributes:
        request: The engine's request, with the reference's embeddings as its picture.
        same, other, wide: Last text layer, [prompt, hidden]: in the engine's dtype,
            with the other attention, and in float32 on the same embeddings.

    """

    request: dict[str, Any]
    same: Tensor
    other: Tensor
    wide: Tensor


def expected(ref: Reference, model: Ovis, case: Case) -> Expected:
    """Run a case through the reference in the dtype of `model`."""
    prompt = reference.prepare(ref, case)
    made, _ = reference.run(model, prompt)
    last = trace.text_layer(len(model.llm.model.layers) - 1)
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
    return Expected(request, made[last], other, reference.run_text(ref.model, merged))


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
    base: list[Tensor] = []
    for name, options in {AS_STARTED: {}, **VARIANTS[device]}.items():
        try:
            outputs = _last_layers(folder, dtype, device, options, wanted)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            yield Record("operators", dtype, name, FAILED, case=reason)
            continue
        base = base or outputs
        pairs = list(zip(outputs, wanted, base, strict=True))
        yield Record(
            report="operators",
            dtype=dtype,
            name=name,
            verdict=UNBOUNDED,
            max_abs=max(difference(o, w.same) for o, w, _ in pairs),
            relative=max(distance(o, w.same, w.wide) for o, w, _ in pairs),
            noise_floor=max(distance(w.other, w.same, w.wide) for w in wanted),
            against_float32=max(distance(o, w.wide, w.wide) for o, w, _ in pairs),
            reference_against_float32=max(
                distance(w.same, w.wide, w.wide) for w in wanted
            ),
            change=max(distance(o, b, w.wide) for o, w, b in pairs),
        )
    for name in ONE_IMPLEMENTATION[device]:
        yield Record(
            "operators", dtype, name, UNBOUNDED, case="one implementation on a CPU"
        )


def _last_layers(
    folder: str,
    dtype: str,
    device: str,
    options: dict[str, Any],
    wanted: list[Expected],
) -> list[Tensor]:
    with engine.started(folder, dtype, device, enable_mm_embeds=True, **options) as llm:
        recorder = engine.recorder(llm)
        outputs = []
        for one in wanted:
            made, _ = recorder.record(llm, one.request)
            names = [name for name in made if name.startswith("text layer")]
            outputs.append(made[names[-1]])
    return outputs
