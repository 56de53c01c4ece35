# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The prepared layout: tokens of its own, a file of its own, the same answers."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tests.models.ovis import golden
from tests.models.ovis.test_engine_golden import GREEDY, as_request, golden_greedy
from vllm import LLM
from vllm.models.ovis import OvisProcessor
from vllm.models.ovis.chat import format_conversation, turn_format
from vllm.models.ovis.prepare import (
    ADDED_TOKENS,
    chat_template,
    main,
    next_token_id,
    prepare,
)

CHECKPOINT = "tiny-ovis2"
SOURCE = Path(golden.checkpoint_path(CHECKPOINT))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared") / "tiny"
    assert main([str(SOURCE), str(folder)]) == 0
    return folder


def read(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text())


def chosen_case() -> dict[str, Any]:
    cases = golden.array_cases(CHECKPOINT)
    return next(c for c in cases if c["name"] == "two_different_grids")


def test_tokens_get_the_next_free_ids(prepared: Path) -> None:
    tokenizer = OvisProcessor.from_pretrained(str(prepared)).tokenizer
    ids = tokenizer.convert_tokens_to_ids(list(ADDED_TOKENS))
    first = next_token_id(read(SOURCE, "tokenizer.json"))
    assert ids == list(range(first, first + 8))
    assert read(prepared, "config.json")["image_token_id"] == ids[-1]
    for token, token_id in zip(ADDED_TOKENS, ids, strict=True):
        assert tokenizer.encode(f"a{token}b", add_special_tokens=False)[1] == token_id


def test_released_vocabulary_gives_the_ids_of_the_first_port() -> None:
    added = [{"id": 151643 + k, "content": f"<|{k}|>"} for k in range(22)]
    released = {"model": {"vocab": {"z": 151642}}, "added_tokens": added}
    assert next_token_id(released) == 151665


def test_config_shows_the_text_models_sizes(prepared: Path) -> None:
    config, text = read(prepared, "config.json"), read(SOURCE, "config.json")
    for size in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads"):
        assert config[size] == text["llm_config"][size]
    assert config["vocab_size"] == text["llm_config"]["vocab_size"]
    assert config["llm_config"] == text["llm_config"]


@pytest.mark.parametrize("copied", [False, True], ids=["linked", "copied"])
def test_weights_are_linked_or_copied(
    copied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*paths: Any) -> None:
        raise OSError("another file system")

    source = tmp_path / "source"
    shutil.copytree(SOURCE, source)
    if copied:
        monkeypatch.setattr(os, "link", refuse)
    prepare(source, tmp_path / "target")
    weights, original = (f / "model.safetensors" for f in (tmp_path / "target", source))
    assert weights.samefile(original) == (not copied)
    assert weights.read_bytes() == original.read_bytes()


def test_both_layouts_have_the_same_ids_and_tiles(prepared: Path) -> None:
    """All ids but the one that holds image positions."""
    ours = OvisProcessor.from_pretrained(str(prepared))
    authors = OvisProcessor.from_pretrained(str(SOURCE))
    for case in golden.array_cases(CHECKPOINT):
        images = [golden.authors_view(image) for image in golden.case_images(case)]
        prompt, cells = case["expected"]["prompt"], case["max_partition"]
        mine, theirs = (
            p(text=prompt, images=images, max_partition=cells) for p in (ours, authors)
        )
        pads = {authors.image_pad_id: ours.image_pad_id}
        ids = theirs["input_ids"][0]
        assert mine["input_ids"][0] == [pads.get(i, i) for i in ids]
        for key in theirs.keys() - {"input_ids"}:
            assert np.array_equal(mine[key], theirs[key])


AUTO_PROCESSOR = """
import sys
sys.modules["vllm"] = None  # Whatever imports it fails.
import json, hashlib
from PIL import Image
from transformers import AutoProcessor
folder, text, *files = sys.argv[1:]
processor = AutoProcessor.from_pretrained(folder, trust_remote_code=True)
batch = processor(text=text, images=[Image.open(file) for file in files])
pixels = hashlib.sha256(batch["pixel_values"].tobytes()).hexdigest()
print(json.dumps([batch["input_ids"], pixels]))
"""


def test_processing_file_works_without_vllm(prepared: Path, tmp_path: Path) -> None:
    """`AutoProcessor` with the repository's own file gives the engine's inputs."""
    case = chosen_case()
    files = []
    for index, image in enumerate(golden.case_images(case)):
        image.convert("RGB").save(tmp_path / f"{index}.png")
        files.append(str(tmp_path / f"{index}.png"))
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", AUTO_PROCESSOR, str(prepared)]
    done = subprocess.run(
        [*command, case["expected"]["prompt"], *files],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ids, pixels = json.loads(done.stdout.splitlines()[-1])
    ours = OvisProcessor.from_pretrained(str(prepared))(
        text=case["expected"]["prompt"],
        images=[golden.authors_view(i) for i in golden.case_images(case)],
    )
    assert ids == ours["input_ids"]
    assert pixels == sha256(ours["pixel_values"])


def sha256(array: np.ndarray) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "llama"])
@pytest.mark.parametrize("opened", [True, False])
def test_chat_template_writes_what_the_formatter_writes(
    family: str, opened: bool
) -> None:
    parts = [{"type": "image"}, {"type": "text", "text": ' What "is"\tthis? \n'}]
    conversation = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": " A 'cat'. "},
        {"role": "user", "content": "And\n<image>\nthis?"},
    ]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    style = turn_format(family)
    template = environment.from_string(chat_template(style))
    conversations = [conversation]
    if style.default_system is not None:
        conversations.append(
            [{"role": "system", "content": "Be brief."}, *conversation]
        )
    for messages in conversations:
        text = template.render(messages=messages, add_generation_prompt=opened)
        expected = format_conversation(messages, style, add_generation_prompt=opened)
        assert text == expected


def test_refuses_to_overwrite(prepared: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{tmp_path} exists"):
        prepare(SOURCE, tmp_path)
    with pytest.raises(ValueError, match="<image>.*already"):
        prepare(prepared, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_refuses_a_full_vocabulary(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(SOURCE, source)
    config = read(source, "config.json")
    config["llm_config"]["vocab_size"] = 707 + 7
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="room for 7 more tokens.*needs 8"):
        prepare(source, tmp_path / "target")


def test_refuses_another_layout(tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit) as stop:
        main([str(tmp_path), str(tmp_path / "target")])
    assert stop.value.code == 2
    assert "has no config.json" in capsys.readouterr().err


@pytest.fixture(scope="module")
def engine(prepared: Path) -> Iterator[LLM]:
    llm = LLM(
        str(prepared),
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


def test_prepared_layout_answers_as_the_authors(engine: LLM) -> None:
    """Greedy tokens of every array case; none of the repository's code is run."""
    assert not engine.llm_engine.model_config.trust_remote_code
    cases = golden.array_cases(CHECKPOINT)
    outputs = engine.generate([as_request(c) for c in cases], GREEDY)
    expected = golden_greedy(CHECKPOINT)
    wrong = [
        c["name"]
        for c, output in zip(cases, outputs, strict=True)
        if list(output.outputs[0].token_ids) != expected[c["name"]]
    ]
    assert not wrong
