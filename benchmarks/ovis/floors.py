# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What a device cannot go below: operations and bytes of each stage of the encode.

Only matrix products and attention are counted as operations, and only what must be read
and written once as bytes: an implementation that overlaps or fuses everything still
needs as long as the larger of the two takes at the device's measured speed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NUM_INDICATORS = 5
BYTES = 2
"""Of a bfloat16 value."""


@dataclass(frozen=True)
class Speed:
    """Speed of a device, measured on it.

    Attributes:
        flops: Operations a second of a large bfloat16 matrix product.
        bandwidth: Bytes a second of a large copy, read and written ones both counted.

    """

    flops: float
    bandwidth: float

    def milliseconds(self, work: "Work") -> float:
        """Time that some work takes at least."""
        return max(work.operations / self.flops, work.bytes / self.bandwidth) * 1e3


@dataclass(frozen=True)
class Work:
    """Operations (a multiplication and an addition are two) and bytes."""

    operations: float
    bytes: float


@dataclass(frozen=True)
class Sizes:
    """Numbers of a checkpoint's config.json that decide the work.

    Attributes:
        side: Side of a tile in pixels.
        patches: Patches of a tile.
        patch_values: Values of a patch.
        width: Channels of the tower.
        inner: Width of the tower's MLP.
        layers: Layers of the tower.
        tokens: Visual tokens of a tile.
        joined: Values that the head reads for a token.
        words: Visual words that the head writes.
        hidden: Width of the text model.
        text_weights: Weights that a text token is multiplied with, embedding and
            logits left out.

    """

    side: int
    patches: int
    patch_values: int
    width: int
    inner: int
    layers: int
    tokens: int
    joined: int
    words: int
    hidden: int
    text_weights: int

    @staticmethod
    def of(config: Mapping[str, Any]) -> "Sizes":
        """From the content of an Ovis2 config.json with an AIMv2 tower."""
        visual, text = config["visual_tokenizer_config"], config["llm_config"]
        tower, stride = visual["backbone_config"], visual["hidden_stride"]
        across = tower["image_size"] // tower["patch_size"]
        hidden = text["hidden_size"]
        keys = hidden * text["num_key_value_heads"] // text["num_attention_heads"]
        layer = 2 * hidden * (hidden + keys) + 3 * hidden * text["intermediate_size"]
        return Sizes(
            side=tower["image_size"],
            patches=across**2,
            patch_values=3 * tower["patch_size"] ** 2,
            width=tower["hidden_size"],
            inner=tower["intermediate_size"],
            layers=tower["num_hidden_layers"],
            tokens=(across // stride) ** 2,
            joined=tower["hidden_size"] * stride**2,
            words=visual["vocab_size"] - NUM_INDICATORS,
            hidden=hidden,
            text_weights=layer * text["num_hidden_layers"],
        )


def encode_work(sizes: Sizes, tiles: int) -> dict[str, Work]:
    """Work of each stage from uint8 tiles to visual embeddings.

    - normalise: bytes in, normalised patches out.
    - tower: patch embedding; in each layer the four attention products, gate, up and
      down, and attention over all patches; its weights are read once.
    - head: the product to all words; weights, input and logits.
    - norm and softmax: logits read once, probabilities written once.
    - table: probabilities times embedding table; weights, input and output.

    Args:
        sizes: Sizes of the checkpoint.
        tiles: Tiles encoded together.

    Returns:
        Work by stage, in the order of the data.

    """
    s = sizes
    patches, tokens = tiles * s.patches, tiles * s.tokens
    weights = s.layers * (4 * s.width**2 + 3 * s.width * s.inner)
    embedding = s.patch_values * s.width
    attention = 4 * s.layers * patches * s.patches * s.width
    logits = tokens * s.words * BYTES
    return {
        "normalise": Work(0, patches * s.patch_values * (1 + BYTES)),
        "tower": Work(
            2 * patches * (weights + embedding) + attention,
            (weights + embedding + patches * (s.patch_values + s.width)) * BYTES,
        ),
        "head": Work(
            2 * tokens * s.joined * s.words,
            (s.joined * s.words + tokens * s.joined) * BYTES + logits,
        ),
        "norm and softmax": Work(0, 2 * logits),
        "table": Work(
            2 * tokens * s.words * s.hidden,
            (s.words * s.hidden + tokens * s.hidden) * BYTES + logits,
        ),
    }


def encode_floor(sizes: Sizes, tiles: int, speed: Speed) -> float:
    """Milliseconds that an encode takes at least, stage after stage."""
    return sum(speed.milliseconds(work) for work in encode_work(sizes, tiles).values())


def request_floor(sizes: Sizes, tiles: int, text_tokens: int, speed: Speed) -> float:
    """Most requests a second: encode and prefill, without the tokens of the answer.

    Args:
        sizes: Sizes of the checkpoint.
        tiles: Tiles of a request.
        text_tokens: Tokens of its prompt, visual ones included.
        speed: Speed of the device.

    """
    prefill = Work(2 * sizes.text_weights * text_tokens, 0)
    milliseconds = encode_floor(sizes, tiles, speed) + speed.milliseconds(prefill)
    return 1e3 / milliseconds
