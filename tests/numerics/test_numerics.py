# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The numerics report: its rules by themselves, then on a small checkpoint.

The engine runs in a process of its own: the report sets what vLLM reads at import.
"""

import json
import math
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.ovis import golden
from tests.reference.model import Reference
from tools.numerics import __main__ as command
from tools.numerics import batches, operators, options, plot, reference, tables, trace
from tools.numerics.attention import blockwise, other_attention
from tools.numerics.cases import Case, batch_cases, stage_cases
from tools.numerics.records import Record, bad, difference, relative_bound, verdict
from tools.numerics.stages import (
    References,
    StageErrors,
    compare_tokens,
    like,
    mark_images,
)

ROOT = Path(__file__).parents[2]
CHECKPOINT = golden.checkpoint_path("tiny-ovis2")
CASE = Case("two grids", ((90, 60), (224, 112)), "What do you see?")


@pytest.fixture(scope="module")
def ref() -> Reference:
    return reference.load(CHECKPOINT, "cpu")


@pytest.fixture(scope="module")
def prompt(ref: Reference) -> reference.Prompt:
    return reference.prepare(ref, CASE)


def engine_like(
    ref: Reference, prompt: reference.Prompt, dtype: str = "float32"
) -> tuple[trace.Trace, list[int]]:
    """A trace as an engine without faults makes it: the reference's, with its ids."""
    model = reference.in_dtype(ref.model, getattr(torch, dtype))
    tokens: list[int] = []
    while len(tokens) < 4:
        _, logits = reference.run(model, prompt, [*tokens, 0])
        tokens.append(int(logits[-1].argmax()))
    made, _ = reference.run(model, prompt, tokens)
    ids = made[trace.IDS]
    return made | {trace.IDS: torch.where(ids < 0, 697, ids)}, tokens


def report(
    ref: Reference,
    prompt: reference.Prompt,
    made: trace.Trace,
    tokens: list[int],
    dtype: str = "float32",
) -> dict[str, Record]:
    model = reference.in_dtype(ref.model, getattr(torch, dtype))
    errors = StageErrors(References(ref.model, model, dtype))
    errors.add(CASE, prompt, made, tokens)
    return {record.name: record for record in errors.records()}


# The rule


@pytest.mark.parametrize(
    "dtype, rounding, noise, equal, bound",
    [
        ("float32", 0.0, 1e-6, False, 1e-4),
        ("bfloat16", 0.01, 0.005, False, 0.02),
        ("bfloat16", 0.01, 0.02, False, 0.04),
        ("float16", 0.001, 0.001, False, 0.002),
        ("bfloat16", 0.01, 0.02, True, 0.0),
    ],
)
def test_the_bound(
    dtype: str, rounding: float, noise: float, equal: bool, bound: float
) -> None:
    assert relative_bound(dtype, rounding, noise, equal) == bound


def test_what_is_no_number_keeps_no_bound() -> None:
    """Other shapes and NaN are faults, not zeros."""
    assert difference(torch.zeros(2), torch.zeros(3)) == math.inf
    assert difference(torch.tensor([math.nan]), torch.zeros(1)) == math.inf
    assert verdict(math.inf, 1.0) == "FAULT"
    assert verdict(math.nan, 1.0) == "FAULT"
    assert verdict(0.0, 0.0) == "ok"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_reference_keeps_its_own_bounds(
    ref: Reference, prompt: reference.Prompt, dtype: str
) -> None:
    """A trace without faults is without error; the noise floor is not zero."""
    made, tokens = engine_like(ref, prompt, dtype)
    found = report(ref, prompt, made, tokens, dtype)
    assert not bad(list(found.values()))
    assert [name for name in found if name in trace.STAGES] == list(trace.STAGES)
    assert found[trace.LOGITS].relative == 0
    noise = found[trace.LOGITS].noise_floor
    assert noise is not None and 0 < noise < {"float32": 1e-5, "bfloat16": 0.2}[dtype]
    assert found[trace.GREEDY].agreement == 1


def reversed_indicators(made: trace.Trace, ref: Reference) -> None:
    """What vLLM's own Ovis does: the indicator rows in the opposite order."""
    rows = ref.model.vte.weight[-5:].to(made[trace.MERGED].dtype)
    merged = made[trace.MERGED].clone()
    for index, row in enumerate(rows):
        merged[(made[trace.MERGED] == row).all(-1)] = rows[4 - index]
    assert not torch.equal(merged, made[trace.MERGED])
    made[trace.MERGED] = merged


def swapped_tiles(made: trace.Trace, ref: Reference) -> None:
    made[trace.PIXELS] = made[trace.PIXELS].roll(1, 0)


def lost_placeholder(made: trace.Trace, ref: Reference) -> None:
    place = int((made[trace.IDS] == 697).nonzero()[0])
    made[trace.IDS] = torch.cat([made[trace.IDS][:place], made[trace.IDS][place + 1 :]])


def scaled_logits(made: trace.Trace, ref: Reference) -> None:
    made[trace.LOGITS] = made[trace.LOGITS] * 1.5


def wrong_norm(made: trace.Trace, ref: Reference) -> None:
    features = made[trace.FEATURES]
    made[trace.FEATURES] = features * 1.1


def test_a_stage_that_was_not_seen_has_no_record(
    ref: Reference, prompt: reference.Prompt
) -> None:
    """Neither has one that was seen in some cases only."""
    errors = StageErrors(References(ref.model, ref.model, "float32"))
    made, tokens = engine_like(ref, prompt)
    errors.add(CASE, prompt, made, tokens)
    errors.check_all_seen()
    del made[trace.VISUAL]
    errors.add(CASE, prompt, made, tokens)
    errors.add(CASE, prompt, made, tokens)
    with pytest.raises(ValueError, match=f"past the hooks of {trace.VISUAL}"):
        errors.check_all_seen()
    names = [record.name for record in errors.records() if record.report == "stages"]
    assert names == [name for name in trace.STAGES if name != trace.VISUAL]


@pytest.mark.parametrize(
    "fault, stage, dtype",
    [
        (reversed_indicators, trace.MERGED, "float32"),
        (reversed_indicators, trace.MERGED, "bfloat16"),
        (swapped_tiles, trace.PIXELS, "bfloat16"),
        (lost_placeholder, trace.IDS, "float32"),
        (scaled_logits, trace.LOGITS, "bfloat16"),
        (wrong_norm, trace.FEATURES, "bfloat16"),
    ],
)
def test_a_fault_is_found_where_it_is(
    ref: Reference, prompt: reference.Prompt, fault: Any, stage: str, dtype: str
) -> None:
    made, tokens = engine_like(ref, prompt, dtype)
    fault(made, ref)
    found = report(ref, prompt, made, tokens, dtype)
    assert [record.name for record in bad(list(found.values()))] == [stage]


def test_a_token_may_differ_only_on_a_tie() -> None:
    """The gap that a token gives away counts, not the difference itself."""
    logits = torch.tensor([[1.0, 0.99995, -4.0], [3.0, 1.0, 0.0]])
    near = compare_tokens("near", [1, 0], logits, logits, logits)
    assert near.agreement == 0.5 and near.first == 0
    assert near.engine == pytest.approx(5e-5, rel=0.01) and near.scale == 4
    far = compare_tokens("far", [0, 2], logits, logits, logits)
    assert far.engine == 3 and far.first == 1


def test_images_are_where_they_are_expected() -> None:
    expected = torch.tensor([5, -1, -1, 6])
    assert mark_images(torch.tensor([5, 9, 9, 6]), expected).equal(expected)
    assert not mark_images(torch.tensor([5, 9, 6, 9]), expected).equal(expected)
    assert not mark_images(torch.tensor([9, 9, 9, 6]), expected).equal(expected)


def test_zeros_behind_a_patch_are_no_fault_and_other_values_are() -> None:
    patches = torch.ones(2, 4, 3)
    padded = torch.nn.functional.pad(patches, (0, 2))
    assert torch.equal(like(padded, patches, trace.PIXELS), patches)
    padded[0, 0, -1] = 1
    assert difference(like(padded, patches, trace.PIXELS), patches) == math.inf


# The second attention


def test_blockwise_attention_is_attention() -> None:
    """Equal to the plain formula, in float64, with mask and soft cap."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 150, 8) for _ in range(3))
    mask = torch.full((1, 1, 150, 150), -1e30).triu(1)
    scores = q.double() @ k.double().transpose(-1, -2) * 0.5
    scores = torch.tanh(scores / 3) * 3 + mask
    wanted = scores.softmax(-1) @ v.double()
    found = blockwise(q, k, v, 0.5, mask, softcap=3.0)
    assert difference(found, wanted) < 1e-5


@pytest.mark.parametrize("checkpoint", golden.CHECKPOINTS)
def test_the_other_attention_moves_only_roundings(checkpoint: str) -> None:
    """In all three families of text model, and it is put back."""
    loaded = reference.load(golden.checkpoint_path(checkpoint), "cpu")
    asked = reference.prepare(loaded, CASE)
    before, _ = reference.run(loaded.model, asked)
    with other_attention(loaded.model):
        other, _ = reference.run(loaded.model, asked)
    after, _ = reference.run(loaded.model, asked)
    moved = difference(other[trace.LOGITS], before[trace.LOGITS])
    assert 0 < moved < 1e-4 * float(before[trace.LOGITS].abs().max())
    assert torch.equal(after[trace.LOGITS], before[trace.LOGITS])


# Cases and ways of running


def test_cases_have_the_grids_they_are_named_for(ref: Reference) -> None:
    side = ref.rule.side
    by_name = {case.name: case for case in stage_cases(side)}
    assert len(reference.prepare(ref, by_name["3x3"]).pixels) == 10
    assert len(reference.prepare(ref, by_name["one tile"]).pixels) == 1
    counts = {len(case.sizes) for case in batch_cases(side)}
    assert counts == {0, 1, 2, 3, 4}
    largest = max(len(reference.prepare(ref, c).pixels) for c in batch_cases(side))
    assert largest == 17


def test_layout_needs_no_weights(ref: Reference) -> None:
    found = reference.layout(CHECKPOINT)
    assert found.side == ref.rule.side
    assert found.tokens_per_tile == ref.model.tokens_per_tile


def test_agreement_ends_at_the_first_difference() -> None:
    assert batches.agreement([[1, 2, 3], [4, 5, 6]], [[1, 0, 3], [4, 5, 6]]) == 4 / 6


def run_of(tokens: list[int], logits: list[float], picture: list[float]) -> batches.Run:
    return batches.Run([tokens], {"a": torch.tensor(picture)}, [torch.tensor(logits)])


@pytest.mark.parametrize(
    "other, verdicts",
    [
        (run_of([1, 2], [1.0, 2.0], [3.0]), ["ok", "ok"]),
        (run_of([1, 2], [1.0, 2.0], [3.0001]), ["FAULT", "ok"]),
        (run_of([1, 2], [1.0, 2.0001], [3.0]), ["ok", "FAULT"]),
        (run_of([1, 3], [1.0, 2.0], [3.0]), ["ok", "FAULT"]),
    ],
)
def test_batches_must_be_bitwise_equal(other: batches.Run, verdicts: list[str]) -> None:
    alone = [run_of([1, 2], [1.0, 2.0], [3.0])]
    found = list(batches.compare("batched", "bfloat16", alone, other, bound=0.0))
    assert [record.verdict for record in found] == verdicts


def test_embeddings_that_were_not_seen_are_not_compared() -> None:
    alone = [run_of([1, 2], [1.0, 2.0], [3.0])]
    batches.check_all_seen(alone, 1)
    with pytest.raises(ValueError, match="of 2 pictures, 1 were seen"):
        batches.check_all_seen(alone, 2)


def test_pictures_are_known_by_their_tiles() -> None:
    tiles = torch.arange(4, dtype=torch.uint8).view(4, 1, 1, 1).expand(4, 2, 2, 3)
    inputs = {"pixel_values": tiles, "grids": torch.tensor([[1, 1], [1, 2]])}
    first, second = batches.picture_keys(inputs)
    alone = {"pixel_values": tiles[1:], "grids": torch.tensor([[1, 2]])}
    assert batches.picture_keys(alone) == [second]
    assert first != second


def test_operators_get_the_references_picture(ref: Reference) -> None:
    """The rows that stand in for a picture are those of the whole merged sequence."""
    _, tiles = operators.cases(ref.rule.side)
    wanted = operators.expected(ref, ref.model, tiles)
    made, _ = reference.run(ref.model, reference.prepare(ref, tiles))
    rows = wanted.request["multi_modal_data"]["image"][0]
    assert torch.equal(rows, made[trace.MERGED][made[trace.IDS] == -1])


@pytest.mark.parametrize("floor, times", [(0.25, 6.0), (0.0, None)])
def test_an_options_error_is_a_multiple_of_the_noise_floor(
    floor: float, times: float | None
) -> None:
    """No bound is kept or broken, and nothing is said where the floor is zero."""
    measured = Record(
        *("stages", "bfloat16", trace.VISUAL, "FAULT"),
        relative=1.0,
        noise_floor=floor,
        against_float32=1.5,
        bound=0.5,
    )
    made = options.option_record("with the arguments", measured)
    assert (made.verdict, made.bound, made.times_noise_floor) == ("-", None, times)
    assert not bad([made])
    (row,) = tables.table(tables.COLUMNS["options"], [made.to_json()]).splitlines()[2:]
    assert f"with the arguments: {trace.VISUAL}" in row
    assert (" 6.0 " in row) == (times is not None)


# Output


def test_tables_and_plot(ref: Reference, prompt: reference.Prompt) -> None:
    made, tokens = engine_like(ref, prompt)
    reversed_indicators(made, ref)
    rows = [r.to_json() for r in report(ref, prompt, made, tokens).values()]
    json.dumps(rows, allow_nan=False)
    text = tables.table(tables.COLUMNS["stages"], rows[:5])
    assert "| float32 | pixels | equal |" in text
    assert [line for line in text.splitlines() if "FAULT" in line] == [
        line for line in text.splitlines() if trace.MERGED in line
    ]
    picture = ElementTree.fromstring(plot.svg(rows, "a < b"))
    lines = [e for e in picture.iter() if e.tag.endswith("polyline")]
    assert len(lines) == 2
    failed = Record("stages", "bfloat16", "all", "FAILED").to_json()
    assert plot.svg([*rows, failed], "a < b") == plot.svg(rows, "a < b")


WRITTEN: dict[str, Any] = {
    "command": "command",
    "device": "CPU",
    "date": "today",
    "versions": {},
    "engines": [],
    "records": [],
}


def test_what_did_not_run_is_told() -> None:
    failed = Record("stages", "float32", "all", "FAILED", case="ValueError: too long")
    assert bad([failed]) == [failed]
    text = tables.report_tables(WRITTEN | {"records": [failed.to_json()]})
    assert "stages, float32, all: ValueError: too long" in text


def test_a_document_needs_a_place(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("no place")
    with pytest.raises(ValueError, match="has no place"):
        tables.fill_places(page, tmp_path)
    page.write_text("<!-- numerics missing.json stages -->\n<!-- /numerics -->\n")
    with pytest.raises(ValueError, match=r"missing\.json, which is no file"):
        tables.fill_places(page, tmp_path)
    (tmp_path / "missing.json").write_text(json.dumps(WRITTEN))
    with pytest.raises(ValueError, match="has no stages"):
        tables.fill_places(page, tmp_path)


def test_the_documents_figures_are_those_of_the_reports() -> None:
    page = ROOT / "docs" / "numerics.md"
    assert tables.fill_places(page, ROOT) == page.read_text("utf-8")


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], "either a MODEL"),
        (["model", "--batch-invariant"], "--device cuda"),
        (["model", "--reports", "batches", "--plot", "x.svg"], "stages"),
        (["model", "--dtype", "int8"], "int8"),
        (["model", "--reports", "options"], "need each other"),
        (["model", "--reports", "stages", "--engine-arguments", "{}"], "each other"),
        (["model", "--engine-arguments", "[1]"], "'[1]' is no JSON object"),
        (["model", "--engine-arguments", "fp8"], "'fp8' is no JSON object"),
    ],
)
def test_bad_commands_are_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.parse(arguments)
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, reports", [([], "stages"), (["--engine-arguments", "{}"], "options")]
)
def test_arguments_choose_the_report(arguments: list[str], reports: str) -> None:
    assert command.parse(["model", *arguments]).reports == [reports]


# The engine


ENGINE = """
import sys
from tools.numerics import __main__ as command, engine, stages

def reverse(model):
    rows = model.visual_tokenizer.head.indicators.data
    rows.copy_(rows.flip(0))

if sys.argv[1] == "reversed":
    attach = engine.recorder

    def attach_to_faulty(llm):
        llm.apply_model(reverse)
        return attach(llm)

    engine.recorder = attach_to_faulty
if sys.argv[1] != "ordered":
    cases = stages.stage_cases
    # The first with a picture is enough.
    stages.stage_cases = lambda side: [c for c in cases(side) if c.sizes][:1]
sys.exit(command.main(sys.argv[2:]))
"""


@pytest.mark.parametrize("indicators, status", [("ordered", 0), ("reversed", 1)])
def test_the_command(indicators: str, status: int, tmp_path: Path) -> None:
    """The whole report in float32; reversed indicator rows make it fail."""
    file = tmp_path / "report.json"
    done = subprocess.run(
        [
            sys.executable,
            *("-c", ENGINE, indicators, CHECKPOINT),
            *("--json", str(file), "--plot", str(tmp_path / "plot.svg")),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == status, done.stdout + done.stderr
    found = json.loads(file.read_text())
    verdicts = {
        row["name"]: row["verdict"]
        for row in found["records"]
        if row["report"] == "stages"
    }
    assert list(verdicts) == list(trace.STAGES)
    faults = {name for name, word in verdicts.items() if word != "ok"}
    if indicators == "ordered":
        assert not faults
    else:
        assert {trace.MERGED, trace.LOGITS} <= faults
        assert not faults & {trace.PIXELS, trace.IDS, trace.FEATURES, trace.VISUAL}


FP8 = {
    "quantization": "online",
    "quantization_config": {"targets": {"visual_tokenizer.*": "fp8_per_channel"}},
}


def test_what_an_option_costs(tmp_path: Path) -> None:
    """FP8 in the encoder is seen from the tower on, beside the engine without it."""
    file = tmp_path / "report.json"
    done = subprocess.run(
        [
            *(sys.executable, "-c", ENGINE, "first case", CHECKPOINT),
            *("--dtype", "bfloat16", "--json", str(file)),
            *("--engine-arguments", json.dumps(FP8)),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    assert [e.get("arguments") for e in found["engines"]] == [None, json.dumps(FP8)]
    rows = {row["name"]: row for row in found["records"]}
    assert list(rows) == [
        f"{engine}: {stage}"
        for engine in (options.PLAIN, options.CHANGED)
        for stage in options.SHOWN
    ]
    for stage in (trace.FEATURES, trace.VISUAL):
        plain, changed = (
            rows[f"{engine}: {stage}"] for engine in (options.PLAIN, options.CHANGED)
        )
        assert changed["noise_floor"] == plain["noise_floor"]
        assert changed["times_noise_floor"] > plain["times_noise_floor"]
