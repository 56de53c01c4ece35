# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The encoder under the engine's graph manager gives what it gives without.

Graphs need a GPU; here the engine's own manager packs, pads and splits, and a graph is
a function that runs the captured part again over the captured buffers.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.models.ovis.test_visual_tokenizer import SIZES, TEXT_WIDTH, build, run_ranks
from vllm.config.compilation import CompilationMode, CUDAGraphMode
from vllm.config.vllm import OptimizationLevel
from vllm.model_executor.models.config import MODELS_CONFIG_MAP
from vllm.models.ovis.encoder_graph import OvisEncoderGraphs
from vllm.models.ovis.model import Ovis
from vllm.models.ovis.tile_batch import select_items, tile_batch
from vllm.models.ovis.tiling import num_tiles
from vllm.platforms import current_platform
from vllm.v1.worker.encoder_cudagraph import (
    BudgetGraphMetadata,
    EncoderCudaGraphManager,
)

SIDE = SIZES.image_size
GRIDS = {
    "one tile": [(1, 1)],
    "one tile each": [(1, 1)] * 7,
    "fits a graph together": [(1, 1), (1, 2)],
    "too large for a graph": [(3, 4), (1, 1)],
    "mixed": [(1, 1), (4, 3), (1, 2), (1, 1), (2, 2), (1, 1)],
}


class Encoder(OvisEncoderGraphs):
    """The part of the model that encodes."""

    interleave: Any = Ovis.interleave
    embed_multimodal: Any = Ovis.embed_multimodal

    def __init__(self) -> None:
        text = SimpleNamespace(hidden_size=TEXT_WIDTH)
        self.config: Any = SimpleNamespace(llm_config=text, embedding_scale=0.5)
        self.vision = SIZES
        self.visual_tokenizer = build(SIZES, data_parallel=False)


class Graph:
    """Stands for a CUDA graph: the captured computation over its own buffers."""

    def __init__(self, model: Any, values: dict[str, torch.Tensor]) -> None:
        self.model, self.values = model, values
        self.output = torch.full_like(model.encoder_cudagraph_forward(values), 9e9)

    def replay(self) -> None:
        self.output.copy_(self.model.encoder_cudagraph_forward(self.values))


def manager_with_graphs(model: Any, budgets: list[int]) -> EncoderCudaGraphManager:
    compilation = SimpleNamespace(
        encoder_cudagraph_token_budgets=budgets,
        encoder_cudagraph_max_vision_items_per_batch=0,
        encoder_cudagraph_max_frames_per_batch=None,
    )
    media = SimpleNamespace(
        get_limit_per_prompt=lambda _: 1, mm_encoder_tp_mode="weights"
    )
    config: Any = SimpleNamespace(
        compilation_config=compilation,
        model_config=SimpleNamespace(multimodal_config=media),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )
    cpu = torch.device("cpu")
    manager = EncoderCudaGraphManager(config, cpu, torch.float32, model)
    for budget in manager.token_budgets:
        inputs = model.prepare_encoder_cudagraph_capture_inputs(
            budget, manager.max_batch_size, 0, cpu, torch.float32
        )
        graph: Any = Graph(model, inputs.values)
        manager._get_graph_set()[budget] = BudgetGraphMetadata(
            token_budget=budget,
            max_batch_size=manager.max_batch_size,
            max_frames_per_batch=0,
            graph=graph,
            input_buffers=inputs.values,
            output_buffer=graph.output,
        )
    return manager


def random_fields(kind: str, grids: list[tuple[int, int]]) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    tiles = sum(num_tiles(*grid) for grid in grids)
    rectangles = torch.tensor([[4, 0, SIDE - 4, SIDE]], dtype=torch.int32)
    rectangles = rectangles.repeat(tiles, 1)
    if kind == "ready tiles":
        pixels = torch.randn(tiles, 3, SIDE, SIDE, generator=generator)
        return {"normalized_tiles": pixels, "grids": torch.tensor(grids)}
    shape = (tiles, SIDE, SIDE, 3)
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    if kind == "videos":
        frames = torch.tensor([num_tiles(*grid) for grid in grids])
        return {
            "video_pixels": pixels,
            "video_rectangles": rectangles,
            "video_frames": frames,
        }
    return {
        "pixel_values": pixels,
        "rectangles": rectangles,
        "grids": torch.tensor(grids),
    }


def both_ways(fields: dict[str, Any], budgets: list[int]) -> torch.Tensor:
    """Embeddings of all items, [2, tokens, width], and graph hits in a last row."""
    model = Encoder()
    with torch.inference_mode():
        plain = model.embed_multimodal(**fields)
        manager = manager_with_graphs(model, budgets)
        graphed = manager.execute(fields)
    assert [item.shape for item in graphed] == [item.shape for item in plain]
    hits = torch.full((2, 1, TEXT_WIDTH), float(manager.graph_hits))
    both = torch.stack([torch.cat(list(graphed)), torch.cat(list(plain))])
    return torch.cat([both, hits], dim=1)


CASES: dict[str, tuple[dict[str, Any], list[int]]] = {
    f"{name}, {kind}": (random_fields(kind, grids), [])
    for name, grids in GRIDS.items()
    for kind in ("images", "ready tiles", "videos")
} | {"named budgets": (random_fields("images", GRIDS["mixed"]), [6, 52])}


@pytest.fixture(scope="module")
def results() -> dict[str, torch.Tensor]:
    return run_ranks(1, {name: (both_ways, case) for name, case in CASES.items()})


@pytest.mark.parametrize("name", CASES)
def test_graphs_change_nothing(name: str, results: dict[str, torch.Tensor]) -> None:
    graphed, plain = results[name]
    torch.testing.assert_close(graphed, plain, rtol=0, atol=1e-5)
    hits = graphed[-1, 0].item()
    most = SIZES.encoder_graph_tokens[-1] // SIZES.tokens_per_tile
    small = sum(tiles <= most for tiles in _tiles(CASES[name][0]))
    if name == "named budgets":
        # One tile has four tokens: the larger of the two budgets holds 13.
        small = len(GRIDS["mixed"])
    assert hits == small


def _tiles(fields: dict[str, Any]) -> list[int]:
    batch = tile_batch(fields)
    assert batch is not None
    return batch.tiles_per_item


def test_ready_made_embeddings_pass_through() -> None:
    embeddings = [torch.randn(7, TEXT_WIDTH), torch.randn(4, TEXT_WIDTH)]
    fields = {"image_embeds": embeddings, "grids": torch.tensor([[1, 1], [1, 1]])}

    class Bare(OvisEncoderGraphs):
        config: Any = SimpleNamespace(
            llm_config=SimpleNamespace(hidden_size=TEXT_WIDTH)
        )
        vision = SIZES

    model = Bare()
    specs = model.get_encoder_cudagraph_item_specs(fields)
    assert [spec.output_tokens for spec in specs] == [7, 4]
    assert [spec.get_path_output_tokens("default") for spec in specs] == [0, 0]
    taken: dict[int, torch.Tensor] = {}
    selected = model.select_encoder_cudagraph_items(fields, [1])
    model.postprocess_encoder_output({}, [1], [4], taken, batch_mm_kwargs=selected)
    assert torch.equal(taken[1], embeddings[1])


@pytest.mark.parametrize("kind", ["images", "ready tiles", "videos"])
def test_items_are_taken_in_order(kind: str) -> None:
    grids = [(1, 1), (2, 2), (1, 3)]
    fields = random_fields(kind, grids)
    name = next(iter(fields))
    selected = select_items(fields, [2, 0])
    assert torch.equal(selected[name], torch.cat([fields[name][6:], fields[name][:1]]))
    assert _tiles(selected) == [4, 1]
    assert _tiles(select_items(fields, [])) == []


def engine_config(**changed: Any) -> Any:
    """A configuration as the engine makes it, with some values changed."""
    values = {
        "cudagraph_mm_encoder": None,
        "encoder_cudagraph_token_budgets": [],
        "cudagraph_mode": None,
        "mode": None,
        "compile_mm_encoder": False,
        "enforce_eager": False,
        "optimization_level": OptimizationLevel.O2,
        "limits": {"image": 999, "video": 999},
        "mm_encoder_attn_backend": None,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "enable_tower_connector_lora": False,
        "use_v2_model_runner": True,
    } | changed
    values["hf_config"] = SimpleNamespace(vision=SIZES)
    part = SimpleNamespace(**values)
    part.multimodal_config = part
    part.get_limit_per_prompt = lambda kind: part.limits[kind]
    return SimpleNamespace(
        compilation_config=part,
        model_config=part,
        parallel_config=part,
        lora_config=part if part.enable_tower_connector_lora is not None else None,
        optimization_level=part.optimization_level,
        use_v2_model_runner=part.use_v2_model_runner,
    )


@pytest.mark.parametrize(
    "changed, platform, graphs",
    [
        ({}, "cuda", True),
        ({}, "cpu", False),
        ({}, "another GPU", False),
        ({}, "batch-invariant", False),
        ({"cudagraph_mm_encoder": False}, "cuda", False),
        ({"cudagraph_mm_encoder": True, "tensor_parallel_size": 2}, "cuda", True),
        ({"cudagraph_mode": CUDAGraphMode.FULL_AND_PIECEWISE}, "cuda", True),
        ({"cudagraph_mode": CUDAGraphMode.NONE}, "cuda", False),
        ({"compile_mm_encoder": True}, "cuda", False),
        ({"enforce_eager": True}, "cuda", False),
        ({"optimization_level": OptimizationLevel.O0}, "cuda", False),
        ({"mode": CompilationMode.STOCK_TORCH_COMPILE}, "cuda", False),
        ({"limits": {"image": 0, "video": 0}}, "cuda", False),
        ({"limits": {"image": 0, "video": 1}}, "cuda", True),
        ({"mm_encoder_attn_backend": "TORCH_SDPA"}, "cuda", False),
        ({"enable_tower_connector_lora": None}, "cuda", True),
        ({"tensor_parallel_size": 2}, "cuda", False),
        ({"use_v2_model_runner": False}, "cuda", False),
        ({"pipeline_parallel_size": 2}, "cuda", False),
        ({"enable_tower_connector_lora": True}, "cuda", False),
    ],
)
def test_graphs_are_on_where_they_fit(
    changed: dict[str, Any], platform: str, graphs: bool, monkeypatch: Any
) -> None:
    monkeypatch.setattr(current_platform, "is_cuda", lambda: platform != "cpu")
    hopper = platform != "another GPU"
    monkeypatch.setattr(current_platform, "is_device_capability", lambda _: hopper)
    if platform == "batch-invariant":
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    config = engine_config(**changed)
    MODELS_CONFIG_MAP["Ovis"].verify_and_update_config(config)
    assert config.compilation_config.cudagraph_mm_encoder is graphs


@pytest.mark.parametrize("named", [[], [8]])
def test_each_number_of_tiles_has_a_graph(named: list[int]) -> None:
    config = engine_config(
        cudagraph_mm_encoder=True, encoder_cudagraph_token_budgets=named
    )
    MODELS_CONFIG_MAP["Ovis"].verify_and_update_config(config)
    budgets = config.compilation_config.encoder_cudagraph_token_budgets
    # One tile has four tokens here.
    assert budgets == (named or [4 * tiles for tiles in range(1, 11)])


def test_a_budget_below_one_tile_is_refused() -> None:
    with pytest.raises(ValueError, match="holds 3, but one tile of this model has 4"):
        Encoder.prepare_encoder_cudagraph_capture_inputs(
            SimpleNamespace(vision=SIZES),  # type: ignore[arg-type]
            3,
            1,
            0,
            torch.device("cpu"),
            torch.float32,
        )
