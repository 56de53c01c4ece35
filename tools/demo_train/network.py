# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What training adds to the reference model: start values, batches, losses."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.reference.model import INDICATORS, Ovis
from tests.reference.preprocess import ATOM, START, PixelRule, placeholder_ids
from tests.reference.towers import AIMv2

from .examples import (
    CELLS,
    COLOUR_CLASSES,
    GLYPH_CLASSES,
    IGNORE,
    PATCHES,
    SHAPE_CLASSES,
    SLOTS,
    Layout,
)

PATCH_CLASSES = GLYPH_CLASSES + SHAPE_CLASSES - 1
CELL_CLASSES = (SLOTS * GLYPH_CLASSES, SHAPE_CLASSES, COLOUR_CLASSES)

# Most places hold nothing; at full weight, "nothing" would drown the rest.
NOTHING_WEIGHT = 0.04

Batch = dict[str, Tensor]


class Probes(nn.Module):
    """Throw-away linear readers of the extra losses.

    They ask the tower for what each patch and cell shows, before and behind the visual
    vocabulary.  Without the one before, the tower learns several times slower: the
    softmax passes on little gradient at first.
    """

    def __init__(self, width: int, stride: int, hidden: int) -> None:
        super().__init__()
        self.patch = nn.Linear(width, PATCH_CLASSES)
        self.before = nn.Linear(width * stride**2, sum(CELL_CLASSES))
        self.behind = nn.Linear(hidden, sum(CELL_CLASSES))


@torch.no_grad()
def start_values(model: Ovis, seed: int) -> None:
    """Set the weights that training starts from.

    The visual vocabulary starts as a linear passage: rows of the head come in pairs h
    and -h, rows of vte in pairs u and -u.  Then the LayerNorm's mean is zero, the
    softmax is an odd function, nearly linear at gain 1, and a visual embedding is a
    random projection of the features.  A plain random start turns one-hot within tens
    of steps and passes no gradient from then on.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(weight: Tensor, std: float) -> None:
        weight.copy_(torch.randn(weight.shape, generator=generator) * std)

    text_layers = len(model.llm.model.layers)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            std = module.in_features**-0.5
            if name.endswith(("attn.proj", "mlp.fc2", "o_proj", "down_proj")):
                std /= math.sqrt(2 * text_layers)
            normal(module.weight, std)
            if module.bias is not None:
                module.bias.zero_()
    backbone = model.visual_tokenizer.backbone
    if not isinstance(backbone, AIMv2):
        raise ValueError(f"start values are for AIMv2 towers, got {backbone!r}")
    patchifier = backbone.preprocessor.patchifier
    normal(patchifier.proj.weight, patchifier.proj.weight[0].numel() ** -0.5)
    if patchifier.proj.bias is not None:
        patchifier.proj.bias.zero_()
    normal(backbone.preprocessor.pos_embed, 0.3)
    normal(model.llm.get_input_embeddings().weight, 0.06)
    normal(model.vte.weight, 1.0)
    model.vte.weight[-INDICATORS:] *= 0.06
    head = model.visual_tokenizer.head.get_parameter("0.weight")
    words = len(head) // 2 * 2
    head[1:words:2] = -head[0:words:2]
    head[words:] = 0
    model.vte.weight[1:words:2] = -model.vte.weight[0:words:2]
    model.llm.tie_weights()


@dataclass(frozen=True)
class Scaling:
    """A pixel rule whose numbers are on the device already.

    A step that is recorded as a GPU graph may not copy from the host.
    """

    scale: float
    mean: Tensor
    std: Tensor

    @classmethod
    def of(cls, rule: PixelRule, device: torch.device) -> "Scaling":
        mean = torch.tensor(rule.mean, device=device)
        return cls(rule.scale, mean, torch.tensor(rule.std, device=device))


def recolour(tiles: Tensor, chosen: Tensor) -> Tensor:
    """Swap colour channels and invert, at random per example.

    Args:
        tiles: uint8 [batch, n, side, side, 3].
        chosen: bool [batch], the examples whose answer no colour changes.

    """
    device = tiles.device
    order = torch.rand(len(tiles), 3, device=device).argsort(1)
    order = torch.where(chosen[:, None], order, torch.arange(3, device=device))
    order = order[:, None, None, None, :].expand_as(tiles)
    invert = chosen & (torch.rand(len(tiles), device=device) < 0.5)
    flip = (invert * 255).to(torch.uint8)
    return tiles.gather(-1, order) ^ flip[:, None, None, None, None]


def normalise(tiles: Tensor, content: Tensor, scaling: Scaling) -> Tensor:
    """8-bit tiles to model input; zero outside the picture.

    Args:
        tiles: uint8 [n, side, side, 3].
        content: int16 [n, 4], the picture's left, top, right, bottom in the tile.
        scaling: The checkpoint's pixel rule.

    Returns:
        float32 [n, 3, side, side].

    """
    values = (tiles.float() * scaling.scale - scaling.mean) / scaling.std
    at = torch.arange(tiles.shape[1], device=tiles.device)
    left, top, right, bottom = content[:, :, None].unbind(1)
    column = (at >= left) & (at < right)
    row = (at >= top) & (at < bottom)
    inside = row[:, :, None] & column[:, None, :]
    return (values * inside[..., None]).permute(0, 3, 1, 2)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def text_hidden(model: Ovis, x: Tensor) -> Tensor:
    """The stock Qwen2 text model's last hidden states, without its bookkeeping.

    Same numbers as ``model.llm.model(inputs_embeds=x)`` (tested), but nothing that
    stops a GPU from recording the step.

    Args:
        model: Model whose text part is Qwen2.
        x: [batch, length, hidden].

    """
    c = model.llm.config
    heads, kv_heads = c.num_attention_heads, c.num_key_value_heads
    dim = c.hidden_size // heads
    theta = model.config["llm_config"]["rope_theta"]
    at = torch.arange(x.shape[1], device=x.device).float()
    half = torch.arange(0, dim, 2, device=x.device).float()
    angle = (at[:, None] * theta ** (-half / dim)).repeat(1, 2)
    cos, sin = angle.cos(), angle.sin()

    def norm(module: nn.Module, x: Tensor) -> Tensor:
        weight = module.get_parameter("weight")
        return F.rms_norm(x, (c.hidden_size,), weight, c.rms_norm_eps)

    for layer in model.llm.model.layers:
        attention = layer.self_attn
        y = norm(layer.input_layernorm, x)
        q = attention.q_proj(y).unflatten(-1, (heads, dim)).transpose(1, 2)
        k = attention.k_proj(y).unflatten(-1, (kv_heads, dim)).transpose(1, 2)
        v = attention.v_proj(y).unflatten(-1, (kv_heads, dim)).transpose(1, 2)
        q, k = _rotate(q, cos.to(q), sin.to(q)), _rotate(k, cos.to(k), sin.to(k))
        k = k.repeat_interleave(heads // kv_heads, 1)
        v = v.repeat_interleave(heads // kv_heads, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + attention.o_proj(y.transpose(1, 2).flatten(2))
        y = norm(layer.post_attention_layernorm, x)
        mlp = layer.mlp
        x = x + mlp.down_proj(F.silu(mlp.gate_proj(y)) * mlp.up_proj(y))
    return norm(model.llm.model.norm, x)


def merged(
    model: Ovis,
    frame: tuple[Tensor, Tensor],
    layout: Layout,
    visual: Tensor,
    suffix: Tensor,
) -> Tensor:
    """Whole prompts and answers as embeddings, [batch, length, hidden].

    Args:
        model: The model.
        frame: Token ids before the first image and between images.
        layout: Grids of the images, equal in the whole batch.
        visual: [batch, tiles, tokens, hidden].
        suffix: Token ids after the last image, [batch, suffix].

    """
    table = model.llm.get_input_embeddings()
    size, first = len(suffix), model.vte.num_embeddings - INDICATORS + START
    marks = model.vte.weight
    before, between = (table(ids).expand(size, -1, -1) for ids in frame)
    pieces, tile = [before], 0
    for k, grid in enumerate(layout):
        if k:
            pieces.append(between)
        for i in placeholder_ids(grid):
            if i == ATOM:
                pieces.append(visual[:, tile])
                tile += 1
            else:
                row = first - i
                pieces.append(marks[row : row + 1].expand(size, 1, -1))
    return torch.cat([*pieces, table(suffix)], 1)


def _classes(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy with light "nothing", and the share of right non-nothings."""
    flat, wanted = logits.float().flatten(0, -2), target.long().flatten()
    weight = torch.ones(flat.shape[-1], device=flat.device)
    weight[:1].fill_(NOTHING_WEIGHT)
    loss = F.cross_entropy(flat, wanted, weight=weight, ignore_index=IGNORE)
    something = wanted > 0
    right = (flat.argmax(-1) == wanted) & something
    return loss, right.sum() / something.sum().clamp(min=1)


def _cell_losses(read: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    slots, shape, colour = read.split(CELL_CLASSES, -1)
    slots = slots.unflatten(-1, (SLOTS, GLYPH_CLASSES))
    parts = {
        "char": _classes(slots, batch["slots"]),
        "form": _classes(shape, batch["shape"]),
        "hue": _classes(colour, batch["colour"]),
    }
    total = parts["char"][0] * 2 + parts["form"][0] + parts["hue"][0]
    return total, {key: share for key, (_, share) in parts.items()}


@dataclass
class Losses:
    """Losses of a batch, and measures worth watching (0-dimensional tensors)."""

    eyes: Tensor
    words: Tensor
    text: Tensor
    watch: dict[str, Tensor]
    exact: Tensor


def losses(
    model: Ovis,
    probes: Probes,
    scaling: Scaling,
    frame: tuple[Tensor, Tensor],
    layout: Layout,
    batch: Batch,
    eyes_only: bool,
) -> Losses:
    """All losses of one batch.

    Args:
        model: The model in training.
        probes: Readers of the extra losses.
        scaling: The checkpoint's pixel rule.
        frame: Token ids before the first image and between images.
        layout: Grids of the images.
        batch: Arrays of ``examples.shapes(layout)``, stacked.
        eyes_only: Stop before the visual vocabulary.

    Returns:
        ``eyes`` of the tower, ``words`` behind the vocabulary, ``text`` of the answers;
        ``exact`` [batch] tells which answers are right in every token.

    """
    size, tiles = batch["tiles"].shape[:2]
    flat = batch["tiles"].flatten(0, 1), batch["content"].flatten(0, 1)
    pixels = normalise(*flat, scaling)
    features = model.visual_tokenizer.features(pixels)
    width = features.shape[-1] // 4
    # Cells hold their patches side by side; put the patches back in raster order.
    patches = features.unflatten(1, (CELLS, CELLS)).unflatten(3, (2, 2, width))
    patches = patches.permute(0, 1, 3, 2, 4, 5).reshape(-1, PATCHES**2, width)
    patch_loss, patch_share = _classes(probes.patch(patches), batch["patch"])
    cell_loss, watch = _cell_losses(probes.before(features), batch)
    eyes = patch_loss + cell_loss
    watch = {"patch": patch_share, **watch}
    zero = eyes.new_zeros(())
    if eyes_only:
        return Losses(eyes, zero, zero, watch, torch.zeros(size, device=zero.device))

    probability = model.visual_tokenizer.head(features).float().softmax(-1)
    visual = probability @ model.vte.weight[: probability.shape[-1]]
    words, seen = _cell_losses(probes.behind(visual), batch)
    watch |= {f"{key}'": share for key, share in seen.items()}
    mean = probability.flatten(0, 1).mean(0)
    watch["used"] = torch.exp(-(mean * (mean + 1e-9).log()).sum())
    entropy = -(probability * (probability + 1e-9).log()).sum(-1)
    watch["perplexity"] = torch.exp(entropy.mean())

    suffix = batch["suffix"].long()
    x = merged(model, frame, layout, visual.unflatten(0, (size, tiles)), suffix)
    hidden = text_hidden(model, x)[:, -suffix.shape[1] : -1]
    logits = F.linear(hidden, model.llm.get_input_embeddings().weight).float()
    target = suffix[:, 1:]
    at = torch.arange(1, suffix.shape[1], device=suffix.device)
    asked, end = batch["answer"][:, 0:1], batch["answer"][:, 1:2]
    answer = (at >= asked) & (at < end)
    loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
    text = (loss * answer.flatten()).sum() / answer.sum()
    exact = ((logits.argmax(-1) == target) | ~answer).all(1)
    return Losses(eyes, words, text, watch, exact)
