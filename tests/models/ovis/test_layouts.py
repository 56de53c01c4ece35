# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The converted layout: other names, the same answers."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn
from transformers import Ovis2ForConditionalGeneration

from tests.models.ovis import golden
from tests.models.ovis.converted import ADDED_TOKENS, write_converted
from tests.models.ovis.test_engine_golden import (
    GREEDY,
    TOLERANCE,
    as_request,
    golden_greedy,
    relative_error,
)
from tests.reference.model import Reference
from vllm import LLM
from vllm.models.ovis import OvisProcessor
from vllm.models.ovis.towers.aimv2 import AIMv2Tower
from vllm.models.ovis.weight_names import CHECKPOINT_NAMES

CHECKPOINT = "tiny-ovis2"


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layouts") / "tiny-ovis2-hf"
    write_converted(golden.checkpoint_path(CHECKPOINT), folder)
    return folder


@pytest.fixture(scope="module")
def port(converted: Path) -> Ovis2ForConditionalGeneration:
    """The converted folder in transformers' own class."""
    # With the loading report it returns two things, which its types do not say.
    load: Any = Ovis2ForConditionalGeneration.from_pretrained
    model, report = load(
        converted, output_loading_info=True, attn_implementation="eager"
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    return model.eval()


def case(name: str) -> dict:
    return next(c for c in golden.array_cases(CHECKPOINT) if c["name"] == name)


def array(name: str, what: str) -> np.ndarray:
    return golden.arrays()[f"{CHECKPOINT}/{name}/{what}"]


def test_names_map_onto_the_authors_names(converted: Path) -> None:
    """Every tensor of one layout has the place of one in the other."""

    def places(file: Path) -> set[str | None]:
        with safe_open(file, "pt") as stored:
            names = list(stored.keys())
        # The tower's own mapper brings query, key and value together.
        return {
            AIMv2Tower.mapper.map_name(str(CHECKPOINT_NAMES.map_name(name)))
            for name in names
        }

    authors = Path(golden.checkpoint_path(CHECKPOINT), "model.safetensors")
    assert places(converted / "model.safetensors") == places(authors)


def test_port_has_the_same_text_model(port: Ovis2ForConditionalGeneration) -> None:
    """The golden merged embeddings give the golden logits."""
    embeddings = torch.from_numpy(array("size_640x480", "inputs_embeds"))[None]
    with torch.inference_mode():
        hidden = port.model.language_model(inputs_embeds=embeddings)
        logits = port.lm_head(hidden.last_hidden_state[0, -1])
    error = relative_error(logits.numpy(), array("size_640x480", "logits"))
    assert error < TOLERANCE


def test_port_has_the_same_tower_but_for_its_final_norm(
    port: Ovis2ForConditionalGeneration,
) -> None:
    """Without that norm the port's embeddings are the golden ones; with it, others."""
    chosen = case("two_different_grids")
    pictures = [golden.authors_view(image) for image in golden.case_images(chosen)]
    reference = Reference(golden.checkpoint_path(CHECKPOINT))
    _, pixels = reference.prepare(
        pictures, chosen["conversation"], max_partition=chosen["max_partition"]
    )
    expected = array("two_different_grids", "visual_embeds")
    transformer = port.model.vision_tower.transformer
    norm = transformer.rms_norm

    def embeddings() -> np.ndarray:
        with torch.inference_mode():
            features = port.model.get_image_features(pixels).pooler_output
        return features.reshape(expected.shape).numpy()

    assert relative_error(embeddings(), expected) > 100 * TOLERANCE
    try:
        transformer.rms_norm = nn.Identity()
        assert relative_error(embeddings(), expected) < TOLERANCE
        rows = port.model.get_image_features(pixels).visual_indicator_features
    finally:
        transformer.rms_norm = norm
    table = reference.model.vte.weight
    assert torch.equal(rows.reshape(5, -1), table[-5:])


def test_processor_reads_the_converted_layout(converted: Path) -> None:
    """The same ids and bytes, positions held by the layout's own token."""
    ours = OvisProcessor.from_pretrained(str(converted))
    authors = OvisProcessor.from_pretrained(golden.checkpoint_path(CHECKPOINT))
    atom = ours.tokenizer.convert_tokens_to_ids(ADDED_TOKENS[0])
    assert ours.image_pad_id == atom != authors.image_pad_id
    assert dataclasses.asdict(ours.image_settings) == dataclasses.asdict(
        authors.image_settings
    )
    chosen = case("two_different_grids")
    prompt, images = chosen["expected"]["prompt"], golden.case_images(chosen)
    mine, theirs = (p(text=prompt, images=images) for p in (ours, authors))
    pads = {authors.image_pad_id: atom}
    assert mine["input_ids"][0] == [pads.get(i, i) for i in theirs["input_ids"][0]]
    for key in ("pixel_values", "rectangles", "grids"):
        assert np.array_equal(mine[key], theirs[key])


@pytest.fixture(scope="module")
def engine(converted: Path) -> Iterator[LLM]:
    llm = LLM(
        str(converted),
        dtype="float32",
        enforce_eager=True,
        max_model_len=4096,
        max_num_seqs=8,
        limit_mm_per_prompt={"image": 8},
        mm_processor_kwargs={"max_partition": 16},
        generation_config="vllm",
    )
    yield llm
    llm.llm_engine.engine_core.shutdown()


def test_converted_layout_answers_as_the_authors(engine: LLM) -> None:
    """Greedy tokens of every array case, in one batch."""
    cases = golden.array_cases(CHECKPOINT)
    outputs = engine.generate([as_request(c) for c in cases], GREEDY)
    expected = golden_greedy(CHECKPOINT)
    wrong = [
        c["name"]
        for c, output in zip(cases, outputs, strict=True)
        if list(output.outputs[0].token_ids) != expected[c["name"]]
    ]
    assert not wrong


def test_converted_layout_chats(engine: LLM) -> None:
    """Picture parts reach the authors' prompt."""
    chosen = case("size_640x480")
    (image,) = golden.case_images(chosen)
    question = chosen["conversation"].removeprefix("<image>\n")
    content = [
        {"type": "image_pil", "image_pil": image},
        {"type": "text", "text": question},
    ]
    output = engine.chat(
        [{"role": "user", "content": content}],
        GREEDY,
        mm_processor_kwargs={"max_partition": chosen["max_partition"]},
        use_tqdm=False,
    )[0]
    assert (
        list(output.outputs[0].token_ids) == golden_greedy(CHECKPOINT)["size_640x480"]
    )
