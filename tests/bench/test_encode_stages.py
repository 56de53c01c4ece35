# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Floors of the encode, and the stages that a profile is split into."""

import pytest

from benchmarks.ovis.checkpoint import CONFIG
from benchmarks.ovis.floors import (
    Sizes,
    Speed,
    encode_floor,
    encode_work,
    request_floor,
)
from benchmarks.ovis.stages import STAGES, Kernel, read_trace, stage_times

SIZES = Sizes.of(CONFIG)


def test_sizes_are_those_of_ovis2_2b():
    assert (SIZES.patches, SIZES.tokens, SIZES.words) == (1024, 256, 65531)
    assert (SIZES.joined, SIZES.patch_values, SIZES.hidden) == (4096, 588, 1536)
    # Qwen2.5-1.5B has 1.54 billion weights, 0.23 of them its embedding.
    assert SIZES.text_weights == pytest.approx(1.31e9, rel=0.01)


def test_encode_floor_is_that_of_the_peer_measurements():
    """11.7 ms for ten tiles at 755 to 790 TFLOP/s and 4.3 TB/s, 8.7 of products."""
    speed = Speed(790e12, 4.3e12)
    assert encode_floor(SIZES, 10, speed) == pytest.approx(11.7, rel=0.03)
    work = encode_work(SIZES, 10)
    assert speed.milliseconds(work["head"]) == pytest.approx(1.74, rel=0.02)
    assert speed.milliseconds(work["norm and softmax"]) == pytest.approx(0.16, rel=0.03)


def test_one_tile_still_reads_all_weights():
    slow_memory = Speed(790e12, 1e12)
    assert slow_memory.milliseconds(encode_work(SIZES, 1)["head"]) > 0.5


def test_more_tiles_and_text_lower_the_ceiling_of_requests():
    speed = Speed(790e12, 4.3e12)
    one = request_floor(SIZES, 9, 2330, speed)
    assert 30 < one < 80
    assert request_floor(SIZES, 10, 2330, speed) < one
    assert request_floor(SIZES, 9, 3000, speed) < one


def kernel(start, duration, *shapes):
    return Kernel(start, duration, shapes)


def test_stages_are_told_apart_by_shapes_and_order():
    kernels = [
        kernel(0, 1000),  # a lookup
        kernel(2, 2000, [1024, 588], [588, 1024]),
        kernel(4, 3000, [1024, 1024], [1024, 3072]),
        kernel(5, 500),  # a fused norm
        kernel(6, 4000, [256, 4096], [4096, 65536]),
        kernel(7, 600),  # softmax
        kernel(8, 5000, [256, 65536], [65536, 1536]),
        # Another chunk of tokens.
        kernel(10, 4000, [256, 4096], [4096, 65536]),
        kernel(11, 600),
        kernel(12, 5000, [256, 65536], [65536, 1536]),
    ]
    times = stage_times(reversed(kernels), SIZES)
    assert times == {
        "normalise": 1.0,
        "tower": 5.5,
        "head": 8.0,
        "norm and softmax": 1.2,
        "table": 10.0,
    }
    assert tuple(times) == STAGES


def test_as_many_tokens_as_the_head_has_inputs_are_no_head():
    kernels = [
        kernel(0, 1000, [4096, 4096], [65531, 4096], [65531]),
        kernel(1, 2000, [4096, 65531], [65531, 1536]),
    ]
    times = stage_times(kernels, SIZES)
    assert (times["head"], times["table"]) == (1.0, 2.0)


def test_convolution_is_the_patch_embedding():
    kernels = [
        kernel(0, 1000),
        kernel(2, 2000, [1, 3, 448, 448], [1024, 3, 14, 14], [1024]),
        kernel(6, 4000, [256, 4096], [65531, 4096]),
    ]
    times = stage_times(kernels, SIZES)
    assert (times["normalise"], times["tower"], times["head"]) == (1.0, 2.0, 4.0)


def test_profile_without_a_head_says_nothing():
    assert stage_times([kernel(0, 1, [1024, 588], [588, 1024])], SIZES) == {}


def test_trace_joins_kernels_with_their_operations():
    shapes = [[256, 4096], [4096, 65531], []]
    trace = {
        "traceEvents": [
            {"cat": "cpu_op", "args": {"External id": 7, "Input Dims": [*shapes, "x"]}},
            {"cat": "cpu_op", "args": {}},
            {"cat": "kernel", "ts": 5.0, "dur": 2.0, "args": {"External id": 7}},
            {"cat": "gpu_memcpy", "ts": 1.0, "dur": 1.0, "args": {}},
            {"cat": "cuda_runtime", "ts": 1.0, "dur": 9.0, "args": {"External id": 7}},
            {"ph": "M", "name": "process_name"},
        ]
    }
    assert read_trace(trace) == [Kernel(5.0, 2.0, shapes), Kernel(1.0, 1.0, [])]
