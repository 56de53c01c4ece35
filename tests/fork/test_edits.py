# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Declared edits: where they apply and what is said when they do not."""

import pytest

from tests.fork.small_fork import Fork
from tools.forklib.edits import Edit, apply_edit, apply_edits
from tools.forklib.errors import ForkError
from tools.forklib.series import load_series

TEXT = "one\ntwo\nthree\n"


def edit(anchor: str, place: str, *lines: str) -> Edit:
    return Edit("file.py", anchor, place, lines, "series/0001-x.toml:7")


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("before", "one\nA\nB\ntwo\nthree\n"),
        ("after", "one\ntwo\nA\nB\nthree\n"),
        ("replace", "one\nA\nB\nthree\n"),
    ],
)
def test_places(place: str, expected: str) -> None:
    assert apply_edit(TEXT, edit("two", place, "A", "B")) == expected


def test_anchor_is_a_whole_line() -> None:
    with pytest.raises(ForkError, match="not found"):
        apply_edit("two or more\n", edit("two", "after", "A"))


def test_missing_anchor_names_declaration_and_file() -> None:
    with pytest.raises(ForkError, match=r"series/0001-x\.toml:7: .*file\.py"):
        apply_edit(TEXT, edit("four", "after", "A"))


def test_double_anchor_names_both_lines() -> None:
    with pytest.raises(ForkError, match=r"0001-x\.toml:7.*2 times \(lines 2, 4\)"):
        apply_edit("one\ntwo\nthree\ntwo\n", edit("two", "after", "A"))


def test_edits_see_those_before_them() -> None:
    edits = [edit("two", "after", "A"), edit("A", "replace", "B")]
    assert apply_edits(TEXT, edits) == "one\ntwo\nB\nthree\n"


def test_declared_line_is_that_of_the_edit(fork: Fork) -> None:
    fork.declare(
        "\n[[edit]]\nfile = 'a'\nanchor = 'b'\nplace = 'after'\ntext = 'c'\n"
        "\n[[edit]]\nfile = 'd'\nanchor = 'e'\nplace = 'before'\ntext = 'f'\n"
    )
    first, second = load_series(fork.root).commits[0].edits
    assert first.where == "series/0001-ovis.toml:5"
    assert second.where == "series/0001-ovis.toml:11"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[edit]]\nfile = 'a'\nplace = 'after'\ntext = ''\n", "lacks anchor"),
        (
            "[[edit]]\nfile = 'a'\nanchor = 'b'\nplace = 'under'\ntext = ''\n",
            "'under'; allowed are before, after, replace",
        ),
        ("[[edit]\n", "series/0001-ovis.toml"),
    ],
)
def test_bad_declaration(fork: Fork, text: str, message: str) -> None:
    fork.declare(text)
    with pytest.raises(ForkError, match=message):
        load_series(fork.root)
