# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Each test that a page names as its proof exists."""

import ast
from functools import cache
from pathlib import Path

import pytest
import regex as re

ROOT = Path(__file__).parents[2]
PAGES = ("features.md", "user_reports.md")

REFERENCE = re.compile(r"`(\w+)::(\w+)(?:\[([^\]]+)\])?`")
"""`file::name[case]` for test_name in tests/models/ovis/test_file.py."""

REPORTS = 32


@cache
def source(name: str) -> str:
    return (ROOT / "tests" / "models" / "ovis" / f"test_{name}.py").read_text()


@cache
def functions(name: str) -> set[str]:
    return {
        node.name
        for node in ast.parse(source(name)).body
        if isinstance(node, ast.FunctionDef)
    }


@cache
def strings(name: str) -> set[str]:
    return {
        node.value
        for node in ast.walk(ast.parse(source(name)))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def references() -> list[tuple[str, str, str, str]]:
    return [
        (page, *reference.groups(default=""))
        for page in PAGES
        for reference in REFERENCE.finditer((ROOT / "docs" / page).read_text())
    ]


@pytest.mark.parametrize(("page", "file", "name", "case"), sorted(set(references())))
def test_a_named_test_exists(page: str, file: str, name: str, case: str) -> None:
    assert f"test_{name}" in functions(file)
    assert not case or case in strings(file)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_names_tests(page: str) -> None:
    """Else a change of its notation would leave nothing to check."""
    assert len([found for found in references() if found[0] == page]) > 30


def test_every_report_has_its_line() -> None:
    text = (ROOT / "docs" / "user_reports.md").read_text()
    numbers = [int(number) for number in re.findall(r"^\| (\d+)\. ", text, re.M)]
    assert numbers == list(range(1, REPORTS + 1))
