# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Kernels of the visual vocabulary, with plain torch where Triton does not run."""

import torch
import torch.nn.functional as F

from vllm.platforms import current_platform
from vllm.triton_utils import HAS_TRITON, tl, triton


def word_probabilities_(
    logits: torch.Tensor,
    num_words: int,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Turn rows of logits into probabilities, in place: softmax(LayerNorm(logits)).

    Statistics run over the first `num_words` columns; the rest becomes zero. The
    normalised logits are rounded to the logits' type before the softmax, as the
    authors' two separate steps do.

    Args:
        logits: [tokens, padded words], contiguous rows; overwritten.
        num_words: Columns that stand for words.
        weight: [num_words], LayerNorm's weight.
        bias: [num_words], LayerNorm's bias.
        eps: LayerNorm's epsilon.

    Returns:
        `logits`.

    """
    if HAS_TRITON and current_platform.is_cuda_alike():
        padded = logits.shape[1]
        # One read and one write: a whole row stays in the registers of one program.
        _word_probabilities_kernel[(logits.shape[0],)](
            logits,
            weight,
            bias,
            logits.stride(0),
            num_words,
            padded,
            eps,
            BLOCK=triton.next_power_of_2(padded),
            num_warps=32 if padded > 8192 else 4,
        )
        return logits
    words = logits[:, :num_words]
    normed = F.layer_norm(words, (num_words,), weight, bias, eps)
    logits[:, :num_words] = normed.softmax(dim=-1)
    logits[:, num_words:] = 0
    return logits


@triton.jit
def _word_probabilities_kernel(
    logits,
    weight,
    bias,
    row_stride,
    num_words,
    padded,
    eps,
    BLOCK: tl.constexpr,
):
    row = logits + tl.program_id(0).to(tl.int64) * row_stride
    columns = tl.arange(0, BLOCK)
    is_word = columns < num_words
    x = tl.load(row + columns, mask=is_word, other=0.0).to(tl.float32)
    mean = tl.sum(x, 0) / num_words
    x = tl.where(is_word, x - mean, 0.0)
    scale = tl.rsqrt(tl.sum(x * x, 0) / num_words + eps)
    gain = tl.load(weight + columns, mask=is_word, other=0.0).to(tl.float32)
    shift = tl.load(bias + columns, mask=is_word, other=0.0).to(tl.float32)
    x = x * scale * gain + shift
    x = x.to(logits.dtype.element_ty).to(tl.float32)
    x = tl.where(is_word, x, float("-inf"))
    x = tl.exp(x - tl.max(x, 0))
    x = x / tl.sum(x, 0)
    tl.store(row + columns, x.to(logits.dtype.element_ty), mask=columns < padded)
