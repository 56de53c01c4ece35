# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Tiles to visual embeddings: patches, tower, head, visual vocabulary.

A tile's features are joined in squares of neighbours, projected to logits over a
visual vocabulary, normalised, turned into a probability, and the probability-weighted
sum of the visual embedding table's rows enters the text model
(Ovis, https://arxiv.org/abs/2405.20797).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from vllm import envs
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    get_tp_group,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.quantization import QuantizationConfig
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.vision import is_vit_use_data_parallel
from vllm.model_executor.utils import set_weight_attrs
from vllm.utils.math_utils import cdiv, round_up

from .config import NUM_INDICATORS, VisionConfig
from .images import normalization_table
from .ops import (
    normalized_patches,
    padded_patches,
    quantized_for,
    takes_fp8,
    word_probabilities,
)
from .quantization import at_load_time
from .towers.aimv2 import AIMv2Tower
from .towers.siglip import SiglipTower

TOWERS = {"aimv2": AIMv2Tower, "siglip": SiglipTower}

VOCABULARY_ALIGNMENT = 64
"""Rows of head and table are padded to a multiple of this on every rank: with the odd
width V - 5 the matrix library falls back to a kernel eight times slower (measured on
an H200: 14.1 ms against 1.8 ms for ten tiles)."""

MAX_LOGITS_BYTES = 64 * 2**20
"""Bound on the [tokens, vocabulary] buffer; tokens are taken in chunks below it, of
which a GPU's cache still holds a part when it is read again (ten tiles on an H200: 2.9
ms instead of 3.3 with twice as much)."""

FP8_TABLE_ROWS = 1024
"""Tokens of a chunk at least, whatever their size, if the table is quantized: fewer
leave an FP8 product with it no faster than one in bfloat16 (1024 rows on an H200: 0.16
ms against 0.26; 512: 0.15 against 0.14)."""


def padded_words(num_words: int, tp_size: int) -> int:
    """Rows of head and table over all ranks, equally many and aligned on each."""
    return round_up(num_words, VOCABULARY_ALIGNMENT * tp_size)


class PatchNormalizer(nn.Module):
    """8-bit tiles to normalised patches, bit-exact by construction.

    Every value of a pixel has one normalised value per channel, computed once with the
    authors' order of operations.
    """

    table: torch.Tensor

    def __init__(
        self,
        patch_size: int,
        patches_per_side: int,
        mean: Sequence[float],
        std: Sequence[float],
    ) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.patches_per_side = patches_per_side
        # Made here, on the device that the engine builds the model on.
        table = torch.empty(3, 256, dtype=torch.float32)
        table.copy_(torch.from_numpy(normalization_table(mean, std)))
        self.register_buffer("table", table, persistent=False)

    def forward(
        self, pixels: torch.Tensor, rectangles: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Normalise tiles and cut them into patches.

        Args:
            pixels: uint8, [tiles, side, side, 3], or floating, [tiles, 3, side, side],
                if the client has normalised them.
            rectangles: int32, [tiles, 4]: top, left, height and width of the picture
                inside its tile; not used with floating pixels, whose padding is zero.
            dtype: Type of the result; the normalisation itself is float32.

        Returns:
            [tiles, patches, padded_patch_width], each patch in (channel, row, column)
            order and then zeros, patches row by row.

        """
        grid, patch = self.patches_per_side, self.patch_size
        if not pixels.is_floating_point():
            return normalized_patches(
                pixels, rectangles, self.table, grid, patch, dtype
            )
        used = grid * patch
        cut = pixels[:, :, :used, :used].unflatten(3, (grid, patch))
        cut = cut.unflatten(2, (grid, patch)).permute(0, 2, 4, 1, 3, 5)
        return padded_patches(cut.flatten(3).flatten(1, 2).to(dtype))


def merge_neighbours(features: torch.Tensor, stride: int) -> torch.Tensor:
    """Join stride x stride neighbouring features into one, row by row.

    Args:
        features: [tiles, side**2, channels], positions row by row.
        stride: Side of the square; a grid it does not divide is padded with zeros at
            the bottom and right (authors' behaviour).

    Returns:
        [tiles, ceil(side / stride)**2, stride**2 * channels], each block's features in
        row-major order.

    """
    tiles, positions, channels = features.shape
    side = round(positions**0.5)
    features = features.view(tiles, side, side, channels)
    missing = -side % stride
    if missing:
        features = F.pad(features, (0, 0, 0, missing, 0, missing))
    blocks = (side + missing) // stride
    features = features.view(tiles, blocks, stride, blocks, stride, channels)
    return features.transpose(2, 3).reshape(
        tiles, blocks * blocks, stride * stride * channels
    )


def row_sums(x: torch.Tensor) -> torch.Tensor:
    """Sum each row: float32 [rows, columns] -> [rows, 1].

    In the engine's batch-invariant mode no sum depends on how many rows there are: the
    mode replaces torch's mean by one that takes each row in a fixed order, but leaves
    torch's sum, which splits long rows where there are few.
    """
    columns = x.shape[-1]
    # The mean of no columns, on a rank without words, is not a number.
    if envs.VLLM_BATCH_INVARIANT and columns:
        return x.mean(-1, keepdim=True) * columns
    return x.sum(-1, keepdim=True)


class VisualVocabulary(nn.Module):
    """Head and embedding table, sharded over the visual vocabulary.

    Each rank holds a contiguous part of the words: their rows in the head, their norm
    parameters, and their rows in the table. Statistics of LayerNorm and softmax run
    over exactly the real words of all ranks; padding takes no part.
    """

    def __init__(
        self,
        sizes: VisionConfig,
        hidden_size: int,
        *,
        disable_tp: bool,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()
        self.tp_size = 1 if disable_tp else get_tensor_model_parallel_world_size()
        self.tp_rank = 0 if disable_tp else get_tensor_model_parallel_rank()
        self.tokenize_function = sizes.tokenize_function
        self.num_words = sizes.num_visual_words
        self.padded_words = padded_words(self.num_words, self.tp_size)
        self.num_padding = self.padded_words - self.num_words
        self.local_size = self.padded_words // self.tp_size
        self.local_start = self.tp_rank * self.local_size
        # Real words of this rank; a small vocabulary can leave the last rank none.
        self.local_words = max(
            0, min(self.local_size, self.num_words - self.local_start)
        )

        self.linear = ColumnParallelLinear(
            sizes.merged_size,
            self.padded_words,
            bias=False,
            quant_config=quant_config,
            # Named as in checkpoints, whose settings may list it.
            prefix=f"{prefix}.0",
            disable_tp=disable_tp,
            return_bias=False,
        )
        self.norm_weight = self._parameter(self.local_size, loader=self._load_words)
        self.norm_bias = self._parameter(self.local_size, loader=self._load_words)
        self.norm_eps = 1e-5
        # Transposed: a product with the words' probabilities.
        self.table = RowParallelLinear(
            self.padded_words,
            hidden_size,
            bias=False,
            reduce_results=False,
            quant_config=at_load_time(quant_config),
            prefix=f"{prefix}.table",
            disable_tp=disable_tp,
            return_bias=False,
        )
        self.indicators = self._parameter(
            NUM_INDICATORS, hidden_size, loader=default_weight_loader
        )

    @staticmethod
    def _parameter(*shape: int, loader: Callable[..., None]) -> nn.Parameter:
        parameter = nn.Parameter(torch.empty(shape), requires_grad=False)
        # The engine reloads weights through this attribute alone.
        set_weight_attrs(parameter, {"weight_loader": loader})
        return parameter

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Turn joined features into visual embeddings.

        Args:
            features: [tokens, merged_size], the same on every rank.

        Returns:
            [tokens, hidden_size], the same on every rank.

        """
        row_bytes = self.local_size * features.element_size()
        chunk = max(1, MAX_LOGITS_BYTES // row_bytes)
        if takes_fp8(self.table):
            chunk = max(chunk, FP8_TABLE_ROWS)
        parts = [self._embed(part) for part in features.split(chunk)]
        embeddings = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self._sum_over_ranks(embeddings)

    def _embed(self, features: torch.Tensor) -> torch.Tensor:
        logits = self.linear(quantized_for(self.linear, features))
        if self.tokenize_function == "softmax" and self.tp_size == 1:
            return self.table(
                word_probabilities(
                    logits,
                    self.num_words,
                    self.norm_weight,
                    self.norm_bias,
                    self.norm_eps,
                    self.table,
                )
            )
        words = self._sharded_layer_norm(logits[:, : self.local_words])
        # The authors add Gumbel noise even at inference for gumbel_argmax; its mode,
        # the argmax, is what a server can reproduce.
        logits[:, : self.local_words] = (
            self._sharded_softmax(words)
            if self.tokenize_function == "softmax"
            else self._one_hot_argmax(words)
        )
        logits[:, self.local_words :] = 0
        return self.table(quantized_for(self.table, logits))

    def _sum_over_ranks(self, local: torch.Tensor) -> torch.Tensor:
        return tensor_model_parallel_all_reduce(local) if self.tp_size > 1 else local

    def _sharded_layer_norm(self, words: torch.Tensor) -> torch.Tensor:
        dtype = words.dtype
        words = words.float()
        total = self._sum_over_ranks(row_sums(words))
        centred = words - total / self.num_words
        squares = self._sum_over_ranks(row_sums(centred.square()))
        normed = centred * torch.rsqrt(squares / self.num_words + self.norm_eps)
        weight = self.norm_weight[: self.local_words]
        return (normed * weight + self.norm_bias[: self.local_words]).to(dtype)

    def _global_max(self, words: torch.Tensor) -> torch.Tensor:
        if self.local_words:
            local = words.amax(-1, keepdim=True)
        else:
            local = words.new_full((words.shape[0], 1), float("-inf"))
        if self.tp_size == 1:
            return local
        return tensor_model_parallel_all_gather(local, dim=-1).amax(-1, keepdim=True)

    def _sharded_softmax(self, words: torch.Tensor) -> torch.Tensor:
        weights = torch.exp(words.float() - self._global_max(words).float())
        total = self._sum_over_ranks(row_sums(weights))
        return (weights / total).to(words.dtype)

    def _one_hot_argmax(self, words: torch.Tensor) -> torch.Tensor:
        hits = words == self._global_max(words)
        # On a tie the lowest word wins, as argmax does, so that one row is taken.
        first = hits & (hits.cumsum(-1) == 1)
        if self.tp_size > 1:
            found = hits.any(-1, keepdim=True).to(words.dtype)
            found = tensor_model_parallel_all_gather(found, dim=-1)
            first &= ~found[:, : self.tp_rank].bool().any(-1, keepdim=True)
        return first.to(words.dtype)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load head (`0.weight`), norm (`1.weight`, `1.bias`) and table (`vte.weight`).

        Names are those of the checkpoint, relative to `head` and the model's root. A
        quantized head has others beside its weight, of one row for each word or for
        all of them.

        Raises:
            ValueError: If a tensor has another name or another number of rows.

        """
        loaded: set[str] = set()
        for name, tensor in weights:
            expected = self.num_words
            if name == "vte.weight":
                expected += NUM_INDICATORS
            of_words = tensor.dim() > 0 and tensor.shape[0] == expected
            may_differ = name.startswith("0.") and name != "0.weight"
            if not (of_words or may_differ):
                raise ValueError(
                    f"Visual vocabulary tensor {name!r} has shape {[*tensor.shape]}; "
                    f"vocab_size asks for {expected} rows."
                )
            if name.startswith("0."):
                if of_words:
                    padding = (0, 0) * (tensor.dim() - 1) + (0, self.num_padding)
                    tensor = F.pad(tensor, padding)
                self._load(self.linear.get_parameter(name.removeprefix("0.")), tensor)
                loaded.add(f"linear.{name.removeprefix('0.')}")
            elif name in ("1.weight", "1.bias"):
                target = "norm_" + name.removeprefix("1.")
                # A padded word's logit is zero; it must get no probability.
                value = float("-inf") if target == "norm_bias" else 0.0
                tensor = F.pad(tensor, (0, self.num_padding), value=value)
                self._load(getattr(self, target), tensor)
                loaded.add(target)
            elif name == "vte.weight":
                rows = F.pad(tensor[: self.num_words], (0, 0, 0, self.num_padding))
                self._load(self.table.weight, rows.t())
                self._load(self.indicators, tensor[-NUM_INDICATORS:])
                loaded.update(("table.weight", "indicators"))
            else:
                raise ValueError(f"Unknown visual vocabulary tensor {name!r}.")
        return loaded

    @staticmethod
    def _load(parameter: Any, tensor: torch.Tensor) -> None:
        parameter.weight_loader(parameter, tensor)

    def _load_words(self, param: nn.Parameter, tensor: torch.Tensor) -> None:
        """Load this rank's part of [padded words]; the engine asks for `param`."""
        param.data.copy_(tensor[self.local_start :][: self.local_size])


class VisualTokenizer(nn.Module):
    """Normalisation, tower and visual vocabulary."""

    def __init__(
        self,
        sizes: VisionConfig,
        hidden_size: int,
        image_mean: Sequence[float],
        image_std: Sequence[float],
        *,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.stride = sizes.hidden_stride
        # Also true where the heads do not divide among the ranks: then each rank takes
        # whole tiles, which costs memory but wastes no time.
        self.data_parallel = is_vit_use_data_parallel(sizes.num_heads)
        self.normalizer = PatchNormalizer(
            sizes.patch_size, sizes.patches_per_side, image_mean, image_std
        )
        self.backbone = TOWERS[sizes.tower](
            sizes,
            disable_tp=self.data_parallel,
            quant_config=quant_config,
            prefix=f"{prefix}.backbone",
        )
        self.head = VisualVocabulary(
            sizes,
            hidden_size,
            disable_tp=self.data_parallel,
            quant_config=quant_config,
            prefix=f"{prefix}.head",
        )

    @property
    def dtype(self) -> torch.dtype:
        """Type the tower computes in."""
        return self.head.indicators.dtype

    def forward(self, pixels: torch.Tensor, rectangles: torch.Tensor) -> torch.Tensor:
        """Embed tiles.

        Args:
            pixels: uint8, [tiles, side, side, 3], or floating, [tiles, 3, side, side],
                normalised.
            rectangles: int32, [tiles, 4]: top, left, height, width of each picture.

        Returns:
            [tiles, tokens_per_tile, hidden_size] in the model's dtype.

        """
        world_size = get_tp_group().world_size
        if not self.data_parallel or world_size == 1:
            return self.embed(self.features(self.patches(pixels, rectangles)))

        tiles = pixels.shape[0]
        share = cdiv(tiles, world_size)
        missing = share * world_size - tiles
        first = get_tensor_model_parallel_rank() * share
        pixels = F.pad(pixels, (0, 0) * 3 + (0, missing))[first : first + share]
        rectangles = F.pad(rectangles, (0, 0, 0, missing))[first : first + share]
        embeddings = self.embed(self.features(self.patches(pixels, rectangles)))
        return tensor_model_parallel_all_gather(embeddings, dim=0)[:tiles]

    def patches(self, pixels: torch.Tensor, rectangles: torch.Tensor) -> torch.Tensor:
        """Normalise tiles as `forward` takes them.

        Returns:
            [tiles, patches, padded_patch_width] in the model's dtype.

        """
        return self.normalizer(pixels, rectangles, self.dtype)

    def features(self, patches: torch.Tensor) -> torch.Tensor:
        """Run the tower and join neighbours.

        Returns:
            [tiles, tokens_per_tile, merged_size] in the model's dtype.

        """
        return merge_neighbours(self.backbone(patches), self.stride)

    def embed(self, features: torch.Tensor) -> torch.Tensor:
        """Turn joined features into visual embeddings.

        Returns:
            [tiles, tokens_per_tile, hidden_size] in the model's dtype.

        """
        embeddings = self.head(features.flatten(0, 1))
        return embeddings.view(*features.shape[:2], self.hidden_size)
