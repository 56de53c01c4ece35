# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Conversations written as text, as the authors' formatters write them.

The three families of text models differ in headers, in the system turn and in white
space; nothing else in this package depends on that.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from .tiling import IMAGE_MARKER

Message: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True)
class TurnFormat:
    """How a family of text models writes a conversation.

    Attributes:
        begin: Text in front of the first turn.
        header: Start of a turn, with `{role}`.
        end: End of a turn.
        roles: The family's name of each role; a role not named is refused.
        default_system: System turn put in front if the first turn is none.
        strip: Whether outer white space of a turn is dropped.

    """

    begin: str
    header: str
    end: str
    roles: Mapping[str, str]
    default_system: str | None
    strip: bool


_SAME_ROLES = {"system": "system", "user": "user", "assistant": "assistant"}

# Authors' behaviour, golden `expected.prompt` of every case.
_TURN_FORMATS: Mapping[str, TurnFormat] = {
    "qwen2": TurnFormat(
        begin="",
        header="<|im_start|>{role}\n",
        end="<|im_end|>\n",
        roles=_SAME_ROLES,
        default_system="You are a helpful assistant.",
        strip=False,
    ),
    "gemma2": TurnFormat(
        begin="<bos>",
        header="<start_of_turn>{role}\n",
        end="<end_of_turn>\n",
        roles={"user": "user", "assistant": "model"},
        default_system=None,
        strip=True,
    ),
    "llama": TurnFormat(
        begin="<|begin_of_text|>",
        header="<|start_header_id|>{role}<|end_header_id|>\n\n",
        end="<|eot_id|>",
        roles=_SAME_ROLES,
        default_system="You are a helpful and honest multimodal assistant.",
        strip=True,
    ),
}


def turn_format(text_model_type: str) -> TurnFormat:
    """How a text model of type qwen2, gemma2 or llama writes a conversation.

    Raises:
        ValueError: Another type of text model.

    """
    if text_model_type not in _TURN_FORMATS:
        raise ValueError(
            f"unknown text model type {text_model_type!r}, "
            f"known: {', '.join(_TURN_FORMATS)}"
        )
    return _TURN_FORMATS[text_model_type]


def format_conversation(
    messages: Sequence[Message],
    style: TurnFormat,
    *,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
) -> str:
    """Write a conversation as text (golden `expected.prompt`, every case).

    Args:
        messages: `{"role": ..., "content": ...}` with role system, user or assistant;
            content is a text, or parts which are joined by line breaks:
            `{"type": "text", "text": ...}`, and any part with type image or image_url,
            which becomes `<image>`.
        style: Format of the family, from `turn_format`.
        add_generation_prompt: Open an assistant turn at the end.
        continue_final_message: Leave the last message open, for an answer that begins
            with given words.

    Returns:
        The text; `<image>` in it marks the places of pictures.

    Raises:
        ValueError: No message, a role that the family does not have, content of
            another form, or both options at once.

    """
    if add_generation_prompt and continue_final_message:
        raise ValueError(
            "add_generation_prompt and continue_final_message exclude each other"
        )
    turns = [
        (message["role"], _flatten_content(message["content"])) for message in messages
    ]
    if not turns:
        raise ValueError("a conversation must have at least one message")
    if style.default_system is not None and turns[0][0] != "system":
        turns.insert(0, ("system", style.default_system))
    written = [style.begin]
    for role, content in turns:
        if role not in style.roles:
            raise ValueError(
                f"this model has no turns of role {role!r}, it has: "
                f"{', '.join(style.roles)}"
            )
        text = content.strip() if style.strip else content
        written += [style.header.format(role=style.roles[role]), text, style.end]
    if continue_final_message:
        written.pop()
    if add_generation_prompt:
        written.append(style.header.format(role=style.roles["assistant"]))
    return "".join(written)


def _flatten_content(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise ValueError(
            f"the content of a message must be text or a list of parts, got {content!r}"
        )
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text":
            texts.append(part["text"])
        elif kind in ("image", "image_url"):
            texts.append(IMAGE_MARKER)
        else:
            raise ValueError(
                "a part of a message must have type text, image or image_url, "
                f"got {part!r}"
            )
    return "\n".join(texts)
