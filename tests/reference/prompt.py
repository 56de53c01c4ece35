# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Conversation formats and token ids around images.

Rules: ``tests/golden/ovis2/NOTES.md``, sections Prompt, Llama-3, Gemma, Tokenisation.
"""

from collections.abc import Callable, Sequence

IMAGE_TEXT = "<image>"
IMAGE_MARKER = -200

Turn = dict[str, str]
"""One turn: {"from": "system" | "human" | "gpt", "value": text}."""


def _as_turns(conversation: str | Sequence[Turn]) -> list[Turn]:
    if isinstance(conversation, str):
        return [{"from": "human", "value": conversation}]
    return list(conversation)


def _with_system(turns: list[Turn], default: str) -> list[Turn]:
    if turns and turns[0]["from"] == "system":
        return turns
    return [{"from": "system", "value": default}, *turns]


def qwen_prompt(conversation: str | Sequence[Turn], preface: str = "") -> str:
    """Format for Qwen text models: nothing is stripped, no BOS."""
    roles = {"system": "system", "human": "user", "gpt": "assistant"}
    turns = _with_system(_as_turns(conversation), "You are a helpful assistant.")
    text = "".join(
        f"<|im_start|>{roles[t['from']]}\n{t['value']}<|im_end|>\n" for t in turns
    )
    return f"{text}<|im_start|>assistant\n{preface}"


def llama3_prompt(conversation: str | Sequence[Turn], preface: str = "") -> str:
    """Format for Llama 3 text models: BOS in the text, each turn stripped."""
    roles = {"system": "system", "human": "user", "gpt": "assistant"}
    turns = _with_system(
        _as_turns(conversation), "You are a helpful and honest multimodal assistant."
    )

    def header(role: str) -> str:
        return f"<|start_header_id|>{role}<|end_header_id|>\n\n"

    text = "".join(
        f"{header(roles[t['from']])}{t['value'].strip()}<|eot_id|>" for t in turns
    )
    return f"<|begin_of_text|>{text}{header('assistant')}{preface.strip()}"


def gemma_prompt(conversation: str | Sequence[Turn], preface: str = "") -> str:
    """Format for Gemma text models.

    Raises:
        ValueError: A system turn, which Gemma does not know.

    """
    roles = {"human": "user", "gpt": "model"}
    turns = _as_turns(conversation)
    if any(t["from"] == "system" for t in turns):
        raise ValueError("Gemma's format has no system turn; roles are human and gpt")
    text = "".join(
        f"<start_of_turn>{roles[t['from']]}\n{t['value'].strip()}<end_of_turn>\n"
        for t in turns
    )
    return f"<bos>{text}<start_of_turn>model\n{preface.strip()}"


FORMATTERS: dict[str, Callable[..., str]] = {
    "QwenConversationFormatter": qwen_prompt,
    "Llama3ConversationFormatter": llama3_prompt,
    "GemmaConversationFormatter": gemma_prompt,
}


def prompt_ids(prompt: str, encode: Callable[[str], list[int]]) -> list[int]:
    """Tokenise a prompt, with IMAGE_MARKER at each literal ``<image>``.

    The pieces between the marks are tokenised apart, so text never merges with an
    image (authors' behaviour, golden case adjacent_markers).

    Args:
        prompt: Formatted prompt.
        encode: Tokeniser without special tokens added.

    """
    first, *rest = prompt.split(IMAGE_TEXT)
    ids = list(encode(first))
    for piece in rest:
        ids += [IMAGE_MARKER, *encode(piece)]
    return ids


def expand_markers(ids: Sequence[int], images: Sequence[Sequence[int]]) -> list[int]:
    """Put the placeholder ids of image k in the place of marker k.

    Raises:
        ValueError: The numbers of markers and images differ.  The authors raise or
            ignore silently; this project refuses both.

    """
    markers = sum(i == IMAGE_MARKER for i in ids)
    if markers != len(images):
        raise ValueError(
            f"the prompt has {markers} {IMAGE_TEXT} markers for {len(images)} images; "
            "the numbers must be equal"
        )
    remaining = iter(images)
    expanded: list[int] = []
    for i in ids:
        expanded += next(remaining) if i == IMAGE_MARKER else [i]
    return expanded
