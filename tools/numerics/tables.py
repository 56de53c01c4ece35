# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Markdown tables of a report, and their places in a document.

A place is a pair of comments around what the tool writes:

    <!-- numerics FILE.json stages -->
    <!-- /numerics -->

Without a name of a report (`stages`, `operators`, `batches`, `options`) it gets all of
the file.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
"""A record as JSON holds it: what was not measured is absent."""

Column = tuple[str, Callable[[Row], str]]

PLACE = re.compile(
    r"(<!-- numerics (?P<file>\S+)(?P<kinds>( \w+)*) -->\n).*?<!-- /numerics -->",
    re.DOTALL,
)


def number(row: Row, key: str) -> str:
    """A measured value in two digits; `equal` for none at all."""
    if key not in row:
        return ""
    return "equal" if row[key] == 0 else f"{row[key]:.1e}"


def percent(row: Row, key: str) -> str:
    """A share in percent."""
    return f"{row[key]:.1%}" if key in row else ""


def _number(title: str, key: str) -> Column:
    return title, lambda row: number(row, key)


def _text(title: str, key: str) -> Column:
    return title, lambda row: str(row.get(key, ""))


def _tokens(row: Row) -> str:
    """Agreement of tokens, beside that of the reference with itself."""
    if "noise_agreement" not in row:
        return percent(row, "agreement")
    return f"{percent(row, 'agreement')} ({percent(row, 'noise_agreement')})"


def _times(row: Row) -> str:
    if "times_noise_floor" not in row:
        return ""
    return f"{row['times_noise_floor']:.1f}"


COLUMNS: dict[str, tuple[Column, ...]] = {
    "stages": (
        _text("dtype", "dtype"),
        _text("stage", "name"),
        _number("max abs", "max_abs"),
        _number("error", "relative"),
        _number("noise floor", "noise_floor"),
        _number("engine to float32", "against_float32"),
        _number("reference to float32", "reference_against_float32"),
        ("tokens", _tokens),
        _number("bound", "bound"),
        _text("", "verdict"),
    ),
    "operators": (
        _text("dtype", "dtype"),
        _text("operators", "name"),
        _number("error", "relative"),
        _number("noise floor", "noise_floor"),
        _number("engine to float32", "against_float32"),
        _number("reference to float32", "reference_against_float32"),
        _number("change", "change"),
        ("share", lambda row: percent(row, "share")),
        _text("", "case"),
    ),
    "batches": (
        _text("dtype", "dtype"),
        _text("way", "name"),
        _text("", "case"),
        _number("max abs", "max_abs"),
        _number("error", "relative"),
        ("tokens", lambda row: percent(row, "agreement")),
        _number("bound", "bound"),
        _text("", "verdict"),
    ),
    "options": (
        _text("dtype", "dtype"),
        _text("engine: stage", "name"),
        _number("max abs", "max_abs"),
        _number("engine to float32", "against_float32"),
        _number("noise floor", "noise_floor"),
        ("times the noise floor", _times),
        _number("reference to float32", "reference_against_float32"),
        ("tokens", _tokens),
    ),
}


def table(columns: Sequence[Column], rows: Iterable[Row]) -> str:
    """One markdown table."""
    lines = [[title for title, _ in columns], ["---"] * len(columns)]
    lines += [[value(row) for _, value in columns] for row in rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def report_tables(report: Row, kinds: Iterable[str] = ()) -> str:
    """Tables of a report file, with how and where it was made above them.

    Args:
        report: Content of the file.
        kinds: Reports to be shown; none: all.

    Raises:
        ValueError: A kind is unknown, or the file has no records of it.

    """
    shown = tuple(kinds) or tuple(COLUMNS)
    if unknown := set(shown) - set(COLUMNS):
        raise ValueError(f"unknown reports {sorted(unknown)}; known: {list(COLUMNS)}")
    versions = ", ".join(f"{k} {v}" for k, v in report["versions"].items())
    text = (
        f"`{report['command']}`\n\n{report['device']}; {versions}; {report['date']}.\n"
    )
    for engine in report["engines"]:
        given = f" with `{engine['arguments']}`" if "arguments" in engine else ""
        text += (
            f"Attention in {engine['dtype']}{given}: tower {engine['tower']}, "
            f"text model {engine['text']}.\n"
        )
    for kind in shown:
        rows = [row for row in report["records"] if row["report"] == kind]
        if rows:
            text += "\n" + table(COLUMNS[kind], rows)
        elif kinds:
            raise ValueError(f"the report of {report['command']!r} has no {kind}")
    for row in report["records"]:
        if row["verdict"] == "FAILED" and row["report"] in shown:
            text += f"\n{row['report']}, {row['dtype']}, {row['name']}: {row['case']}\n"
    return text


def fill_places(document: Path, root: Path) -> str:
    """A document with the tables of its reports in their places.

    Args:
        document: Markdown with places.
        root: Folder to which the places' file names are relative.

    Raises:
        ValueError: The document has no place, or a place names no file.

    """

    def filled(place: re.Match[str]) -> str:
        file = root / place["file"]
        if not file.is_file():
            raise ValueError(f"{document} names the report {file}, which is no file")
        report = json.loads(file.read_text("utf-8"))
        tables = report_tables(report, place["kinds"].split())
        return f"{place[1]}\n{tables}\n<!-- /numerics -->"

    text, count = PLACE.subn(filled, document.read_text("utf-8"))
    if not count:
        raise ValueError(
            f"{document} has no place for a report: <!-- numerics FILE --> and "
            "<!-- /numerics -->"
        )
    return text
