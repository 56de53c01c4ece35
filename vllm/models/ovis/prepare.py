# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Write a checkpoint in the prepared layout, for a repository on a hub.

python -m vllm.models.ovis.prepare SOURCE TARGET

SOURCE is a folder in the authors' layout. In TARGET the layout marks have tokens of
their own, the chat template takes pictures, the text model's sizes stand in config.json
beside its own, and `processing_ovis.py` gives ids and tiles without vLLM
(`AutoProcessor.from_pretrained(..., trust_remote_code=True)`). The engine itself runs
none of that code and answers as it does for SOURCE. Weights are linked where the file
system can, else copied.
"""

import argparse
import ast
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .chat import TurnFormat, turn_format
from .config import OvisConfig
from .tiling import IMAGE_MARKER

ADDED_TOKENS = (
    IMAGE_MARKER,
    "<image_atom>",
    "<img>",
    "<pre>",
    "<col>",
    "<row>",
    "</img>",
    "<image_pad>",
)
"""Tokens of the prepared layout, at the next free ids (151665 to 151672 in the released
vocabulary): marker, tile, the five indicators in table order, and the last holds every
image position."""

PROCESSING_FILE = "processing_ovis.py"

_TEXT_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "vocab_size",
)
_TOKEN_FLAGS = {
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
    "special": True,
}
_WEIGHT_SUFFIXES = (".safetensors", ".bin")
# In the order in which each needs the ones before it.
_PROCESSING_MODULES = ("tiling", "images", "chat", "processor")

# The library of csrc/ovis is not part of a hub repository, so Pillow resizes there.
_RESAMPLE = '''
def resample(image, boxes, rectangles, pixels, threads):
    """Resize boxes of an RGB picture into rectangles of a tile buffer, bicubic.

    Pillow takes one thread, whatever `threads` allows.
    """
    bicubic = Image.Resampling.BICUBIC
    for box, (top, left, height, width), tile in zip(
        boxes, rectangles.tolist(), pixels, strict=True
    ):
        resized = image.crop(box).resize((width, height), bicubic)
        tile[top : top + height, left : left + width] = np.asarray(resized)
'''

_AUTO_PROCESSOR = '''
class OvisAutoProcessor(OvisProcessor):
    """What `AutoProcessor` needs of a class that it loads from a repository."""

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoProcessor"):
        """Nothing to do: the class is not saved again."""

    @classmethod
    def from_pretrained(cls, path, *, revision=None, **kwargs):
        """Read a checkpoint; see `OvisProcessor.from_pretrained`."""
        return super().from_pretrained(path, revision=revision)
'''


def prepare(source: Path, target: Path) -> None:
    """Write the prepared layout of a checkpoint.

    Args:
        source: Folder in the authors' layout, with a tokenizer.json.
        target: Folder to make; its parent exists.

    Raises:
        ValueError: The source is no such folder or is prepared already, the target
            exists, or the text model's vocabulary has no room for eight tokens.

    """
    if target.exists():
        raise ValueError(f"{target} exists; name a folder that does not.")
    for name in ("config.json", "preprocessor_config.json", "tokenizer.json"):
        if not (source / name).is_file():
            raise ValueError(f"{source} has no {name}; give a checkpoint's folder.")
    config = _read(source / "config.json")
    if config.get("model_type") != "ovis":
        raise ValueError(
            f"{source} has model_type {config.get('model_type')!r}; only the authors' "
            'layout of Ovis 1.6 and 2 ("ovis") can be prepared.'
        )
    tokenizer = _read(source / "tokenizer.json")
    text_config = OvisConfig(**config).llm_config
    first_id = next_token_id(tokenizer)
    room = text_config.vocab_size - first_id
    if room < len(ADDED_TOKENS):
        raise ValueError(
            f"the text model's vocabulary has room for {room} more tokens, the "
            f"prepared layout needs {len(ADDED_TOKENS)}."
        )
    added = {token: first_id + k for k, token in enumerate(ADDED_TOKENS)}

    written: dict[str, Any] = {
        "config.json": prepared_config(config, text_config, added[ADDED_TOKENS[-1]]),
        "tokenizer.json": with_added_tokens(tokenizer, added),
        "chat_template.json": {
            "chat_template": chat_template(turn_format(text_config.model_type))
        },
    }
    written["preprocessor_config.json"] = {
        **_read(source / "preprocessor_config.json"),
        "auto_map": {"AutoProcessor": _auto_class()},
    }
    for name, edit in (
        ("tokenizer_config.json", _with_token_entries),
        ("added_tokens.json", lambda old, new: {**old, **new}),
    ):
        if (source / name).is_file():
            written[name] = edit(_read(source / name), added)

    target.mkdir()
    for name, content in written.items():
        text = json.dumps(content, indent=2, ensure_ascii=False)
        (target / name).write_text(text + "\n", encoding="utf-8")
    (target / PROCESSING_FILE).write_text(processing_source(), encoding="utf-8")
    for file in sorted(source.iterdir()):
        # The authors' own code is left behind: no entry of auto_map names it here.
        kept = not file.name.startswith(".") and file.suffix != ".py"
        if file.is_file() and kept and file.name not in written:
            _take(file, target / file.name)


def next_token_id(tokenizer: dict[str, Any]) -> int:
    """Smallest id above all of a tokenizer.json.

    Raises:
        ValueError: It has one of the added tokens already.

    """
    vocabulary: dict[str, int] = dict(tokenizer["model"]["vocab"])
    vocabulary.update((t["content"], t["id"]) for t in tokenizer["added_tokens"])
    present = [token for token in ADDED_TOKENS if token in vocabulary]
    if present:
        raise ValueError(f"the tokenizer has {', '.join(present)} already.")
    return 1 + max(vocabulary.values())


def with_added_tokens(
    tokenizer: dict[str, Any], added: dict[str, int]
) -> dict[str, Any]:
    """A tokenizer.json with further special tokens."""
    entries = [
        {"id": token_id, "content": token, **_TOKEN_FLAGS}
        for token, token_id in added.items()
    ]
    return {**tokenizer, "added_tokens": [*tokenizer["added_tokens"], *entries]}


def _with_token_entries(config: dict[str, Any], added: dict[str, int]) -> Any:
    entries = {str(i): {"content": t, **_TOKEN_FLAGS} for t, i in added.items()}
    known = config.get("added_tokens_decoder", {})
    return {**config, "added_tokens_decoder": {**known, **entries}}


def prepared_config(
    config: dict[str, Any], text_config: Any, image_token_id: int
) -> dict[str, Any]:
    """A config.json that also says what a reader of text models looks for."""
    return {
        **config,
        **{size: getattr(text_config, size) for size in _TEXT_SIZES},
        "image_token_id": image_token_id,
        "auto_map": {"AutoProcessor": _auto_class()},
    }


def chat_template(style: TurnFormat) -> str:
    """Jinja template that writes what `chat.format_conversation` writes."""
    before, after = (json.dumps(part) for part in style.header.split("{role}"))
    end, marker = json.dumps(style.end), json.dumps(IMAGE_MARKER)
    strip = " | trim" if style.strip else ""
    lines = [f"{{{{- {json.dumps(style.begin)} }}}}"]
    if style.default_system is not None:
        default = json.dumps(style.default_system)
        role = json.dumps(style.roles["system"])
        lines += [
            "{%- if messages[0]['role'] != 'system' %}",
            f"{{{{- {before} + {role} + {after} + {default} + {end} }}}}",
            "{%- endif %}",
        ]
    assistant = json.dumps(style.roles["assistant"])
    lines += [
        f"{{%- set roles = {json.dumps(dict(style.roles))} %}}",
        "{%- for message in messages %}",
        "{%- if message['role'] not in roles %}",
        "{{- raise_exception('this model has no turns of role ' + message['role']) }}",
        "{%- endif %}",
        "{%- set texts = namespace(all=[]) %}",
        "{%- if message['content'] is string %}",
        "{%- set texts.all = [message['content']] %}",
        "{%- else %}",
        "{%- for part in message['content'] %}",
        f"{{%- set texts.all = texts.all + [part['text'] if part['type'] == 'text' "
        f"else {marker}] %}}",
        "{%- endfor %}",
        "{%- endif %}",
        f"{{{{- {before} + roles[message['role']] + {after} }}}}",
        f'{{{{- texts.all | join("\\n"){strip} }}}}',
        f"{{{{- {end} }}}}",
        "{%- endfor %}",
        "{%- if add_generation_prompt %}",
        f"{{{{- {before} + {assistant} + {after} }}}}",
        "{%- endif %}",
    ]
    return "\n".join(lines)


def processing_source() -> str:
    """Source of a module with `OvisProcessor` that imports nothing of vLLM's."""
    folder = Path(__file__).parent
    imports: set[str] = set()
    bodies = []
    for name in _PROCESSING_MODULES:
        text = (folder / f"{name}.py").read_text(encoding="utf-8")
        found, body = _split_imports(text)
        imports |= found
        bodies.append(body)
        if name == "tiling":
            bodies.append(_RESAMPLE)
    header = (folder / "prepare.py").read_text(encoding="utf-8").splitlines()[:2]
    title = (
        '"""Ids and tiles of Ovis 1.6 and 2; written by vllm.models.ovis.prepare."""'
    )
    parts = ["\n".join([*header, title]), "\n".join(sorted(imports)), *bodies]
    return "\n\n".join(part.strip("\n") for part in [*parts, _AUTO_PROCESSOR]) + "\n"


def _split_imports(source: str) -> tuple[set[str], str]:
    """Absolute imports of a module, and its text without docstring and imports."""
    lines = source.splitlines()
    imports = set()
    tree = ast.parse(source)
    for node in tree.body:
        is_import = isinstance(node, ast.Import | ast.ImportFrom)
        is_docstring = node is tree.body[0] and isinstance(node, ast.Expr)
        if not is_import and not is_docstring:
            continue
        if is_import and getattr(node, "level", 0) == 0:
            imports.add(ast.unparse(node))
        assert node.end_lineno is not None
        for number in range(node.lineno - 1, node.end_lineno):
            lines[number] = ""
    body = "\n".join(line for line in lines if not line.startswith("# SPDX-"))
    return imports, body


def _auto_class() -> str:
    return f"{Path(PROCESSING_FILE).stem}.OvisAutoProcessor"


def _take(file: Path, target: Path) -> None:
    """Link weights, which are large and never edited; copy the rest."""
    print(f"  {file.name}", flush=True)
    if file.suffix in _WEIGHT_SUFFIXES:
        try:
            os.link(file.resolve(), target)
            return
        except OSError:  # Another file system, or one without links.
            pass
    shutil.copy(file, target)


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; exit status 2 if an argument is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m vllm.models.ovis.prepare",
        description="Write an Ovis 1.6 or 2 checkpoint in the prepared layout.",
    )
    parser.add_argument("source", type=Path, help="folder in the authors' layout")
    parser.add_argument("target", type=Path, help="folder to make")
    given = parser.parse_args(arguments)
    try:
        prepare(given.source, given.target)
    except ValueError as error:
        parser.error(str(error))
    print(f"{given.target} is ready.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
