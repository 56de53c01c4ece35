# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Names of what is recorded while a request runs, in the order of the data path."""

from typing import Any

from torch import Tensor, nn

PIXELS = "pixels"
IDS = "ids"
FEATURES = "tower features"
VISUAL = "visual embeddings"
MERGED = "merged embeddings"
LOGITS = "first-token logits"
GREEDY = "greedy continuation"

STAGES = (PIXELS, IDS, FEATURES, VISUAL, MERGED, LOGITS, GREEDY)

COUNT = 24
"""Tokens of a greedy continuation."""

Trace = dict[str, Tensor]
"""What was recorded, by stage or layer:

- ids: int64 [prompt], -1 where an image stands
- pixels: [tiles, patches, 3 * patch**2], each patch in (channel, row, column) order
- tower layer N, tower features: [tiles, patches, width]
- visual embeddings: [tiles * tokens per tile, hidden]
- merged embeddings (as the first text layer gets them), text layer N: [prompt, hidden]
- first-token logits: [vocabulary]

Stages that need a picture are absent without one.
"""


def tower_layer(index: int) -> str:
    """Name of a tower layer's output in a trace."""
    return f"tower layer {index}"


def text_layer(index: int) -> str:
    """Name of a text layer's output in a trace."""
    return f"text layer {index}"


def data_path(tower_layers: int, text_layers: int) -> list[str]:
    """All names with a real-valued error, in the order in which they are computed."""
    return [
        *(tower_layer(index) for index in range(tower_layers)),
        FEATURES,
        VISUAL,
        MERGED,
        *(text_layer(index) for index in range(text_layers)),
        LOGITS,
    ]


def layers_of(module: nn.Module) -> nn.ModuleList:
    """The stack of layers of a tower.

    Raises:
        ValueError: If the module has no stack, or several.

    """
    stacks: list[Any] = [m for m in module.modules() if isinstance(m, nn.ModuleList)]
    if len(stacks) != 1:
        raise ValueError(
            f"{type(module).__name__} has {len(stacks)} lists of layers; one is needed"
        )
    return stacks[0]
