# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The CPU wheel of a small release."""

import base64
import csv
import hashlib
import io
import sys
import zipfile
from email.parser import Parser

import pytest

from tests.fork.small_fork import UPSTREAM_FILES, Fork
from tools.forklib.errors import ForkError
from tools.forklib.metadata import dist_info_name, requirement_name
from tools.forklib.wheel import build_wheel

INFO = "vllm-1.2.3+ovis.4.cpu.dist-info"


@pytest.fixture
def wheel(fork: Fork, tmp_path) -> zipfile.ZipFile:
    path = build_wheel(fork.root, "cpu", tmp_path / "dist", fork.cache)
    assert path.name == "vllm-1.2.3+ovis.4.cpu-cp38-abi3-manylinux_2_28_x86_64.whl"
    return zipfile.ZipFile(path)


def test_members(wheel: zipfile.ZipFile) -> None:
    assert wheel.testzip() is None
    names = wheel.namelist()
    assert len(names) == len(set(names))
    assert set(UPSTREAM_FILES) < set(names)
    assert wheel.read("vllm/models/old.py") == b"WHO = 'fork'\n"
    assert wheel.read("vllm/models/ovis/__init__.py") == b"WHO = 'ovis'\n"
    assert b'"Ovis": 3' in wheel.read("vllm/models/registry.py")
    assert b"1.2.3+ovis.4.cpu" in wheel.read("vllm/_version.py")
    assert {name.split("/")[0] for name in names} == {"vllm", INFO}


def test_record_fits_every_member(wheel: zipfile.ZipFile) -> None:
    rows = csv.reader(io.StringIO(wheel.read(f"{INFO}/RECORD").decode()))
    found = {path: (digest, size) for path, digest, size in rows}
    assert set(found) == set(wheel.namelist())
    assert found.pop(f"{INFO}/RECORD") == ("", "")
    for path, (digest, size) in found.items():
        content = wheel.read(path)
        expected = base64.urlsafe_b64encode(hashlib.sha256(content).digest())
        assert digest == f"sha256={expected.decode().rstrip('=')}", path
        assert int(size) == len(content), path


def test_metadata(wheel: zipfile.ZipFile) -> None:
    metadata = Parser().parsestr(wheel.read(f"{INFO}/METADATA").decode())
    assert metadata["Name"] == "vllm"
    assert metadata["Version"] == "1.2.3+ovis.4.cpu"
    assert metadata.get_all("Requires-Dist") == [
        'torch==2.13.0; platform_machine == "x86_64"',
        "numpy",
        'pandas; extra == "bench"',
    ]
    assert metadata.get_payload() == "# The fork\n"
    assert "packer" not in str(metadata)
    assert metadata.get_all("Project-URL") == ["Homepage, elsewhere"]


def test_tag_is_that_of_the_file_name(wheel: zipfile.ZipFile) -> None:
    text = wheel.read(f"{INFO}/WHEEL").decode()
    assert text.splitlines()[1:] == ["Tag: cp38-abi3-manylinux_2_28_x86_64"]


def test_same_input_gives_the_same_wheel(fork: Fork, tmp_path) -> None:
    first, second = (
        build_wheel(fork.root, "cpu", tmp_path / name, fork.cache) for name in "ab"
    )
    assert first.read_bytes() == second.read_bytes()


def test_compile_is_for_cuda(fork: Fork, tmp_path) -> None:
    with pytest.raises(ForkError, match="needs --device cuda"):
        build_wheel(fork.root, "cpu", tmp_path, fork.cache, compile_kernels=True)


def test_names() -> None:
    assert dist_info_name("1.2.3+ovis.4.cpu") == INFO
    assert requirement_name("fastapi[standard]<1") == "fastapi"
    assert requirement_name("torchaudio") == "torchaudio"


def test_compiled_library_is_built_once_and_shipped(
    fork: Fork, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("CXX", sys.executable)
    fork.write(
        "csrc/ovis/build.py",
        "from pathlib import Path\n"
        "root = Path(__file__).parents[2]\n"
        "calls = root / 'calls'\n"
        "calls.write_text(calls.read_text() + 'x' if calls.exists() else 'x')\n"
        "(root / 'vllm/models/ovis/libovis_tiler.so').write_bytes(b'code')\n",
    )
    for name in "ab":
        path = build_wheel(fork.root, "cpu", tmp_path / name, fork.cache)
        with zipfile.ZipFile(path) as wheel:
            assert wheel.read("vllm/models/ovis/libovis_tiler.so") == b"code"
    assert (fork.root / "calls").read_text() == "x"
    fork.write("csrc/ovis/tiler.cpp", "// changed\n")
    build_wheel(fork.root, "cpu", tmp_path / "c", fork.cache)
    assert (fork.root / "calls").read_text() == "xx"


def test_without_a_compiler_the_library_is_left_out(
    fork: Fork, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))
    fork.write("csrc/ovis/build.py", "raise SystemExit('called')\n")
    path = build_wheel(fork.root, "cpu", tmp_path, fork.cache)
    assert "vllm/models/ovis/libovis_tiler.so" not in zipfile.ZipFile(path).namelist()


def test_failed_compilation_shows_its_messages(
    fork: Fork, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("CXX", sys.executable)
    fork.write("csrc/ovis/build.py", "raise SystemExit('no such instruction')\n")
    with pytest.raises(ForkError, match="no such instruction"):
        build_wheel(fork.root, "cpu", tmp_path, fork.cache)
