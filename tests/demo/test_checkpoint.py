# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The demo checkpoint, its pictures, and the parts of its training."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.reference.model import Ovis, Reference  # noqa: E402
from tests.reference.preprocess import preprocess  # noqa: E402
from tools.demo_data.glyphs import ALPHABET, FACES, text_mask  # noqa: E402
from tools.demo_data.scenes import TASKS, draw, is_heldout, make_sample  # noqa: E402
from tools.demo_train.checkpoint import (  # noqa: E402
    build_tokenizer,
    model_config,
    write_checkpoint,
)
from tools.demo_train.examples import (  # noqa: E402
    CELLS,
    PATCHES,
    ExampleMaker,
    picture_arrays,
    shapes,
)
from tools.demo_train.network import (  # noqa: E402
    Scaling,
    merged,
    normalise,
    recolour,
    start_values,
    text_hidden,
)
from tools.demo_train.pool import ONE, Mix, Pool  # noqa: E402
from tools.evaluate_demo import check_is_met, reference_answerer  # noqa: E402

DEMO = ROOT / "demo"
SAMPLES = json.loads((DEMO / "samples.json").read_text("utf-8"))
CPU = torch.device("cpu")


@cache
def reference() -> Reference:
    return Reference(DEMO / "tiny-ovis2")


@cache
def maker() -> ExampleMaker:
    return ExampleMaker(build_tokenizer())


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s["images"][0])
def test_sample_is_answered(sample):
    images = [Image.open(DEMO / name) for name in sample["images"]]
    answer = reference().answer(
        images, sample["question"], sample.get("max_partition", 9)
    )
    assert answer == sample["answer"]


@pytest.mark.parametrize("task", TASKS)
def test_heldout_pictures_are_read(task):
    """A few of the pictures that tools/evaluate_demo.py measures in full."""
    first = json.loads((DEMO / "heldout.json").read_text("utf-8"))["seeds"][0]
    right = 0
    for seed in range(first, first + 20):
        images, question, answer = make_sample(task, seed)
        right += reference().answer(images, question) == answer
    assert right >= 18


@pytest.mark.parametrize("task, most", [("detail", 10), ("small_text", 1)])
def test_details_need_tiles(task, most):
    right = 0
    for seed in range(10000, 10020):
        images, question, answer = make_sample(task, seed)
        right += reference().answer(images, question, max_partition=1) == answer
    assert right <= most


def test_the_engine_scores_as_the_reference(capsys):
    """`--engine-arguments` has the engine answer the same pictures."""
    plan = json.loads((DEMO / "heldout.json").read_text("utf-8"))
    first = plan["seeds"][0]
    with reference_answerer(DEMO / "tiny-ovis2", "float32") as answer:
        for check in plan["checks"]:
            assert check_is_met(check, range(first, first + 1), answer)
    command = [sys.executable, "tools/evaluate_demo.py", "--count", "1"]
    done = subprocess.run(
        [*command, "--engine-arguments", '{"max_num_seqs": 4}'],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(capsys.readouterr().out)


def test_weights_use_the_whole_vocabulary():
    """The visual softmax has not collapsed to a few words."""
    images, question, _ = make_sample("read", 1)
    _, pixels = reference().prepare(images, "<image>\n" + question)
    tokenizer = reference().model.visual_tokenizer
    with torch.inference_mode():
        words = tokenizer.probabilities(tokenizer.features(pixels))
    perplexity = torch.exp(-(words * words.clamp(min=1e-12).log()).sum(-1)).mean()
    assert perplexity > 5


@pytest.mark.parametrize("task", TASKS)
def test_samples_are_reproducible_and_varied(task):
    first, again = make_sample(task, 3), make_sample(task, 3)
    assert first[1:] == again[1:]
    assert [i.tobytes() for i in first[0]] == [i.tobytes() for i in again[0]]
    answers = {make_sample(task, seed)[2] for seed in range(40)}
    assert len(answers) > 3


def test_unknown_task_is_refused():
    with pytest.raises(ValueError, match="juggle"):
        make_sample("juggle", 0)


@pytest.mark.parametrize("task", ["read", "small_text"])
def test_training_never_draws_a_heldout_string(task):
    for seed in range(200):
        assert is_heldout(draw(task, seed, heldout=True).answer)
        trained = draw(task, seed, heldout=False).answer
        assert len(trained) <= 2 or not is_heldout(trained)


@pytest.mark.parametrize("face", FACES)
def test_every_character_is_drawn_apart(face):
    masks = {text_mask(c, face, 20)[0].resize((16, 16)).tobytes() for c in ALPHABET}
    assert len(masks) == len(ALPHABET)
    mask, centres = text_mask("A8Z", face, 20)
    assert 0 < centres[0] < centres[1] < centres[2] < mask.width
    assert 17 <= mask.height <= 24


def test_unknown_face_is_refused():
    with pytest.raises(ValueError, match="gothic"):
        text_mask("A", "gothic", 20)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("max_partition", [1, 9])
def test_training_tiles_equal_the_reference(task, max_partition):
    rule = reference().rule
    for picture in draw(task, 5).pictures:
        grid, tiles = picture_arrays(picture, max_partition)
        pixels, expected_grid = preprocess(picture.image, rule, max_partition)
        stacked = {
            k: torch.from_numpy(np.stack([t[k] for t in tiles])) for k in tiles[0]
        }
        actual = normalise(
            stacked["tiles"], stacked["content"], Scaling.of(rule, CPU)
        ).numpy()
        assert grid == expected_grid
        np.testing.assert_allclose(actual, pixels, atol=2e-6)


@pytest.mark.parametrize("task", TASKS)
def test_example_arrays_have_the_declared_shapes(task):
    layout, example = maker().make(task, 1, heldout=True)
    declared = shapes(layout)
    assert example.keys() == declared.keys()
    for name, (shape, dtype) in declared.items():
        assert example[name].shape == shape and example[name].dtype == dtype


def test_targets_tell_where_things_are():
    sample = draw("read", 2)
    _, tiles = picture_arrays(sample.pictures[0], 1)
    slots = tiles[0]["slots"].reshape(CELLS * CELLS, -1)
    patches = tiles[0]["patch"]
    numbers = [1 + ALPHABET.index(c) for c in sample.answer]
    assert [int(slots[:, k].max()) for k in range(len(numbers))] == numbers
    assert sorted(p for p in patches.tolist() if p > 0) == sorted(numbers)
    assert patches.shape == (PATCHES * PATCHES,)


def test_training_prompt_equals_the_prompt_served():
    """Embeddings assembled for training are those of the reference's merge."""
    ref = reference()
    for task in ("describe", "two_images", "detail"):
        sample = draw(task, 4)
        layout, example = maker().make(task, 4, heldout=True)
        images = [p.image for p in sample.pictures]
        text = "<image>\n" * len(images) + sample.question
        ids, pixels = ref.prepare(images, text)
        frame = tuple(torch.tensor(i) for i in maker().frame())
        suffix = torch.from_numpy(example["suffix"]).long()[None]
        with torch.inference_mode():
            visual = ref.model.visual_embeddings(pixels)
            expected = ref.model.merge(ids, visual)
            actual = merged(ref.model, frame, layout, visual[None], suffix)[0]
        # Training goes on where the prompt ends: answer, end mark, padding.
        answer = example["answer"].tolist()
        rest = suffix.shape[1] - answer[0]
        assert torch.equal(actual[: len(actual) - rest], expected)
        said = example["suffix"][answer[0] : answer[1]].tolist()
        assert ref.tokenizer.decode(said) == f"{sample.answer}<|im_end|>"


def test_text_model_of_training_equals_the_stock_one():
    model = reference().model
    x = torch.randn(2, 40, 256, generator=torch.Generator().manual_seed(0)) * 0.1
    with torch.inference_mode():
        stock = model.llm.model(inputs_embeds=x, use_cache=False).last_hidden_state
        ours = text_hidden(model, x)
    torch.testing.assert_close(ours, stock, atol=1e-4, rtol=1e-4)


def test_training_starts_with_an_open_vocabulary():
    """Before the first step the softmax is wide, and odd around its mean."""
    model = Ovis(model_config(build_tokenizer()))
    start_values(model, seed=0)
    features = torch.randn(1, 16, 768, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        words = model.visual_tokenizer.probabilities(features)
        table = model.vte.weight[: words.shape[-1]]
        there, back = (
            words @ table,
            model.visual_tokenizer.probabilities(-features) @ table,
        )
    perplexity = torch.exp(-(words * words.log()).sum(-1)).mean()
    assert perplexity > 200
    torch.testing.assert_close(there, -back, atol=0.02, rtol=0)


def test_recolouring_spares_what_colour_decides():
    tiles = torch.randint(0, 256, (64, 1, 4, 4, 3), dtype=torch.uint8)
    chosen = torch.arange(64) % 2 == 0
    changed = recolour(tiles, chosen)
    same = (changed == tiles).flatten(1).all(1)
    assert same[1::2].all() and not same[::2].all()
    contrast = (tiles.int() - 128).abs().sum(-1)
    # Order and inversion (255 - v) leave the distance from the middle as it is.
    assert ((changed.int() - 128).abs().sum(-1) - contrast).abs().max() <= 3


def test_written_checkpoint_is_readable(tmp_path):
    tokenizer = build_tokenizer()
    model = Ovis(model_config(tokenizer))
    start_values(model, seed=0)
    write_checkpoint(tmp_path, model.state_dict(), tokenizer)
    read = Reference(tmp_path)
    assert torch.equal(
        read.model.vte.weight, model.vte.weight.detach().bfloat16().float()
    )
    shipped = {p.name for p in (DEMO / "tiny-ovis2").iterdir()}
    assert {p.name for p in tmp_path.iterdir()} == shipped
    for name in shipped - {"model.safetensors"}:
        assert (tmp_path / name).read_text() == (DEMO / "tiny-ovis2" / name).read_text()


def test_pool_hands_over_what_workers_draw():
    mix = Mix((ONE,), {"colour": 1.0})
    pool = Pool(build_tokenizer(), mix, lambda layout: 200, workers=1, seed=3)
    try:
        pool.start(CPU)
        pool.wait({ONE: 100})
        batch = pool.batch(ONE, 8)
    finally:
        pool.close()
    assert batch["tiles"].shape == (8, 1, 112, 112, 3)
    assert (batch["colour"].amax((1, 2)) > 0).all()
    assert (batch["task"] == TASKS.index("colour")).all()
