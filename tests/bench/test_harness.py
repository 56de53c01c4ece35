# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The parts of the benchmark that need no engine."""

import io
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks.ovis import environments, run
from benchmarks.ovis.checkpoint import small_config, write_checkpoint
from benchmarks.ovis.environments import ROOT, Environment
from benchmarks.ovis.pictures import make_pictures, to_jpeg
from benchmarks.ovis.records import Measurement
from benchmarks.ovis.run import TOKENIZER, as_options, parse
from benchmarks.ovis.workers.serve import Settings, parts_of_start


def test_pictures_are_all_different_and_repeatable():
    first, again = (list(make_pictures(50, 40, 70, seed=3)) for _ in range(2))
    assert len({picture.tobytes() for picture in first}) == 70
    assert [p.tobytes() for p in first] == [p.tobytes() for p in again]
    assert next(make_pictures(50, 40, 1, seed=4)).tobytes() != first[0].tobytes()
    decoded = np.asarray(Image.open(io.BytesIO(to_jpeg(first[0]))))
    assert decoded.shape == (40, 50, 3)


def test_settings_survive_the_command_line():
    settings = Settings("folder", (640, 480), {1: 8, 32: 64}, 4, ["--dtype", "x"])
    loaded = Settings.load(settings.dump())
    assert loaded.requests == settings.requests
    assert tuple(loaded.size) == settings.size
    assert loaded.arguments == settings.arguments


def test_engine_arguments_become_options_of_the_server():
    arguments = {"compilation_config": {"a": True}, "max_num_seqs": 8, "dtype": "auto"}
    assert as_options(arguments) == [
        *("--compilation-config", '{"a": true}', "--max-num-seqs", "8"),
        *("--dtype", "auto"),
    ]


def test_server_of_several_api_processes_has_rows_of_its_own(monkeypatch):
    asked = []

    class Build:
        def measure(self, worker, arguments):
            asked.append((worker, Settings.load(*arguments)))
            return [Measurement("server throughput: JPEG", "requests/s", [1.0])]

    monkeypatch.setattr(run, "full_checkpoint", lambda: "folder")
    (row,) = run.SECTIONS["gpu"]["processes"](Build(), {"max_num_seqs": 8})
    assert row.name == "server throughput, 4 API processes: JPEG"
    ((worker, settings),) = asked
    assert worker == "serve" and set(settings.requests) == {32, 64}
    assert settings.arguments[2:] == [
        *("--api-server-count", "4", "--max-num-seqs", "8"),
    ]


def test_start_is_read_from_the_log():
    log = (
        "INFO [base.py:280] Multi-modal warmup completed in 24.967s\n"
        "INFO [core.py:403] init engine (profile, create kv cache, warmup model) "
        "took 35.70 s (compilation: 12.00 s)\n"
        "INFO Model loading took 4.21 GiB memory and 2.125000 seconds\n"
    )
    found = {row.name: row.values for row in parts_of_start(log)}
    assert found == {
        "server start: model loading": [2.125],
        "server start: multi-modal warm-up": [24.967],
        "server start: profile, cache and warm-up of the engine": [35.7],
    }
    assert parts_of_start("nothing") == []


def test_unknown_sections_are_refused(capsys):
    assert parse(["cpu", "--only", "prepare,server"]).only == ["prepare", "server"]
    with pytest.raises(SystemExit):
        parse(["cpu", "--only", "encode"])
    assert "no section ['encode']" in capsys.readouterr().err


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """An environment whose path has a worker of our own; returns its writer."""
    monkeypatch.setattr(environments, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(environments, "ROOT", tmp_path)
    package = tmp_path / "benchmarks" / "ovis" / "workers"
    package.mkdir(parents=True)

    def write(body: str) -> Environment:
        (package / "own.py").write_text(body)
        return Environment("fork", Path(sys.executable), (tmp_path / "path",))

    return write


def test_worker_gets_its_path_and_gives_its_figures(worker):
    build = worker(
        "import json, os, sys\n"
        "value = len(os.environ['PYTHONPATH'].split(os.pathsep)[0])\n"
        "row = {'name': sys.argv[2], 'unit': 's', 'values': [value], 'floor': None}\n"
        "open(sys.argv[1], 'w').write(json.dumps([row]))\n"
    )
    (row,) = build.measure("own", ["a: b"])
    assert (row.name, row.values) == ("a: b", [len(str(build.path[0]))])


def test_failed_worker_shows_the_end_of_its_log(worker):
    build = worker("raise SystemExit('no such device')")
    with pytest.raises(RuntimeError, match="status 1(.|\n)*no such device"):
        build.measure("own")


def test_builds_keep_what_they_compile_apart():
    release, fork = (
        Environment(side, Path(sys.executable)).variables()
        for side in ("release", "fork")
    )
    for name in ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        assert release[name] != fork[name]
        assert Path(fork[name]).is_relative_to(ROOT)
    assert fork["PATH"] == os.environ["PATH"]


def test_small_checkpoint_has_the_tiles_and_ids_of_the_released_one(tmp_path):
    write_checkpoint(TOKENIZER, tmp_path, small_config())
    config = json.loads((tmp_path / "config.json").read_text())
    tower = config["visual_tokenizer_config"]["backbone_config"]
    assert (tower["image_size"], tower["patch_size"]) == (448, 14)
    tokens = json.loads((tmp_path / "tokenizer.json").read_text())["added_tokens"]
    assert min(token["id"] for token in tokens) == 151643
    assert max(token["id"] for token in tokens) < config["llm_config"]["vocab_size"]
