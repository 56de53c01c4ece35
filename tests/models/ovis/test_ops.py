# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Kernels against the plain formula, on whatever device there is."""

import pytest
import torch
import torch.nn.functional as F

from vllm.models.ovis.ops import word_probabilities_
from vllm.platforms import current_platform

# Rounding a normalised logit of about 8 moves its probability by 8 times the type's
# relative step.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 0.06, torch.float16: 0.008}
DEVICE = "cuda" if current_platform.is_cuda_alike() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("words, padded", [(507, 512), (64, 64), (65531, 65536)])
def test_word_probabilities(dtype: torch.dtype, words: int, padded: int) -> None:
    torch.manual_seed(words)
    logits = torch.randn(9, padded, device=DEVICE).mul(3).add(4).to(dtype)
    weight = torch.randn(words, device=DEVICE).mul(2).to(dtype)
    bias = torch.randn(words, device=DEVICE).to(dtype)

    normed = F.layer_norm(
        logits[:, :words].double(), (words,), weight.double(), bias.double(), 1e-5
    )
    expected = normed.to(dtype).double().softmax(-1)
    actual = word_probabilities_(logits, words, weight, bias, 1e-5)

    assert actual.data_ptr() == logits.data_ptr()
    assert not actual[:, words:].any()
    error = (actual[:, :words].double() - expected).norm() / expected.norm()
    assert error < TOLERANCE[dtype]
