# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Access to the numbers made by the authors' code (tests/golden/ovis2)."""

import importlib.util
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

GOLDEN = Path(__file__).parents[2] / "golden" / "ovis2"
CHECKPOINTS = ("tiny-ovis2", "tiny-ovis1.6-gemma2", "tiny-ovis1.6-llama")


@cache
def all_cases() -> list[dict[str, Any]]:
    """Every case of every checkpoint."""
    return json.loads((GOLDEN / "cases.json").read_text())


@cache
def arrays() -> dict[str, np.ndarray]:
    """All arrays, keyed CHECKPOINT/CASE/WHAT."""
    with np.load(GOLDEN / "arrays.npz") as stored:
        return dict(stored)


def checkpoint_path(checkpoint: str) -> str:
    """Folder of a golden checkpoint."""
    return str(GOLDEN / "checkpoints" / checkpoint)


def array_cases(checkpoint: str) -> list[dict[str, Any]]:
    """Cases of a checkpoint that have embeddings, logits and greedy tokens."""
    return [
        case
        for case in all_cases()
        if case["checkpoint"] == checkpoint
        and f"{checkpoint}/{case['name']}/greedy" in arrays()
    ]


@cache
def _image_maker() -> Any:
    spec = importlib.util.spec_from_file_location("golden_images", GOLDEN / "images.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.make_image


def case_images(case: dict[str, Any]) -> list[Image.Image]:
    """Draw the pictures of a case."""
    return [
        _image_maker()(i["kind"], i["w"], i["h"], i["seed"], i["mode"])
        for i in case["images"]
    ]


def authors_view(image: Image.Image) -> Image.Image:
    """What the authors' code sees of a picture: they drop transparency.

    The engine composites it on white instead (a documented difference), so parity
    beyond the pixels is checked on the picture without it.
    """
    return image.convert("RGB")
