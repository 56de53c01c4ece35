# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""How each build turns a decoded picture into tiles."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from PIL import Image

SIDE = 448
MAX_PARTITION = 9

Prepare = Callable[[Image.Image], Any]


def load_fork() -> Prepare:
    """The fork's preparation: uint8 tiles."""
    from vllm.models.ovis.images import tile_image

    return lambda image: tile_image(image, SIDE, MAX_PARTITION)


def load_release() -> Prepare | None:
    """The release's own preparation, float tiles; None if it is not installed.

    Only what preparing a picture needs is built: no checkpoint, no tokenizer.
    """
    try:
        import torch
        from transformers import CLIPImageProcessor

        from vllm.transformers_utils.processors.ovis import OvisProcessor
    except ImportError:
        return None
    if not hasattr(OvisProcessor, "preprocess_image"):
        return None
    torch.set_num_threads(1)
    processor: Any = OvisProcessor.__new__(OvisProcessor)
    processor.image_processor = CLIPImageProcessor(
        crop_size={"height": SIDE, "width": SIDE},
        size={"shortest_edge": SIDE},
        do_center_crop=False,
    )
    processor.image_pad_token = "<|image_pad|>"
    processor.image_segment_len = 255
    processor.tokenizer = SimpleNamespace(get_vocab=lambda: {"<|image_pad|>": 0})
    return lambda image: processor.preprocess_image(
        image, MAX_PARTITION, 0.9, True, "pt"
    )


def load_installed() -> Prepare:
    """The preparation of the vLLM that is installed."""
    return load_release() or load_fork()
