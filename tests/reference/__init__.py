# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Plain-torch Ovis 1.6 and 2, independent of the engine.

Written from ``tests/golden/ovis2/NOTES.md`` alone and checked against the golden
arrays beside it.  It serves twice: as the oracle of the engine's tests, and as the
model that ``tools/train_demo.py`` trains.  Clarity wins over speed everywhere.
"""
