# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The second model runner maps adapters for each group of items it encodes.

It needs Triton, so here its parts run with a stand-in for the model; the first runner
is tested with a real one (`test_features.py`).
"""

from types import SimpleNamespace
from typing import Any

import torch
from transformers import BatchFeature

from vllm.lora.layers import LoRAMapping, LoRAMappingType
from vllm.multimodal.inputs import (
    MultiModalFeatureSpec,
    MultiModalFieldConfig,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    PlaceholderRange,
)
from vllm.v1.worker.gpu.mm.encoder_cache import EncoderCache
from vllm.v1.worker.gpu.mm.encoder_runner import EncoderRunner
from vllm.v1.worker.gpu.mm.lora import set_active_mm_loras

WIDTH = 4


def item(modality: str, field: str, tokens: int) -> tuple[str, MultiModalKwargsItem]:
    """A modality's item of so many tokens in the tower."""
    items = MultiModalKwargsItems.from_hf_inputs(
        BatchFeature({field: torch.zeros(1, tokens, WIDTH)}),
        {field: MultiModalFieldConfig.batched(modality)},
    )
    return modality, items[modality][0]


class Manager:
    """Keeps the maps it is given, and counts them."""

    def __init__(self) -> None:
        self.maps: dict[LoRAMappingType, LoRAMapping] = {}
        self.times_set = 0

    def supports_tower_connector_lora(self) -> bool:
        return True

    def set_active_adapters(self, requests: Any, mapping: LoRAMapping) -> None:
        self.maps[mapping.type] = mapping
        self.times_set += 1


class Model:
    """Notes which adapters each run of its tower and connector would meet."""

    def __init__(self, manager: Manager) -> None:
        self.manager = manager
        self.runs: list[tuple[int, ...]] = []

    def get_mm_mapping(self) -> Any:
        return SimpleNamespace(connector=["connector"])

    def get_mm_lora_token_counts(
        self, *, modality: str, mm_kwargs: Any, num_mm_embeds: int
    ) -> tuple[int, int]:
        (field,) = mm_kwargs.values()
        return len(field.data), 1

    def embed_multimodal(self, **fields: torch.Tensor) -> list[torch.Tensor]:
        (batch,) = fields.values()
        tower = self.manager.maps[LoRAMappingType.TOWER].index_mapping
        assert len(tower) == sum(len(tokens) for tokens in batch)
        connector = self.manager.maps[LoRAMappingType.CONNECTOR].index_mapping
        assert len(connector) == len(batch)
        self.runs.append(tower)
        return [tokens[:1] for tokens in batch]


Items = list[tuple[str, MultiModalKwargsItem]]
ADAPTERS = {"plain": 0, "adapted": 5, "other": 6}


def encode(requests: dict[str, Items]) -> tuple[Model, int]:
    """Encode the items of all requests in one step.

    Returns:
        The model that they ran in, and how often adapters were set.

    """
    cache = EncoderCache()
    for name, items in requests.items():
        features = [
            MultiModalFeatureSpec(
                data=data,
                modality=modality,
                identifier=f"{name}-{number}",
                mm_position=PlaceholderRange(offset=0, length=1),
            )
            for number, (modality, data) in enumerate(items)
        ]
        cache.add_request(name, features)
    manager = Manager()
    model: Any = Model(manager)
    runner = EncoderRunner(
        *(model, 8, WIDTH, cache, torch.float32, torch.device("cpu"))
    )
    scheduled = {name: list(range(len(items))) for name, items in requests.items()}
    state: Any = SimpleNamespace(
        lora_ids=[ADAPTERS[name] for name in requests],
        lora_requests={name: name for name in requests},
    )
    set_active_mm_loras(
        model=model,
        lora_manager=manager,  # type: ignore[arg-type]
        encoder_cache=cache,
        req_id_to_index={name: index for index, name in enumerate(requests)},
        lora_state=state,
        scheduled_encoder_inputs=scheduled,
    )
    _, items = runner.prepare_mm_inputs(scheduled)
    outputs = runner.execute_mm_encoder(items)
    assert len(outputs) == len(items)
    return model, manager.times_set


def test_each_run_meets_the_adapters_of_its_items() -> None:
    model, _ = encode(
        {
            "plain": [item("video", "frames", 3), item("image", "pixels", 2)],
            "adapted": [item("image", "pixels", 1), item("image", "tiles", 4)],
            "other": [item("video", "frames", 2)],
        }
    )
    # Pictures' pixels, then ready tiles, then videos.
    assert model.runs == [(0, 0, 5), (5,) * 4, (0, 0, 0, 6, 6)]


def test_adapters_of_one_group_are_set_once() -> None:
    model, times_set = encode(
        {
            "plain": [item("image", "pixels", 2)],
            "adapted": [item("image", "pixels", 3), item("image", "pixels", 1)],
        }
    )
    assert model.runs == [(0, 0, 5, 5, 5, 5)]
    # For the tower and for the connector.
    assert times_set == 2


def test_items_that_are_not_encoded_take_no_place() -> None:
    model, _ = encode(
        {
            "plain": [
                item("prompt_embeds", "embedding", 2),
                item("video", "frames", 3),
            ],
            "adapted": [item("image", "pixels", 1), item("video", "frames", 1)],
        }
    )
    assert model.runs == [(5,), (0, 0, 0, 5)]


def test_no_map_without_tokens_in_the_tower() -> None:
    _, times_set = encode({"adapted": [item("prompt_embeds", "embedding", 2)]})
    assert times_set == 0
