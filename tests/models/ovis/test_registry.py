# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Every Ovis architecture of the engine resolves to a class that can be imported."""

import pytest
import torch

from vllm.model_executor.models.ovis import VisualEmbedding
from vllm.model_executor.models.registry import ModelRegistry


@pytest.mark.parametrize(
    "architecture",
    [name for name in ModelRegistry.get_supported_archs() if name.startswith("Ovis")],
)
def test_architecture_can_be_imported(architecture: str) -> None:
    """Ovis 2.5 and 2.6 stay the engine's own and build on the replaced module."""
    assert ModelRegistry._try_load_model_cls(architecture) is not None


def test_visual_embedding_mixes_and_looks_up() -> None:
    table = VisualEmbedding(4, 3)
    rows = torch.tensor([2, 0])
    with torch.inference_mode():
        one_hot = torch.eye(4)[rows]
        assert torch.equal(table(one_hot), table.weight[rows])
        assert torch.equal(table(rows), table.weight[rows])
