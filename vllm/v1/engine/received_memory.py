# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Memory of received multi-modal items, which the engine keeps for a long time.

A message is received into fresh memory if that of earlier ones is still in use, and the
kernel has to find and clear every page of it while the message is being copied in: for
5 MB that takes as long as the transfer. Items in the engine's cache would hold on to
the memory they came in, so each request would take fresh memory until the cache is
full.
"""

from collections.abc import Sequence

import numpy as np
import torch
import zmq

from vllm.multimodal.inputs import MultiModalFeatureSpec

_LARGE_BYTES = 2**20
"""Smaller messages find free memory that has been used before."""


def give_own_memory(
    features: Sequence[MultiModalFeatureSpec] | None, frames: Sequence[zmq.Frame]
) -> None:
    """Copy large tensors out of the message that they came in.

    Whoever holds an item may read it meanwhile: its fields change from one tensor to an
    equal one.

    Args:
        features: The request's items, or None.
        frames: The request's message.

    """
    addresses = {_address(frame) for frame in frames if len(frame) >= _LARGE_BYTES}
    if not addresses:
        return
    for feature in features or ():
        for field in (feature.data or {}).values():
            data = field.data
            if isinstance(data, torch.Tensor) and data.data_ptr() in addresses:
                field.data = _copy(data)


def _address(frame: zmq.Frame) -> int:
    return np.frombuffer(frame.buffer, np.uint8).ctypes.data


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    copy = torch.empty_like(tensor)
    # By numpy, which has one thread and releases the interpreter lock: torch would
    # start threads of its own for the caller's.
    np.copyto(_bytes(copy), _bytes(tensor))
    return copy


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.reshape(-1).view(torch.uint8).numpy()
