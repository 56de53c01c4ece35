# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Write the kept results into docs/performance.md, as tables and plots.

    python -m benchmarks.ovis.report

A table stands between the comments "table: NAME | GROUP; GROUP" and "end of table":
NAME.json holds the results, a group is what stands before the colon of a row's name.
Plots of some groups follow their table. The group "targets" stands for all targets.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.ovis.environments import ROOT
from benchmarks.ovis.records import SIDES, Record, read_results, table
from benchmarks.ovis.targets import targets_table

PAGE = ROOT / "docs" / "performance.md"
PLOTS = ROOT / "docs" / "performance"
RESULTS = ROOT / "benchmarks" / "ovis" / "results"
TABLE = re.compile(
    r"(<!-- table: (?P<name>\w+) \| (?P<groups>[^>]*?) -->\n)"
    r".*?(<!-- end of table -->)",
    re.DOTALL,
)

SHOWN = ("torch", "torchvision", "pillow")

PLOTTED = {
    "picture to tiles": "Picture to tiles, one thread",
    "encode": "Vision encode",
    "server throughput": "Server, different 1920x1080 JPEGs",
    "server time to first token": "Server, time to first token",
}


Results = dict[str, tuple[dict[str, Any], list[Record]]]


def load_results(page: str, folder: Path) -> Results:
    """The kept results that a page has tables of, by name; those there are."""
    names = sorted({match["name"] for match in TABLE.finditer(page)})
    files = {name: folder / f"{name}.json" for name in names}
    return {name: read_results(file) for name, file in files.items() if file.exists()}


def fill_tables(page: str, results: Results) -> str:
    """The page with every table made anew, of those rows that were measured."""

    def fill(match: re.Match[str]) -> str:
        name, groups = match["name"], match["groups"].split("; ")
        about, records = results.get(name, ({}, []))
        if records and groups == ["targets"]:
            return f"{match[1]}\n{targets_table(records)}\n\n{match[4]}"
        rows = [row for group in groups for row in records if row.group == group]
        if not rows:
            return f"{match[1]}\nNot measured yet.\n\n{match[4]}"
        plots = [
            f"![{PLOTTED[group]}]({PLOTS.name}/{plot_file(name, group)})\n\n"
            for group in groups
            if group in PLOTTED and any(row.group == group for row in rows)
        ]
        return (
            f"{match[1]}\n{describe(about)}\n\n{table(rows)}\n\n{''.join(plots)}"
            f"{match[4]}"
        )

    return TABLE.sub(fill, page)


def plot_file(name: str, group: str) -> str:
    """Name of the plot of a group of rows."""
    return f"{name}-{group.replace(' ', '-')}.svg"


def describe(about: dict[str, Any]) -> str:
    """What results were measured on, in a line."""
    machine = ", ".join(about["gpus"]) or about["processor"]
    parts = [machine, f"{about['cores']} cores", f"Python {about['python']}"]
    parts += [f"{side} {about[side]}" for side in SIDES if side in about]
    parts += [f"{name} {about[name]}" for name in SHOWN if name in about]
    load = f", load average {about['load']} before the run" if "load" in about else ""
    return f"{', '.join(parts)}; {about['date']}{load}."


def plot(title: str, rows: Sequence[Record], path: Path) -> None:
    """Draw release, fork and floor of each row as bars.

    Args:
        title: Title of the plot.
        rows: Rows of one group, in one unit.
        path: The SVG file to write; the same rows give the same bytes.

    """
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "ovis"
    labels = [row.name.partition(": ")[2] for row in rows]
    figure, axes = plt.subplots(figsize=(7, 0.6 + 0.7 * len(rows)))
    for offset, side, colour in (
        (-0.2, "upstream", "#9aa5b1"),
        (0.2, "fork", "#2563eb"),
    ):
        values = [getattr(row, side) or 0 for row in rows]
        places = [index + offset for index in range(len(rows))]
        name = "release" if side == "upstream" else side
        bars = axes.barh(places, values, height=0.38, color=colour, label=name)
        axes.bar_label(bars, [f" {value:.3g}" for value in values], fontsize=8)
    floors = [(row.floor, index) for index, row in enumerate(rows) if row.floor]
    if floors:
        axes.plot(*zip(*floors), "k|", markersize=22, label="floor")
    axes.set_yticks(range(len(rows)), labels)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel(rows[0].unit)
    axes.set_title(title)
    axes.legend(loc="best", fontsize=8, markerscale=0.4)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    """Make tables and plots of everything that is kept."""
    page = PAGE.read_text(encoding="utf-8")
    results = load_results(page, RESULTS)
    PAGE.write_text(fill_tables(page, results), encoding="utf-8")
    for name, (_, records) in results.items():
        for group, title in PLOTTED.items():
            rows = [row for row in records if row.group == group]
            if rows:
                plot(f"{title} ({name})", rows, PLOTS / plot_file(name, group))


if __name__ == "__main__":
    main()
