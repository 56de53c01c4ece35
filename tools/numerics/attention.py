# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A second attention for the reference: what differs from the first is rounding.

The reference's own attention makes the whole matrix of scores and rounds the weights to
the working dtype. This one takes the keys in blocks, with a running maximum and float32
sums, as the kernels of servers do. How far the reference moves by the change is the
noise floor that any implementation has to be allowed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from tests.reference import towers
from tests.reference.model import Ovis

BLOCK = 64
"""Keys taken at a time."""

NAME = "numerics_blockwise"


def blockwise(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    mask: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention over blocks of keys, accumulated in float32.

    Args:
        query: [batch, heads, queries, head size].
        key: [batch, heads, keys, head size].
        value: As `key`.
        scale: Factor on the scores.
        mask: Added to the scores, [batch or 1, 1, queries, keys]; finite.
        softcap: Bound on the scores, by tanh, before the mask (Gemma 2).

    Returns:
        [batch, heads, queries, head size] in the query's dtype.

    """
    wide = query.float()
    maximum = wide.new_full((*query.shape[:-1], 1), float("-inf"))
    total = torch.zeros_like(maximum)
    result = torch.zeros_like(wide)
    for start in range(0, key.shape[-2], BLOCK):
        part = slice(start, start + BLOCK)
        scores = wide @ key[..., part, :].float().transpose(-1, -2) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if mask is not None:
            scores = scores + mask[..., part].float()
        higher = torch.maximum(maximum, scores.amax(-1, keepdim=True))
        weights = torch.exp(scores - higher)
        shrink = torch.exp(maximum - higher)
        total = total * shrink + weights.sum(-1, keepdim=True)
        result = result * shrink + weights @ value[..., part, :].float()
        maximum = higher
    return (result / total).to(query.dtype)


def _attend_tower(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    return blockwise(q, k, v, q.shape[-1] ** -0.5).transpose(1, 2).flatten(2)


def _attend_text(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    groups = module.num_key_value_groups
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    out = blockwise(query, key, value, scaling, attention_mask, softcap)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _attend_text)
AttentionMaskInterface.register(NAME, eager_mask)


@contextmanager
def other_attention(model: Ovis) -> Iterator[None]:
    """Let tower and text model of the reference use `blockwise` inside the block."""
    before = model.llm.config._attn_implementation
    model.llm.set_attn_implementation(NAME)
    try:
        with mock.patch.object(towers, "attend", _attend_tower):
            yield
    finally:
        model.llm.set_attn_implementation(before)
