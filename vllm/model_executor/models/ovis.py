# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Ovis 1.6 and 2; the code lives in `vllm.models.ovis`."""

import torch
from torch import nn

from vllm.models.ovis.model import Ovis

__all__ = ["Ovis", "VisualEmbedding"]


class VisualEmbedding(nn.Embedding):
    """The whole visual embedding table on every rank, as Ovis 2.5 and 2.6 use it."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Mix rows of the table, or look them up.

        Args:
            tokens: Floating, [..., num_embeddings]: a weight for each row. Or integer,
                [...]: a row each.

        Returns:
            [..., embedding_dim] in the table's type.

        """
        if tokens.is_floating_point():
            return tokens.to(self.weight.dtype) @ self.weight
        return super().forward(tokens)
