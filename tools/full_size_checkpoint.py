# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A checkpoint of Ovis2-2B's sizes with random weights, in the authors' layout.

    python -m tools.full_size_checkpoint FOLDER [--device cuda]

Seeded: the same device type and torch release give the same bytes, 4.4 GB in bfloat16.
What a trained model has and a plain random one lacks is that its choices are neither
even nor certain, and rounding shows only in such a model:

- Visual words: LayerNorm makes logits of variance one, its weight here makes the spread
  WORD_SPREAD. Measured on a tile: half of its tokens share their probability among more
  than 440 of the 65,531 words (perplexity), and the likeliest word has a tenth.
- Attention: query and key have a spread that gives scores of spread two.
- Next word: the final norm's weight gives the tied head's logits WORD_SPREAD too; the
  likeliest word of the measured prompts has 3 to 7 percent.
- Depth: what a layer adds is scaled down so that the sum of all layers, and no single
  one, makes the output; the token's own embedding is outweighed, or every answer would
  repeat the last word.
"""

import argparse
import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.ovis.checkpoint import CONFIG, write_checkpoint
from tests.reference.model import Ovis

TOKENIZER = Path(__file__).parents[1] / "tests/golden/ovis2/checkpoints/tiny-ovis2"

SEED = 20261201
WORD_SPREAD = 3.0
SHARPENED = 1.5
"""Factor on query and key projections: scores are a product of the two."""
TEXT_DAMPED, TOWER_DAMPED = 0.15, 0.5
"""Factors on what a layer adds: patches enter with length one, words much shorter."""


def weight(name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Draw one tensor, float32, on the generator's device.

    Args:
        name: Its name in the checkpoint, which decides its spread.
        shape: Its shape.
        generator: Seeded; advanced by the draw.

    """
    drawn = torch.randn(shape, generator=generator, device=generator.device)
    if name == "visual_tokenizer.head.1.weight":
        return WORD_SPREAD * (1 + 0.1 * drawn)
    if name == "llm.model.norm.weight":
        # The embedding's rows have length one, so this is the spread of the logits.
        return WORD_SPREAD * (1 + 0.1 * drawn)
    if name.endswith("bias"):
        return 0.05 * drawn
    if "norm" in name:
        return 1 + 0.1 * drawn
    if name.endswith("pos_embed"):
        return 0.3 * drawn
    if name in ("vte.weight", "llm.model.embed_tokens.weight"):
        # A sum over many visual words is shorter than one row.
        factor = 3.0 if name == "vte.weight" else 1.0
        return factor * drawn / math.sqrt(shape[-1])
    drawn /= math.sqrt(shape[1:].numel())
    width = shape[1]
    if name.endswith(("q_proj.weight", "k_proj.weight")):
        drawn *= SHARPENED
    elif name.endswith("attn.qkv.weight"):
        drawn[: 2 * width] *= SHARPENED
    elif name.endswith(("o_proj.weight", "down_proj.weight")):
        drawn *= TEXT_DAMPED
    elif name.endswith(("attn.proj.weight", "fc2.weight")):
        drawn *= TOWER_DAMPED
    return drawn


def weights(device: str) -> dict[str, Tensor]:
    """All tensors of the checkpoint, bfloat16, on the CPU.

    Names and shapes are those of the plain-torch reference; the text model's head is
    tied and not stored.
    """
    with torch.device("meta"):
        model = Ovis(CONFIG)
    generator = torch.Generator(device).manual_seed(SEED)
    return {
        name: weight(name, parameter.shape, generator).bfloat16().cpu()
        for name, parameter in model.named_parameters()
        if name != "llm.lm_head.weight"
    }


def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments = parser.parse_args()
    write_checkpoint(TOKENIZER, arguments.folder)
    print("Drawing weights", flush=True)
    drawn = weights(arguments.device)
    file = arguments.folder / "model.safetensors"
    print(f"Writing {file}", flush=True)
    save_file(drawn, file, metadata={"format": "pt"})
    print(f"{sum(t.numel() for t in drawn.values()) / 1e9:.2f} billion weights")


if __name__ == "__main__":
    main()
