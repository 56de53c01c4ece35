# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Scripts that measure the vLLM of the Python they run in, whichever it is."""

import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks.ovis.records import Measurement, write_measurements


def run_worker(measure: Callable[..., Iterable[Measurement]]) -> None:
    """Call `measure` with the arguments of the command line and keep its result.

    The first argument of the command line is the file to write.
    """
    output, *arguments = sys.argv[1:]
    write_measurements(Path(output), measure(*arguments))
