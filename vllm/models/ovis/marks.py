# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Where images and videos go in a prompt.

A prompt that a program wrote (`LLM.generate`, token ids) marks their places with a
literal `<image>` or `<video>`, as the authors do. In a chat request the places come
from the parts of the messages, and the words of users, tools and earlier answers must
never be taken for one: there the mark carries a random word of this process, which no
text can know, and every literal stays text.
"""

import secrets
from collections.abc import Mapping
from typing import Any, NamedTuple

import regex as re

from .tiling import IMAGE_MARKER

VIDEO_MARKER = "<video>"
MARKERS = {"image": IMAGE_MARKER, "video": VIDEO_MARKER}

# Messages are parsed and prompts are cut in the same process, so the word need not be
# known to any other. 72 random bits.
_SECRET = secrets.token_urlsafe(9)
_CHAT_MARK = re.compile(f"<({'|'.join(MARKERS)}):{_SECRET}>")


def chat_mark(modality: str) -> str:
    """Mark of an image or video in the text of a chat request."""
    return f"<{modality}:{_SECRET}>"


class MarkedPrompt(NamedTuple):
    """A prompt cut at its marks.

    Attributes:
        pieces: Token ids between the marks, one piece more than there are marks.
        modalities: Modality of each mark: image or video.

    """

    pieces: list[list[int]]
    modalities: list[str]


def cut_at_marks(
    tokenizer: Any, prompt_ids: list[int], counts: Mapping[str, int], image_pad_id: int
) -> MarkedPrompt:
    """Find the places of a request's images and videos.

    If the text has marks of a chat request, they alone count. Otherwise an image goes
    where the text has a literal `<image>` or the prompt an image pad token, and a video
    where the text has a literal `<video>`; the literal of a modality of which the
    request has no item is text. Text is cut at each mark and the pieces are tokenised
    apart, so that none merges with a mark (authors' behaviour, golden
    `prompt_input_ids_with_image_marker`).

    Args:
        tokenizer: Tokenizer of the checkpoint.
        prompt_ids: The tokenised prompt.
        counts: Items of each modality.
        image_pad_id: Token id of an image position.

    Raises:
        ValueError: The marks of a modality do not number its items.

    """
    wanted = {modality: count for modality, count in counts.items() if count}
    if not wanted:
        return MarkedPrompt([list(prompt_ids)], [])
    # Some tokenizers would tidy spaces away here, which would not be the text.
    text = tokenizer.decode(prompt_ids, clean_up_tokenization_spaces=False)
    if _CHAT_MARK.search(text):
        marked = _cut_text(tokenizer, text, _CHAT_MARK)
    else:
        literals = re.compile(f"<({'|'.join(wanted)})>")
        if literals.search(text):
            marked = _cut_text(tokenizer, text, literals)
        else:
            marked = MarkedPrompt([list(prompt_ids)], [])
        if "image" in wanted:
            marked = _cut_at_pads(marked, image_pad_id)
    for modality in MARKERS:
        found, needed = marked.modalities.count(modality), counts.get(modality, 0)
        if found != needed:
            words = repr(MARKERS[modality])
            if modality == "image":
                words += f" or {tokenizer.decode([image_pad_id])!r}"
            raise ValueError(
                f"The prompt has {found} {modality} mark(s), {words}, for {needed} "
                f"{modality}(s); their numbers must be equal. (A prompt that was "
                "truncated may have lost some.)"
            )
    return marked


def _cut_text(tokenizer: Any, text: str, mark: Any) -> MarkedPrompt:
    # With its one group, the pattern puts the modalities between the pieces.
    parts = mark.split(text)
    return MarkedPrompt(
        [
            tokenizer.encode(piece, add_special_tokens=False) if piece else []
            for piece in parts[::2]
        ],
        parts[1::2],
    )


def _cut_at_pads(marked: MarkedPrompt, pad_id: int) -> MarkedPrompt:
    pieces: list[list[int]] = []
    modalities: list[str] = []
    for index, piece in enumerate(marked.pieces):
        if index:
            modalities.append(marked.modalities[index - 1])
        pieces.append([])
        for token_id in piece:
            if token_id == pad_id:
                modalities.append("image")
                pieces.append([])
            else:
                pieces[-1].append(token_id)
    return MarkedPrompt(pieces, modalities)
