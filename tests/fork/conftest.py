# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Fixtures of the fork tool's tests."""

from pathlib import Path

import pytest

from tests.fork.small_fork import Fork, make_fork


@pytest.fixture
def fork(tmp_path: Path) -> Fork:
    """A small fork of a small release."""
    return make_fork(tmp_path)


@pytest.fixture(autouse=True)
def x86_64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the tests run on any machine: the small wheel is for one kind."""
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
