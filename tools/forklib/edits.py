# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Declared edits: a line of an upstream file and what happens there."""

from collections.abc import Sequence
from dataclasses import dataclass

from .errors import ForkError

PLACES = ("before", "after", "replace")


@dataclass(frozen=True)
class Edit:
    """One declared edit.

    Attributes:
        file: Upstream path of the edited file.
        anchor: A whole line of that file, without its newline, found exactly once.
        place: "before" or "after" the anchor, or "replace".
        lines: Lines to write there, without newlines.
        where: "FILE:LINE" of the declaration, for messages.

    """

    file: str
    anchor: str
    place: str
    lines: tuple[str, ...]
    where: str


def apply_edit(text: str, edit: Edit) -> str:
    """`text` with one edit applied.

    Raises:
        ForkError: If the anchor is not a line of `text` exactly once.

    """
    lines = text.split("\n")
    hits = [number for number, line in enumerate(lines) if line == edit.anchor]
    if len(hits) != 1:
        found = ", ".join(str(hit + 1) for hit in hits)
        problem = f"found {len(hits)} times (lines {found})" if hits else "not found"
        raise ForkError(
            f"{edit.where}: the anchor must be one line of {edit.file}, "
            f"but was {problem}: {edit.anchor!r}"
        )
    at = hits[0]
    if edit.place == "before":
        lines[at:at] = edit.lines
    elif edit.place == "after":
        lines[at + 1 : at + 1] = edit.lines
    else:
        lines[at : at + 1] = edit.lines
    return "\n".join(lines)


def apply_edits(text: str, edits: Sequence[Edit]) -> str:
    """`text` with all edits applied in order, each to the result of the one before.

    Raises:
        ForkError: As for `apply_edit`.

    """
    for edit in edits:
        text = apply_edit(text, edit)
    return text
