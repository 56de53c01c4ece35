# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Pins of upstream archives and the choice among them."""

import pytest

from tests.fork.small_fork import Fork
from tools.forklib import fetch as fetch_module
from tools.forklib.device import choose_device
from tools.forklib.errors import ForkError
from tools.forklib.fetch import fetch
from tools.forklib.pins import Upstream, load_upstream


@pytest.fixture
def upstream(fork: Fork) -> Upstream:
    return load_upstream(fork.root / "series" / "upstream.toml")


def test_cached_archive_needs_no_pip(
    fork: Fork, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_module, "run_pip", lambda *_: pytest.fail("pip ran"))
    archive = upstream.wheel("cpu")
    assert fetch(archive, fork.cache) == fork.cache / archive.file


def test_wrong_content_names_file_expected_and_found(
    fork: Fork, upstream: Upstream
) -> None:
    archive = upstream.sdist()
    (fork.cache / archive.file).write_bytes(b"")
    with pytest.raises(ForkError) as error:
        fetch(archive, fork.cache)
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    for part in (str(fork.cache / archive.file), archive.sha256, empty):
        assert part in str(error.value)


def test_wrong_download_is_not_kept(
    fork: Fork, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = upstream.wheel("cpu")
    (fork.cache / archive.file).unlink()

    def download(archive, cache, folder) -> None:
        (folder / archive.file).write_bytes(b"something else")

    monkeypatch.setattr(fetch_module, "_download", download)
    with pytest.raises(ForkError, match="wrong content"):
        fetch(archive, fork.cache)
    assert not (fork.cache / archive.file).exists()


def test_versions(upstream: Upstream) -> None:
    assert upstream.fork_version("cpu") == "1.2.3+ovis.4.cpu"
    assert upstream.fork_version("cuda") == "1.2.3+ovis.4"


def test_missing_wheel_names_the_machine(upstream: Upstream) -> None:
    with pytest.raises(ForkError, match="'riscv64'; there are wheels for: x86_64"):
        upstream.wheel("cpu", "riscv64")


def test_missing_sdist_names_what_is_pinned(upstream: Upstream) -> None:
    with pytest.raises(ForkError, match=r"vLLM 9\.9 is pinned; pinned are: 1\.2\.3"):
        upstream.sdist("9.9")


def test_device_asked_for_wins() -> None:
    assert choose_device("cpu", {"VLLM_TARGET_DEVICE": "cuda"}) == "cpu"
    assert choose_device(None, {"VLLM_TARGET_DEVICE": "cuda"}) == "cuda"


def test_unknown_device_is_refused() -> None:
    with pytest.raises(ForkError, match="VLLM_TARGET_DEVICE is 'tpu'; allowed are cpu"):
        choose_device(None, {"VLLM_TARGET_DEVICE": "tpu"})
