# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What workers measure, and what is kept of it: one record per row of the table."""

import json
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

RATES = ("images/s", "requests/s", "TFLOP/s", "TB/s")
"""Units of which more is better; of all others less is."""

SIDES = ("release", "fork")


@dataclass(frozen=True)
class Measurement:
    """A figure that one worker took on one side.

    Attributes:
        name: The row, "group: what".
        unit: Unit of the values.
        values: One for each run.
        floor: What no implementation can go below (or, of a rate, above), in the same
            unit; None where it is not known.

    """

    name: str
    unit: str
    values: list[float]
    floor: float | None = None


@dataclass(frozen=True)
class Record:
    """A row: release beside fork.

    Attributes:
        name: The row, "group: what".
        unit: Unit of all figures but the ratio.
        upstream: Median of the release; None if it was not measured.
        fork: Median of the fork; None if it was not measured.
        ratio: How many times better the fork is; above 1 is better, whatever the
            unit.
        floor: See `Measurement`.
        runs: Values behind each median, by side.
        spread: Lowest and highest value, by side.

    """

    name: str
    unit: str
    upstream: float | None
    fork: float | None
    ratio: float | None
    floor: float | None
    runs: dict[str, int]
    spread: dict[str, list[float]]

    @property
    def group(self) -> str:
        return self.name.partition(": ")[0]


def merge(sides: Mapping[str, Iterable[Measurement]]) -> list[Record]:
    """Rows of all measurements, in the order of their first appearance.

    Args:
        sides: What each of `SIDES` measured; a name may be on one side only.

    Raises:
        ValueError: A name is measured in two units, or without a value.

    """
    found: dict[str, dict[str, Measurement]] = {}
    for side, measurements in sides.items():
        for measurement in measurements:
            if not measurement.values:
                raise ValueError(f"{side} has no value for {measurement.name!r}")
            found.setdefault(measurement.name, {})[side] = measurement
    return [_record(name, by_side) for name, by_side in found.items()]


def _record(name: str, by_side: Mapping[str, Measurement]) -> Record:
    units = {measurement.unit for measurement in by_side.values()}
    if len(units) > 1:
        raise ValueError(f"{name!r} is measured in {sorted(units)}")
    (unit,) = units
    medians = {
        side: statistics.median(measurement.values)
        for side, measurement in by_side.items()
    }
    upstream, fork = (medians.get(side) for side in SIDES)
    floors = [m.floor for m in by_side.values() if m.floor is not None]
    return Record(
        name=name,
        unit=unit,
        upstream=upstream,
        fork=fork,
        ratio=_ratio(unit, upstream, fork),
        floor=floors[-1] if floors else None,
        runs={side: len(m.values) for side, m in by_side.items()},
        spread={side: [min(m.values), max(m.values)] for side, m in by_side.items()},
    )


def _ratio(unit: str, upstream: float | None, fork: float | None) -> float | None:
    if not upstream or not fork:
        return None
    return fork / upstream if unit in RATES else upstream / fork


def with_label(name: str, label: str) -> str:
    """Name of a row that was measured in a way of its own: "group, label: what"."""
    group, colon, what = name.partition(": ")
    return f"{group}, {label}{colon}{what}"


def beside_release(row: Record, kept: Record | None, label: str) -> Record:
    """A row of the fork alone, measured with an option, as a row of its own.

    Args:
        row: Row of the fork.
        kept: The row without the option, whose figures of the release are taken.
        label: What the option is called; becomes part of the name.

    """
    named = replace(row, name=with_label(row.name, label))
    if kept is None or kept.upstream is None:
        return named
    return replace(
        named,
        upstream=kept.upstream,
        ratio=_ratio(row.unit, kept.upstream, row.fork),
        runs={"release": kept.runs["release"], **row.runs},
        spread={"release": kept.spread["release"], **row.spread},
    )


def write_measurements(path: Path, measurements: Iterable[Measurement]) -> None:
    """Hand a worker's figures to the process that started it."""
    path.write_text(json.dumps([asdict(m) for m in measurements]), encoding="utf-8")


def read_measurements(path: Path) -> list[Measurement]:
    """The figures of a worker."""
    return [Measurement(**m) for m in json.loads(path.read_text(encoding="utf-8"))]


def write_results(path: Path, about: Mapping[str, Any], rows: Iterable[Record]) -> None:
    """Keep a table.

    Args:
        path: The JSON file.
        about: What was measured on: machine, versions, date.
        rows: The table.

    """
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"about": dict(about), "records": [asdict(row) for row in rows]}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_results(path: Path) -> tuple[dict[str, Any], list[Record]]:
    """A kept table: what it was measured on, and its rows."""
    content = json.loads(path.read_text(encoding="utf-8"))
    return content["about"], [Record(**row) for row in content["records"]]


def figure(value: float | None) -> str:
    """A value with three digits that count."""
    if value is None:
        return ""
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def table(rows: Iterable[Record]) -> str:
    """The rows as a Markdown table, spreads in parentheses."""
    lines = [
        "| what | unit | release | fork | ratio | floor |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = []
        for side, value in zip(SIDES, (row.upstream, row.fork)):
            cell = figure(value)
            if row.runs.get(side, 0) > 1:
                cell += f" ({' to '.join(map(figure, row.spread[side]))})"
            cells.append(cell)
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        lines.append(
            f"| {row.name} | {row.unit} | {cells[0]} | {cells[1]} | {ratio} "
            f"| {figure(row.floor)} |"
        )
    return "\n".join(lines)
