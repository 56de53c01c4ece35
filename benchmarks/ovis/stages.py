# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Where the time of an encode goes, read from a profile of whatever model ran.

Kernels are told apart by the shapes of the matrix products that start them and by their
order, so that nothing depends on how a model names or cuts its modules.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.ovis.floors import Sizes

STAGES = ("normalise", "tower", "head", "norm and softmax", "table")
PADDING = 512
"""Most columns by which a model may pad words or a patch's values."""


@dataclass(frozen=True)
class Kernel:
    """A kernel or copy on the device.

    Attributes:
        start: Begin, in microseconds.
        duration: In microseconds.
        shapes: Shapes of the inputs of the operation that started it, if known.

    """

    start: float
    duration: float
    shapes: Sequence[Sequence[int]]


def read_trace(trace: Mapping[str, Any]) -> list[Kernel]:
    """Kernels of a trace as `torch.profiler` exports it, shapes recorded."""
    events = trace["traceEvents"]
    shapes = {
        event["args"]["External id"]: [
            shape
            for shape in event["args"].get("Input Dims", [])
            if isinstance(shape, list) and all(isinstance(n, int) for n in shape)
        ]
        for event in events
        if event.get("cat") == "cpu_op" and "External id" in event.get("args", {})
    }
    return [
        Kernel(
            event["ts"], event["dur"], shapes.get(event["args"].get("External id"), [])
        )
        for event in events
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]


def stage_times(kernels: Iterable[Kernel], sizes: Sizes) -> dict[str, float]:
    """Milliseconds of device time by stage.

    A product with as many columns as there are words (or a few more) belongs to the
    head or the table; kernels between and after those are norm and softmax, those
    before the first are the tower's, and what precedes the product over the values of
    patches is normalisation.

    Returns:
        Times of all `STAGES`; empty if no product of the head was found.

    """
    in_order = sorted(kernels, key=lambda kernel: kernel.start)
    kinds = [_product(kernel.shapes, sizes) for kernel in in_order]
    if "head" not in kinds:
        return {}
    first_head = kinds.index("head")
    first_patch = kinds.index("patches") if "patches" in kinds[:first_head] else 0
    times = dict.fromkeys(STAGES, 0.0)
    for index, (kernel, kind) in enumerate(zip(in_order, kinds)):
        if index < first_head:
            stage = "normalise" if index < first_patch else "tower"
        elif kind in ("head", "table"):
            stage = kind
        else:
            stage = "norm and softmax"
        times[stage] += kernel.duration / 1e3
    return times


def _product(shapes: Sequence[Sequence[int]], sizes: Sizes) -> str | None:
    """Which of the telling products an operation with these inputs is."""
    over_words = [
        shape
        for shape in shapes
        if any(sizes.words <= n <= sizes.words + PADDING for n in shape)
    ]
    # The table first: so many tokens as the head has inputs look like its weights.
    if any(sizes.hidden in shape for shape in over_words):
        return "table"
    if any(sizes.joined in shape for shape in over_words):
        return "head"
    values = sizes.patch_values
    numbers = {n for shape in shapes for n in shape}
    if sizes.width in numbers and (
        any(values <= n < values + 64 for n in numbers)
        or any(shape[1:] and values == _size(shape[1:]) for shape in shapes)
    ):
        return "patches"
    return None


def _size(shape: Sequence[int]) -> int:
    product = 1
    for n in shape:
        product *= n
    return product
