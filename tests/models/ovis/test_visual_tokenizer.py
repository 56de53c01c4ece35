# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The visual tokenizer by itself: patches, merging, sharding over ranks."""

import dataclasses
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F

from vllm.config import (
    DeviceConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.distributed import (
    cleanup_dist_env_and_memory,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.model_executor.determinism import batch_invariant
from vllm.model_executor.layers.linear import LinearBase
from vllm.models.ovis import visual_tokenizer
from vllm.models.ovis.config import VisionConfig
from vllm.models.ovis.images import normalization_table, normalize
from vllm.models.ovis.visual_tokenizer import (
    PatchNormalizer,
    VisualTokenizer,
    merge_neighbours,
)

MEAN, STD = (0.48, 0.46, 0.41), (0.27, 0.26, 0.28)

SIZES = VisionConfig(
    tower="aimv2",
    image_size=56,
    patch_size=14,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=2,
    norm_eps=1e-5,
    qkv_bias=True,
    use_bias=True,
    hidden_act="silu",
    vocab_size=133,
    hidden_stride=2,
    tokenize_function="softmax",
)
SIGLIP = dataclasses.replace(
    SIZES, tower="siglip", image_size=42, hidden_act="gelu_pytorch_tanh", norm_eps=1e-6
)
TEXT_WIDTH = 24


def random_tiles(tiles: int, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tiles)
    shape = (tiles, side, side, 3)
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    rectangles = torch.tensor([[0, 0, side, side], [5, 0, side - 11, side]])
    rectangles = rectangles.repeat(tiles, 1)[:tiles].int()
    return pixels, rectangles


@pytest.mark.parametrize("side", [56, 50])
def test_patches_are_the_normalised_pixels(side: int) -> None:
    """Bit-equal to normalising the tile and unfolding it; the rest is cut off."""
    pixels, rectangles = random_tiles(3, side)
    grid = side // 14
    normalizer = PatchNormalizer(14, grid, MEAN, STD)
    patches = normalizer(pixels, rectangles, torch.float32)
    images = torch.from_numpy(
        normalize(pixels.numpy(), rectangles.numpy(), normalization_table(MEAN, STD))
    )
    used = images[:, :, : grid * 14, : grid * 14]
    expected = F.unfold(used, 14, stride=14).transpose(1, 2)
    assert torch.equal(patches[..., : expected.shape[-1]], expected)
    assert not patches[..., expected.shape[-1] :].any()


def test_merge_pads_a_grid_the_stride_does_not_divide() -> None:
    features = torch.arange(1, 10.0).view(1, 9, 1)
    merged = merge_neighbours(features, 2)
    assert merged.tolist() == [
        [[1, 2, 4, 5], [3, 0, 6, 0], [7, 8, 0, 0], [9, 0, 0, 0]],
    ]


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_merge_keeps_block_order(stride: int) -> None:
    features = torch.randn(2, 36, 5)
    merged = merge_neighbours(features, stride)
    grid = features.view(2, 6, 6, 5)
    block = grid[1, stride : 2 * stride, :stride].reshape(-1)
    assert torch.equal(merged[1, 6 // stride], block)


Job = tuple[Callable[..., torch.Tensor], tuple[Any, ...]]


def run_ranks(world_size: int, jobs: dict[str, Job]) -> dict[str, torch.Tensor]:
    """Run every job on each rank of a new tensor-parallel group.

    Returns:
        What rank 0 returned per job, after checking that all ranks agree.

    """
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank_main, (world_size, folder, jobs), nprocs=world_size)
        results = [
            torch.load(Path(folder) / f"{rank}.pt") for rank in range(world_size)
        ]
    for other in results[1:]:
        for name, expected in results[0].items():
            assert torch.equal(other[name], expected), f"ranks disagree on {name}"
    return results[0]


def _rank_main(rank: int, world_size: int, folder: str, jobs: dict[str, Job]) -> None:
    torch.set_num_threads(1)
    # The engine sets this for its workers; the CPU communicator names its shared
    # memory by it.
    os.environ["VLLM_DIST_IDENT"] = Path(folder).name
    config = VllmConfig(device_config=DeviceConfig("cpu"))
    with set_current_vllm_config(config):
        init_distributed_environment(
            world_size, rank, f"file://{folder}/rendezvous", rank, "gloo"
        )
        initialize_model_parallel(world_size)
        results = {name: function(*args) for name, (function, args) in jobs.items()}
        torch.save(results, Path(folder) / f"{rank}.pt")
        cleanup_dist_env_and_memory()


def build(sizes: VisionConfig, data_parallel: bool) -> VisualTokenizer:
    with mock.patch.object(
        visual_tokenizer, "is_vit_use_data_parallel", lambda heads: data_parallel
    ):
        model = VisualTokenizer(
            sizes, TEXT_WIDTH, MEAN, STD, quant_config=None, prefix="visual_tokenizer"
        )
    load(model, random_weights(sizes))
    return model


def load(model: VisualTokenizer, weights: dict[str, torch.Tensor]) -> None:
    """Load weights named as in a checkpoint, the table as head.vte.weight."""
    tower = {k[9:]: v for k, v in weights.items() if k.startswith("backbone.")}
    head = {k[5:]: v for k, v in weights.items() if k.startswith("head.")}
    backbone: Any = model.backbone
    loaded = {f"backbone.{name}" for name in backbone.load_weights(tower.items())}
    loaded |= {f"head.{name}" for name in model.head.load_weights(head.items())}
    assert loaded == {name for name, _ in model.named_parameters()}
    for module in model.modules():
        if isinstance(module, LinearBase):
            method: Any = module.quant_method
            method.process_weights_after_loading(module)


def random_weights(sizes: VisionConfig) -> dict[str, torch.Tensor]:
    """Tensors under the checkpoint's names, drawn from a fixed seed."""
    width, inner = sizes.hidden_size, sizes.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {}

    def linear(name: str, rows: int, columns: int) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (rows, columns), (rows,)

    positions = sizes.patches_per_side**2
    patch = (width, 3, sizes.patch_size, sizes.patch_size)
    if sizes.tower == "aimv2":
        root = "backbone.preprocessor"
        shapes[f"{root}.pos_embed"] = (1, positions, width)
        shapes[f"{root}.patchifier.proj.weight"] = patch
        shapes[f"{root}.patchifier.proj.bias"] = (width,)
        shapes[f"{root}.patchifier.norm.weight"] = (width,)
        shapes["backbone.trunk.post_trunk_norm.weight"] = (width,)
        for index in range(sizes.num_layers):
            block = f"backbone.trunk.blocks.{index}"
            shapes[f"{block}.norm_1.weight"] = shapes[f"{block}.norm_2.weight"] = (
                width,
            )
            linear(f"{block}.attn.qkv", 3 * width, width)
            linear(f"{block}.attn.proj", width, width)
            linear(f"{block}.mlp.fc1", inner, width)
            linear(f"{block}.mlp.fc2", width, inner)
            linear(f"{block}.mlp.fc3", inner, width)
    else:
        root = "backbone.vision_model"
        shapes[f"{root}.embeddings.patch_embedding.weight"] = patch
        shapes[f"{root}.embeddings.patch_embedding.bias"] = (width,)
        shapes[f"{root}.embeddings.position_embedding.weight"] = (positions, width)
        shapes[f"{root}.post_layernorm.weight"] = (width,)
        shapes[f"{root}.head.probe"] = (1, 1, width)
        for index in range(sizes.num_layers):
            layer = f"{root}.encoder.layers.{index}"
            for norm in ("layer_norm1", "layer_norm2"):
                shapes[f"{layer}.{norm}.weight"] = (width,)
                shapes[f"{layer}.{norm}.bias"] = (width,)
            for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
                linear(f"{layer}.self_attn.{part}", width, width)
            linear(f"{layer}.mlp.fc1", inner, width)
            linear(f"{layer}.mlp.fc2", width, inner)
    words = sizes.num_visual_words
    shapes["head.0.weight"] = (words, sizes.merged_size)
    shapes["head.1.weight"] = shapes["head.1.bias"] = (words,)
    shapes["head.vte.weight"] = (sizes.vocab_size, TEXT_WIDTH)
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator) * 0.3
        for name, shape in shapes.items()
    }


def embed_tiles(sizes: VisionConfig, data_parallel: bool, tiles: int) -> torch.Tensor:
    model = build(sizes, data_parallel)
    return model(*random_tiles(tiles, sizes.image_size))


SHARDED = {
    "aimv2": SIZES,
    "siglip": SIGLIP,
    "st_argmax": dataclasses.replace(SIZES, tokenize_function="st_argmax"),
    # 67 words: the second of two ranks holds three real ones and padding.
    "small last rank": dataclasses.replace(SIZES, vocab_size=72),
    # 40 words: the second rank holds none.
    "empty last rank": dataclasses.replace(SIZES, vocab_size=45),
    "empty last rank, argmax": dataclasses.replace(
        SIZES, vocab_size=45, tokenize_function="gumbel_argmax"
    ),
}
TILE_COUNTS = (1, 4, 5)


def embed_in_chunks() -> torch.Tensor:
    model = build(SIZES, False)
    tiles = random_tiles(4, SIZES.image_size)
    few = 5 * model.head.local_size * 4
    with mock.patch.object(visual_tokenizer, "MAX_LOGITS_BYTES", few):
        return model(*tiles)


def refusal_of_a_stray_bias() -> torch.Tensor:
    """Message of the error, as bytes; the weights always have biases."""
    no_bias = dataclasses.replace(SIZES, use_bias=False)
    with pytest.raises(ValueError) as error:
        build(no_bias, False)
    return torch.tensor(list(str(error.value).encode()))


IN_MODE = ("aimv2", "empty last rank")


def embed_in_batch_invariant_mode() -> torch.Tensor:
    """Sums over the words are the mode's means, of which a rank without words has none.

    The mode's kernel needs Triton; what stands in for it notes its calls.

    Returns:
        Embeddings of each of IN_MODE, stacked.

    """
    models = [build(SHARDED[name], False) for name in IN_MODE]
    tiles = random_tiles(3, SIZES.image_size)
    features = [model.features(model.patches(*tiles)) for model in models]
    means: list[int] = []

    def mean_dim(x: torch.Tensor, dim: int, keepdim: bool) -> torch.Tensor:
        means.append(x.shape[dim])
        return x.sum(dim, keepdim=keepdim) / x.shape[dim]

    in_mode = SimpleNamespace(VLLM_BATCH_INVARIANT=True)
    with (
        mock.patch.object(batch_invariant, "mean_dim", mean_dim),
        # Here alone: the engine's linear layers would ask for Triton.
        mock.patch.object(visual_tokenizer, "envs", in_mode),
    ):
        batch_invariant.enable_batch_invariant_mode()
        embeddings = [m.embed(f) for m, f in zip(models, features, strict=True)]
    # Mean and variance of the norm, total of the softmax.
    words = [model.head.local_words for model in models]
    assert means == [count for count in words if count for _ in range(3)]
    return torch.stack(embeddings)


STRAY_BIAS = "trunk.blocks.0.attn.proj.bias"


@pytest.fixture(scope="module")
def alone() -> dict[str, torch.Tensor]:
    jobs: dict[str, Job] = {
        name: (embed_tiles, (sizes, False, 3)) for name, sizes in SHARDED.items()
    }
    for tiles in TILE_COUNTS:
        jobs[f"{tiles} tiles"] = (embed_tiles, (SIZES, False, tiles))
    jobs["chunked"] = (embed_in_chunks, ())
    jobs["stray bias"] = (refusal_of_a_stray_bias, ())
    return run_ranks(1, jobs)


@pytest.fixture(scope="module")
def together() -> dict[str, torch.Tensor]:
    jobs: dict[str, Job] = {
        name: (embed_tiles, (sizes, False, 3)) for name, sizes in SHARDED.items()
    }
    for tiles in TILE_COUNTS:
        jobs[f"{tiles} tiles"] = (embed_tiles, (SIZES, True, tiles))
    # Last, as the mode cannot be left again.
    jobs["batch-invariant"] = (embed_in_batch_invariant_mode, ())
    return run_ranks(2, jobs)


@pytest.mark.parametrize("name", SHARDED)
def test_two_ranks_equal_one(
    name: str, alone: dict[str, torch.Tensor], together: dict[str, torch.Tensor]
) -> None:
    """Sharded tower and vocabulary give what one rank gives, to rounding."""
    assert alone[name].shape == (3, SHARDED[name].tokens_per_tile, TEXT_WIDTH)
    assert alone[name].std() > 0.01
    torch.testing.assert_close(together[name], alone[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", IN_MODE)
def test_two_ranks_equal_one_in_batch_invariant_mode(
    name: str, alone: dict[str, torch.Tensor], together: dict[str, torch.Tensor]
) -> None:
    actual = together["batch-invariant"][IN_MODE.index(name)]
    torch.testing.assert_close(actual, alone[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tiles", TILE_COUNTS)
def test_data_parallel_equals_one(
    tiles: int, alone: dict[str, torch.Tensor], together: dict[str, torch.Tensor]
) -> None:
    """Whole tiles per rank, also where they do not divide."""
    name = f"{tiles} tiles"
    torch.testing.assert_close(together[name], alone[name], rtol=1e-5, atol=1e-6)


def test_chunks_do_not_change_the_answer(alone: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(alone["chunked"], alone["4 tiles"], rtol=1e-5, atol=1e-6)


def test_a_bias_without_a_place_is_an_error(alone: dict[str, torch.Tensor]) -> None:
    """use_bias=False in the config but biases in the file: refuse, never drop."""
    assert STRAY_BIAS in bytes(alone["stray bias"].tolist()).decode()


def test_normalizer_table_is_float32_under_any_default_type() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        normalizer = PatchNormalizer(14, 4, MEAN, STD)
    finally:
        torch.set_default_dtype(torch.float32)
    expected = normalization_table(MEAN, STD)
    assert np.array_equal(normalizer.table.numpy(), expected)
