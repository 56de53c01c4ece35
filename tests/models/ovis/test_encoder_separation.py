# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""One engine encodes pictures, another answers without a tower.

Through vLLM's example connector, which keeps embeddings in files.
"""

from pathlib import Path
from typing import Any

import torch

from tests.models.ovis.test_engine_golden import GREEDY, as_request, golden_greedy
from tests.models.ovis.test_features import CHECKPOINT, FOLDER, cases, started
from vllm.distributed.ec_transfer.ec_connector.utils import (
    PlaceholderMetadataResolver,
)
from vllm.engine.arg_utils import EngineArgs


def connector(role: str, folder: Path) -> dict[str, Any]:
    return {
        "ec_connector": "ECExampleConnector",
        "ec_role": role,
        "ec_connector_extra_config": {"shared_storage_path": str(folder)},
    }


def test_grids_size_the_places_of_pictures() -> None:
    """They travel with a request; of videos nothing does: the consumer reads them."""
    model_config = EngineArgs(str(FOLDER)).create_model_config()
    resolver = PlaceholderMetadataResolver(model_config)
    assert resolver.fields_for("image") == {"grids"}
    assert resolver.fields_for("video") == set()


def without_tower(model: Any) -> None:
    del model.visual_tokenizer


def test_a_consumer_answers_without_a_tower(tmp_path: Path) -> None:
    """It gets the pictures' names and grids; the embeddings come by the connector."""
    (case,) = cases("two_different_grids")
    request = as_request(case)
    producer = connector("ec_producer", tmp_path)
    with started(ec_transfer_config=producer, enable_prefix_caching=False) as llm:
        sent = llm.generate(request, GREEDY)[0].ec_transfer_params
    assert sent is not None and len(sent) == 2
    by_index = {i: name for name, item in sent.items() for i in item["item_indices"]}
    names = [by_index[index] for index in range(2)]
    grids = [sent[name]["metadata"]["grids"] for name in names]
    assert grids == [image["grid"] for image in case["expected"]["images"]]

    consumer = connector("ec_consumer", tmp_path)
    # The engine hashes names together with image options, so it must have none.
    with started(
        ec_transfer_config=consumer, enable_mm_embeds=True, mm_processor_kwargs=None
    ) as llm:
        llm.apply_model(without_tower)
        request["multi_modal_data"] = {"image": {"grids": torch.tensor(grids)}}
        request["multi_modal_uuids"] = {"image": names}
        del request["mm_processor_kwargs"]
        (output,) = llm.generate(request, GREEDY)
    tokens = list(output.outputs[0].token_ids)
    assert tokens == golden_greedy(CHECKPOINT)[case["name"]]
