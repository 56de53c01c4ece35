# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Received items move out of the buffers of their messages."""

import contextlib
import queue
import threading
import time
from types import SimpleNamespace
from typing import Any

import torch
import zmq

from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.v1.engine import EngineCoreRequest, EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.received_memory import give_own_memory
from vllm.v1.serial_utils import MsgpackEncoder


def feature(**tensors: torch.Tensor | None) -> MultiModalFeatureSpec:
    fields = {
        name: MultiModalFieldElem(tensor, MultiModalBatchedField())
        for name, tensor in tensors.items()
    }
    return MultiModalFeatureSpec(
        data=MultiModalKwargsItem(fields),
        modality="image",
        identifier="a",
        mm_position=PlaceholderRange(offset=0, length=1),
    )


def data_of(item: MultiModalFeatureSpec, name: str) -> Any:
    assert item.data is not None
    return item.data[name].data


def frame_of(tensor: torch.Tensor) -> tuple[zmq.Frame, torch.Tensor]:
    """A received message and the tensor that lies in it."""
    frame = zmq.Frame(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    received = torch.frombuffer(frame.buffer, dtype=torch.uint8)
    return frame, received.view(tensor.dtype).view(tensor.shape)


def test_large_tensors_leave_their_message():
    wanted = torch.arange(2**19 * 3, dtype=torch.float32).bfloat16().view(3, -1, 4)
    frame, received = frame_of(wanted)
    item = feature(pixels=received)
    give_own_memory([item], [frame])
    moved = data_of(item, "pixels")
    assert moved.data_ptr() != received.data_ptr()
    assert moved.dtype == wanted.dtype and torch.equal(moved, wanted)


def test_all_else_stays_where_it_is():
    frame, large = frame_of(torch.ones(2**20, dtype=torch.uint8))
    small_frame, small = frame_of(torch.ones(2**10, dtype=torch.uint8))
    earlier = torch.ones(2**20, dtype=torch.uint8)
    item = feature(small=small, earlier=earlier, cached=None)
    without_data = feature()
    without_data.data = None
    give_own_memory([item, without_data], [frame, small_frame])
    assert data_of(item, "small") is small
    assert data_of(item, "earlier") is earlier
    assert data_of(item, "cached") is None
    give_own_memory(None, [frame])


def test_engine_gives_cached_items_memory_of_their_own(tmp_path):
    pixels = torch.arange(2**18).view(2, -1)
    decoded: list[tuple[MultiModalFieldElem, torch.Tensor]] = []

    def add(request):
        field = request.mm_features[0].data["pixels"]
        decoded.append((field, field.data))
        return request, 0

    core = SimpleNamespace(
        tensor_ipc_receiver=None,
        mm_receiver_cache=object(),
        input_queue=queue.Queue(),
        preprocess_add_request=add,
        _make_ready_response=lambda: None,
    )

    def receive():
        # An unknown kind of message ends it.
        with contextlib.suppress(ValueError):
            EngineCoreProc.process_input_sockets(
                core, [address], None, b"engine", threading.Event()
            )

    address = f"ipc://{tmp_path}/socket"
    message = MsgpackEncoder().encode(
        EngineCoreRequest(
            *("a", [1], [feature(pixels=pixels)], None, None, 0.0),
            *(None, None, None),
        )
    )
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.bind(address)
        thread = threading.Thread(target=receive)
        thread.start()
        identity, _ = socket.recv_multipart()
        kind = EngineCoreRequestType.ADD.value
        socket.send_multipart([identity, kind, *message])
        core.input_queue.get(timeout=60)
        ((field, received),) = decoded
        deadline = time.monotonic() + 60
        while field.data is received and time.monotonic() < deadline:
            time.sleep(0.01)
        socket.send_multipart([identity, b"end"])
        thread.join(60)
    assert isinstance(field.data, torch.Tensor)
    assert field.data.data_ptr() != received.data_ptr()
    assert torch.equal(field.data, pixels)
