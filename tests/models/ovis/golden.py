# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Access to the numbers made by the authors' code (tests/golden/ovis2)."""

import importlib.util
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

GOLDEN = Path(__file__).parents[2] / "golden" / "ovis2"
CHECKPOINTS = ("tiny-ovis2", "tiny-ovis1.6-gemma2", "tiny-ovis1.6-llama")


@cache
def all_cases() -> list[dict[str, Any]]:
    """Every case of every checkpoint."""
    return json.loads((GOLDEN / "cases.json").read_text())


TILE_ID = -300
"""Stands for one tile's tokens in the recorded `input_ids`."""


@cache
def arrays() -> dict[str, np.ndarray]:
    """All arrays, keyed CHECKPOINT/CASE/WHAT.

    `visual_embeds`, [tiles, tokens_per_tile, hidden], is not stored: its rows stand in
    `inputs_embeds`, where the tiles are.
    """
    with np.load(GOLDEN / "arrays.npz") as stored:
        found = dict(stored)
    for case in all_cases():
        key = f"{case['checkpoint']}/{case['name']}"
        if case["images"] and f"{key}/inputs_embeds" in found:
            ids = case["expected"]["input_ids"]
            found[f"{key}/visual_embeds"] = _tile_rows(
                found[f"{key}/inputs_embeds"], ids
            )
    return found


def _tile_rows(merged: np.ndarray, ids: list[int]) -> np.ndarray:
    tokens_per_tile = (len(merged) - len(ids)) // ids.count(TILE_ID) + 1
    tiles, position = [], 0
    for token in ids:
        length = tokens_per_tile if token == TILE_ID else 1
        if token == TILE_ID:
            tiles.append(merged[position : position + length])
        position += length
    return np.stack(tiles)


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
def _images_module() -> Any:
    spec = importlib.util.spec_from_file_location("golden_images", GOLDEN / "images.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_image(
    kind: str, width: int, height: int, seed: int, mode: str = "RGB"
) -> Image.Image:
    """Draw a picture of the recording's kinds; the same bytes everywhere."""
    return _images_module().make_image(kind, width, height, seed, mode)


def draw(image: dict[str, Any]) -> Image.Image:
    """Draw one picture of a case, checked against its recorded hash."""
    size = image["w"], image["h"]
    picture = make_image(image["kind"], *size, image["seed"], image["mode"])
    expected = image.get("source_sha256")
    assert expected in (None, _images_module().pixel_sha256(picture))
    return picture


def case_images(case: dict[str, Any]) -> list[Image.Image]:
    """Draw the pictures of a case."""
    return [draw(image) for image in case["images"]]


def case_id(case: dict[str, Any]) -> str:
    """Name of a case among those of all checkpoints."""
    return f"{case['checkpoint']}-{case['name']}"


def image_parameters() -> Iterator[Any]:
    """Every recorded picture as pytest parameters: case, picture, expected values."""
    for case in all_cases():
        pairs = zip(case["images"], case["expected"].get("images", []))
        for index, (image, expected) in enumerate(pairs):
            yield pytest.param(case, image, expected, id=f"{case_id(case)}-{index}")


def authors_view(image: Image.Image) -> Image.Image:
    """What the authors' code sees of a picture: they drop transparency.

    The engine composites it on white instead (a documented difference), so parity
    beyond the pixels is checked on the picture without it.
    """
    return image.convert("RGB")
