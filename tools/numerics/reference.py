# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Traces of the plain-torch reference, in any dtype, on any device."""

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.reference.model import Ovis, Reference
from tests.reference.preprocess import ATOM, PixelRule
from tests.reference.prompt import FORMATTERS

from . import trace
from .cases import Case


@dataclass(frozen=True)
class Prompt:
    """A case as the reference reads it.

    Attributes:
        text: Formatted prompt, `<image>` at each picture.
        ids: Ids with the reference's negative placeholders.
        pixels: float32 [tiles, 3, side, side].

    """

    text: str
    ids: list[int]
    pixels: Tensor


@dataclass(frozen=True)
class Layout:
    """What a checkpoint's settings say about prompts.

    Attributes:
        side: Side of a tile in pixels.
        tokens_per_tile: Visual tokens of a tile.
        format: From the user's turn to the formatted prompt.

    """

    side: int
    tokens_per_tile: int
    format: Callable[[str], str]


def layout(folder: str) -> Layout:
    """Read a checkpoint's settings without its weights."""
    config, pixels = (
        json.loads((Path(folder) / name).read_text("utf-8"))
        for name in ("config.json", "preprocessor_config.json")
    )
    with torch.device("meta"):
        tokens_per_tile = Ovis(config).tokens_per_tile
    return Layout(
        PixelRule.from_config(pixels).side,
        tokens_per_tile,
        FORMATTERS[config["conversation_formatter_class"]],
    )


def load(folder: str, device: str) -> Reference:
    """Load the float32 reference.

    On a GPU convolutions would multiply in TF32 by default; here they do not.
    """
    torch.backends.cudnn.allow_tf32 = False
    # Built on the device, tables of angles are those of an engine on that device.
    with torch.device(device):
        return Reference(folder)


def in_dtype(model: Ovis, dtype: torch.dtype) -> Ovis:
    """A copy with weights in `dtype`; buffers, the rotary frequencies, stay float32."""
    if dtype == torch.float32:
        return model
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def prepare(reference: Reference, case: Case) -> Prompt:
    """Format, tokenise and tile a case by the reference's rules."""
    ids, pixels = reference.prepare(
        case.pictures(), case.text, max_partition=case.max_partition
    )
    return Prompt(reference.format(case.text), ids, pixels)


def expanded_ids(model: Ovis, ids: Sequence[int]) -> Tensor:
    """Ids as long as the merged prompt, int64, -1 where an image stands."""
    expanded: list[int] = []
    for i in ids:
        count = model.tokens_per_tile if i == ATOM else 1
        expanded += [max(i, -1)] * count
    return torch.tensor(expanded)


def patches(model: Ovis, pixels: Tensor) -> Tensor:
    """Tiles as patches: [tiles, 3, side, side] -> [tiles, patches, 3 * patch**2]."""
    patch = model.config["visual_tokenizer_config"]["backbone_config"]["patch_size"]
    return F.unfold(pixels, patch, stride=patch).transpose(1, 2)


@torch.inference_mode()
def run(
    model: Ovis, prompt: Prompt, tokens: Sequence[int] = ()
) -> tuple[trace.Trace, Tensor]:
    """Run a prompt and the tokens behind it.

    Args:
        model: The reference in the dtype to be traced.
        prompt: What to run.
        tokens: A continuation; the model is asked at each of them.

    Returns:
        The trace of the prompt, and logits [max(1, tokens), vocabulary]: of the first
        token, then of each next one with the continuation given so far.

    """
    table = model.llm.get_input_embeddings()
    device, dtype = table.weight.device, table.weight.dtype
    made: trace.Trace = {trace.IDS: expanded_ids(model, prompt.ids)}
    with recording(model, made):
        visual = torch.zeros(0, 0, table.embedding_dim, device=device, dtype=dtype)
        if len(prompt.pixels):
            pixels = prompt.pixels.to(device, dtype)
            made[trace.PIXELS] = patches(model, pixels)
            visual = model.visual_embeddings(pixels)
            made[trace.VISUAL] = visual.flatten(0, 1)
        embeds = model.merge(prompt.ids, visual)
        length = len(embeds)
        if tokens:
            given = torch.tensor(tokens[:-1], device=device, dtype=torch.long)
            embeds = torch.cat([embeds, table.weight[given]])
        # Rounded to the working type first, as the authors' library does it.
        embeds = embeds * embeds.new_tensor(getattr(table, "scalar_embed_scale", 1.0))
        logits = model.llm(
            inputs_embeds=embeds[None],
            use_cache=False,
            logits_to_keep=max(1, len(tokens)),
        ).logits[0]
    for name in made:
        if name == trace.MERGED or name.startswith("text layer"):
            made[name] = made[name].reshape(-1, table.embedding_dim)[:length]
    made[trace.LOGITS] = logits[0]
    return made, logits


@torch.inference_mode()
def run_text(model: Ovis, merged: Tensor) -> trace.Trace:
    """Run the text model by itself.

    Args:
        model: The reference.
        merged: [prompt, hidden], as the first layer gets them.

    Returns:
        The text layers' outputs.

    """
    made: trace.Trace = {}
    with recording(model, made):
        dtype = model.llm.get_input_embeddings().weight.dtype
        model.llm.model(inputs_embeds=merged[None].to(dtype), use_cache=False)
    return {name: array[0] for name, array in made.items()}


@contextmanager
def recording(model: Ovis, made: trace.Trace) -> Iterator[None]:
    """Hooks that put what the layers make into `made` inside the block."""

    def keep(name: str) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            made[name] = output[0] if isinstance(output, tuple) else output

        return hook

    def keep_input(module: Any, inputs: Any) -> None:
        made[trace.MERGED] = inputs[0]

    backbone, layers = model.visual_tokenizer.backbone, model.llm.model.layers
    hooked: list[tuple[Any, str]] = [(backbone, trace.FEATURES)]
    for index, layer in enumerate(trace.layers_of(backbone)):
        hooked.append((layer, trace.tower_layer(index)))
    for index, layer in enumerate(layers):
        hooked.append((layer, trace.text_layer(index)))
    with ExitStack() as hooks:
        hooks.callback(layers[0].register_forward_pre_hook(keep_input).remove)
        for module, name in hooked:
            hooks.callback(module.register_forward_hook(keep(name)).remove)
        yield
