# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the fork set out to reach, and whether kept results show it."""

from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.ovis.records import RATES, Record, figure


@dataclass(frozen=True)
class Target:
    """A bound on one row.

    Attributes:
        row: Name of the row.
        limit: Bound of the fork's median, in the row's unit: at most, or at least if
            the unit is a rate. None if there is only a bound of the ratio.
        ratio: Least ratio to the release, None if there is none.

    """

    row: str
    limit: float | None = None
    ratio: float | None = None


TARGETS = (
    Target("encode: 10 tiles", 16, 2.4),
    Target("encode, FP8: 10 tiles", 12),
    Target("encode: 1 tile", 3, 5),
    Target("encode memory: 10 tiles", 300),
    Target("picture to tiles: 640x480", ratio=8),
    Target("picture to tiles: 1920x1080", ratio=12),
    Target("picture to tiles: 4032x3024", ratio=12),
    Target("offline throughput: 1920x1080, 48 images, 1 token", ratio=3),
    Target("server throughput: 1920x1080 JPEG, concurrency 32", 30),
    Target("server throughput: 1920x1080 JPEG, concurrency 64", 30),
    Target("server time to first token: 1920x1080 JPEG, concurrency 1", 60),
    Target("server start: multi-modal warm-up", 1),
)


def judge(target: Target, row: Record) -> bool:
    """Whether a row reaches its target."""
    if target.limit is not None:
        if row.fork is None:
            return False
        if (
            (row.fork < target.limit)
            if row.unit in RATES
            else (row.fork > target.limit)
        ):
            return False
    return target.ratio is None or (row.ratio or 0) >= target.ratio


def targets_table(records: Iterable[Record]) -> str:
    """Targets of the rows that were measured, as a Markdown table."""
    rows = {row.name: row for row in records}
    lines = ["| row | target | fork | ratio | reached |", "|---|---|---|---|---|"]
    for target in TARGETS:
        row = rows.get(target.row)
        if row is None:
            continue
        wanted = []
        if target.limit is not None:
            bound = "at least" if row.unit in RATES else "at most"
            wanted.append(f"{bound} {target.limit:g} {row.unit}")
        if target.ratio is not None:
            wanted.append(f"{target.ratio:g} times the release")
        lines.append(
            f"| {row.name} | {', '.join(wanted)} | {figure(row.fork)} {row.unit} "
            f"| {figure(row.ratio)} | {'yes' if judge(target, row) else 'no'} |"
        )
    return "\n".join(lines)
