# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The whole model: tower, visual vocabulary, merge, stock text model.

Rules: ``tests/golden/ovis2/NOTES.md``, sections Visual tokens, Merge, Gemma2 and Mask.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from .preprocess import ATOM, START, PixelRule, placeholder_ids, preprocess
from .prompt import FORMATTERS, Turn, expand_markers, prompt_ids
from .towers import TOWERS

INDICATORS = 5
"""Rows of vte kept for start, prefix, column, row and end: its last five, in order."""


class VisualTokenizer(nn.Module):
    """Tower and head: pixels to probabilities over the visual vocabulary."""

    def __init__(self, c: dict) -> None:
        super().__init__()
        backbone = c["backbone_config"]
        self.stride = c["hidden_stride"]
        self.function = c["tokenize_function"]
        words = c["vocab_size"] - INDICATORS
        self.backbone = TOWERS[c["model_type"]](backbone)
        self.head = nn.Sequential(
            nn.Linear(backbone["hidden_size"] * self.stride**2, words, bias=False),
            nn.LayerNorm(words),
        )

    def features(self, pixels: Tensor) -> Tensor:
        """Tower output with stride x stride neighbours side by side.

        Args:
            pixels: [tiles, 3, side, side].

        Returns:
            [tiles, tokens, stride**2 * width]; the patch grid is padded with zeros at
            the bottom and right where the stride does not divide it.

        """
        x = self.backbone(pixels)
        side, s = int(x.shape[1] ** 0.5), self.stride
        pad = -side % s
        x = F.pad(x.unflatten(1, (side, side)), (0, 0, 0, pad, 0, pad))
        x = x.unflatten(2, (-1, s)).unflatten(1, (-1, s))
        return x.permute(0, 1, 3, 2, 4, 5).flatten(3).flatten(1, 2)

    def probabilities(self, features: Tensor) -> Tensor:
        """Visual tokens: [tiles, tokens, features] -> [tiles, tokens, words].

        ``gumbel_argmax`` is random in training only; here it is its mode, the argmax.

        Raises:
            ValueError: The checkpoint names an unknown tokenize_function.

        """
        logits = self.head(features)
        if self.function == "softmax":
            return logits.softmax(-1)
        if self.function in ("st_argmax", "gumbel_argmax"):
            return F.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)
        raise ValueError(
            f"tokenize_function {self.function!r} is not one of softmax, st_argmax, "
            "gumbel_argmax"
        )


class Ovis(nn.Module):
    """Ovis 1.6 or 2 from the authors' file layout.

    Args:
        config: Content of config.json.

    """

    def __init__(self, config: dict) -> None:
        super().__init__()
        visual, text = config["visual_tokenizer_config"], dict(config["llm_config"])
        self.config = config
        self.visual_tokenizer = VisualTokenizer(visual)
        self.vte = nn.Embedding(visual["vocab_size"], config["hidden_size"])
        text_config = AutoConfig.for_model(text.pop("model_type"), **text)
        self.llm = AutoModelForCausalLM.from_config(
            text_config, attn_implementation="eager", dtype=torch.float32
        )

    @property
    def tokens_per_tile(self) -> int:
        c = self.config["visual_tokenizer_config"]
        patches = (
            c["backbone_config"]["image_size"] // c["backbone_config"]["patch_size"]
        )
        return (-(-patches // c["hidden_stride"])) ** 2

    def visual_embeddings(self, pixels: Tensor) -> Tensor:
        """Pixels [tiles, 3, side, side] -> embeddings [tiles, tokens, hidden].

        The five indicator rows have probability zero, so they take no part.
        """
        features = self.visual_tokenizer.features(pixels)
        words = self.visual_tokenizer.probabilities(features)
        return words @ self.vte.weight[: words.shape[-1]]

    def merge(self, ids: Sequence[int], visual: Tensor) -> Tensor:
        """Embed text ids, put indicator rows and tile embeddings in their places.

        Args:
            ids: Prompt ids with expanded placeholders.
            visual: [tiles, tokens, hidden], as many tiles as ids has ATOMs.

        Returns:
            [merged length, hidden], before any scaling inside the text model.

        """
        table = self.llm.get_input_embeddings().weight
        first_indicator = self.vte.num_embeddings - INDICATORS
        tiles = iter(visual)
        rows = []
        for i in ids:
            if i >= 0:
                rows.append(table[i : i + 1])
            elif i == ATOM:
                rows.append(next(tiles))
            else:
                row = first_indicator + START - i
                rows.append(self.vte.weight[row : row + 1])
        return torch.cat(rows)

    def merge_mask(self, ids: Sequence[int], pad_id: int) -> Tensor:
        """The authors' attention mask, [merged length]: false at typed pad tokens."""
        tokens = self.tokens_per_tile
        return torch.cat(
            [torch.full((tokens if i == ATOM else 1,), i != pad_id) for i in ids]
        )

    def logits(self, embeds: Tensor, mask: Tensor | None = None) -> Tensor:
        """Logits of the token after the last position: [length, hidden] -> [vocab].

        Gemma 2 scales its input by sqrt(hidden size).  The stock embedding layer does
        so for text; the authors' stack did it for the whole merged sequence, hence the
        factor here.
        """
        embedding = self.llm.get_input_embeddings()
        embeds = embeds * getattr(embedding, "scalar_embed_scale", 1.0)
        extra = {}
        if mask is not None:
            extra = {
                "attention_mask": mask[None].long(),
                "position_ids": (mask.long().cumsum(0) - 1).clamp(min=0)[None],
            }
        out = self.llm(inputs_embeds=embeds[None], use_cache=False, **extra)
        return out.logits[0, -1]

    def greedy(
        self,
        embeds: Tensor,
        count: int,
        mask: Tensor | None = None,
        stop: Sequence[int] = (),
    ) -> list[int]:
        """Greedy continuation, recomputed from the start for every token.

        No cache: with a sliding window the stock Gemma 2 cache is not trusted.

        Args:
            embeds: Merged prompt embeddings, [length, hidden].
            count: Most tokens to generate.
            mask: Optional mask of the prompt's positions, [length].
            stop: Ids which end the continuation; they are not returned.

        """
        table = self.llm.get_input_embeddings().weight
        answer: list[int] = []
        for _ in range(count):
            best = int(self.logits(embeds, mask).argmax())
            if best in stop:
                break
            answer.append(best)
            embeds = torch.cat([embeds, table[best : best + 1]])
            if mask is not None:
                mask = F.pad(mask, (0, 1), value=True)
        return answer


class Reference:
    """A checkpoint folder with its tokeniser and pixel rule, ready to answer.

    Args:
        folder: Folder in the authors' layout: config.json, model.safetensors,
            preprocessor_config.json and tokeniser files.

    """

    def __init__(self, folder: str | Path) -> None:
        folder = Path(folder)
        config = json.loads((folder / "config.json").read_text("utf-8"))
        rule = json.loads((folder / "preprocessor_config.json").read_text("utf-8"))
        self.rule = PixelRule.from_config(rule)
        self.format = FORMATTERS[config["conversation_formatter_class"]]
        self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.model = Ovis(config)
        load_weights(self.model, load_file(folder / "model.safetensors"))
        self.model.eval()

    def encode(self, text: str) -> list[int]:
        """Token ids of a piece of prompt, without special tokens around it."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def prepare(
        self,
        images: Sequence[Image.Image],
        conversation: str | Sequence[Turn],
        preface: str = "",
        max_partition: int = 9,
    ) -> tuple[list[int], Tensor]:
        """Prompt ids with expanded placeholders, and all tiles of all images.

        Returns:
            The ids, and float32 [tiles, 3, side, side].

        """
        done = [preprocess(image, self.rule, max_partition) for image in images]
        marked = prompt_ids(self.format(conversation, preface), self.encode)
        ids = expand_markers(marked, [placeholder_ids(grid) for _, grid in done])
        side = self.rule.side
        tiles = [torch.from_numpy(pixels) for pixels, _ in done]
        return ids, torch.cat([torch.zeros(0, 3, side, side), *tiles])

    @torch.inference_mode()
    def embed(self, ids: Sequence[int], pixels: Tensor) -> Tensor:
        """Merged prompt embeddings, [length, hidden], in the model's dtype."""
        pixels = pixels.to(self.model.vte.weight.dtype)
        return self.model.merge(ids, self.model.visual_embeddings(pixels))

    @torch.inference_mode()
    def answer(
        self,
        images: Sequence[Image.Image],
        question: str,
        max_partition: int = 9,
        count: int = 32,
    ) -> str:
        """Answer a question about images, greedily.

        Each image is put before the question, as an OpenAI chat request with the image
        parts first is rendered.
        """
        text = "<image>\n" * len(images) + question
        ids, pixels = self.prepare(images, text, max_partition=max_partition)
        stop = [self.tokenizer.eos_token_id]
        tokens = self.model.greedy(self.embed(ids, pixels), count, stop=stop)
        return str(self.tokenizer.decode(tokens))


def load_weights(model: Ovis, weights: dict[str, Tensor]) -> None:
    """Load a checkpoint's weights as float32, strictly.

    Norms and pooling heads behind the last block are stored but never used; a tied
    text head may be stored or absent.

    Raises:
        ValueError: A weight is missing, or one is left over.

    """
    backbone = "visual_tokenizer.backbone."
    unused = tuple(backbone + n for n in model.visual_tokenizer.backbone.unused)
    kept = {k: v.float() for k, v in weights.items() if not k.startswith(unused)}
    missing, unexpected = model.load_state_dict(kept, strict=False)
    if model.llm.config.tie_word_embeddings:
        missing = [name for name in missing if name != "llm.lm_head.weight"]
    if missing or unexpected:
        raise ValueError(
            f"weights do not fit: missing {missing}, unexpected {unexpected}"
        )
    model.llm.tie_weights()
