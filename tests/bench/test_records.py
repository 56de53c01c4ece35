# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Rows of the benchmark's table and how they are kept and shown."""

import pytest

from benchmarks.ovis.records import (
    Measurement,
    beside_release,
    merge,
    read_measurements,
    read_results,
    table,
    write_measurements,
    write_results,
)
from benchmarks.ovis.report import RESULTS, fill_tables, load_results, plot
from benchmarks.ovis.targets import TARGETS, Target, judge

PREPARED = ("640x480", "1920x1080", "4032x3024")
ABOUT = {"processor": "P", "gpus": [], "cores": 2, "python": "3", "date": "today"}


def rows():
    return merge(
        {
            "release": [
                Measurement("a: time", "ms", [30.0, 10.0, 20.0]),
                Measurement("a: rate", "images/s", [4.0]),
                Measurement("b: gone", "s", [1.0]),
            ],
            "fork": [
                Measurement("a: time", "ms", [5.0], 1.5),
                Measurement("a: rate", "images/s", [8.0, 16.0]),
            ],
        }
    )


def test_more_is_better_for_rates_only():
    time, rate, gone = rows()
    assert (time.upstream, time.fork, time.ratio, time.floor) == (20, 5, 4, 1.5)
    assert (rate.upstream, rate.fork, rate.ratio) == (4, 12, 3)
    assert (gone.upstream, gone.fork, gone.ratio) == (1, None, None)
    assert time.runs == {"release": 3, "fork": 1}
    assert time.spread == {"release": [10, 30], "fork": [5, 5]}


def test_two_units_and_no_values_are_refused():
    with pytest.raises(ValueError, match="'a: b' is measured in"):
        merge(
            {
                "release": [Measurement("a: b", "ms", [1.0])],
                "fork": [Measurement("a: b", "s", [1.0])],
            }
        )
    with pytest.raises(ValueError, match="no value for 'a: b'"):
        merge({"fork": [Measurement("a: b", "ms", [])]})


def test_files_give_back_what_was_written(tmp_path):
    measurements = [Measurement("a: b", "ms", [1.0, 2.0], 0.5)]
    write_measurements(tmp_path / "m.json", measurements)
    assert read_measurements(tmp_path / "m.json") == measurements
    write_results(tmp_path / "sub" / "r.json", ABOUT, rows())
    assert read_results(tmp_path / "sub" / "r.json") == (ABOUT, rows())


def test_table_leaves_unmeasured_cells_empty():
    lines = table(rows()).splitlines()
    assert lines[2] == "| a: time | ms | 20.0 (10.0 to 30.0) | 5.00 | 4.00 | 1.50 |"
    assert lines[4] == "| b: gone | s | 1.00 |  |  |  |"


def test_page_is_filled_again_and_again(tmp_path):
    write_results(tmp_path / "cpu.json", ABOUT, rows())
    page = (
        "before\n<!-- table: cpu | a -->\nold\n<!-- end of table -->\nbetween\n"
        "<!-- table: gpu | a; b -->\n<!-- end of table -->\nafter\n"
    )
    results = load_results(page, tmp_path)
    filled = fill_tables(page, results)
    assert "| a: time |" in filled and "| b: gone |" not in filled
    assert "old" not in filled and "Not measured yet." in filled
    assert all(word in filled for word in ("before", "between", "after"))
    assert fill_tables(filled, results) == filled
    assert "| a: " not in fill_tables(page.replace("| a -->", "| c -->"), results)


def test_option_of_the_fork_stands_beside_the_release():
    time, rate, _ = rows()
    alone = merge({"fork": [Measurement("a: rate", "images/s", [20.0])]})[0]
    row = beside_release(alone, rate, "faster")
    assert (row.name, row.upstream, row.fork, row.ratio) == (
        "a, faster: rate",
        4,
        20,
        5,
    )
    assert row.runs == {"release": 1, "fork": 1}
    assert row.spread == {"release": [4, 4], "fork": [20, 20]}
    assert beside_release(alone, None, "faster").upstream is None


def test_targets_are_judged_by_limit_and_ratio():
    time, rate, gone = rows()  # 5 ms, ratio 4; 12 images/s, ratio 3
    assert judge(Target(time.name, 5, 4), time)
    assert not judge(Target(time.name, 4.9), time)
    assert not judge(Target(time.name, ratio=4.1), time)
    assert judge(Target(rate.name, 12), rate)
    assert not judge(Target(rate.name, 12.1, 3), rate)
    assert not judge(Target(gone.name, 2), gone)
    assert not judge(Target(gone.name, ratio=1), gone)


def test_every_target_is_of_a_row_that_is_measured():
    """Kept results of the GPU have all rows but those of a later option."""
    names = {row.name for row in read_results(RESULTS / "h200.json")[1]}
    known = names | {f"picture to tiles: {size}" for size in PREPARED}
    assert {target.row for target in TARGETS} <= known


def test_plot_is_the_same_for_the_same_rows(tmp_path):
    pytest.importorskip("matplotlib")
    some = [row for row in rows() if row.unit == "ms"]
    plot("title", some, tmp_path / "one.svg")
    plot("title", some, tmp_path / "two.svg")
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
