# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Serving features, in process: each works as documented or says clearly no."""

import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from tests.models.ovis import adapters, golden, pictures
from tests.models.ovis.test_engine_golden import (
    FIRST_LOGITS,
    GREEDY,
    TOLERANCE,
    as_request,
    golden_greedy,
    ready_tiles,
    relative_error,
)
from tests.reference.model import Reference
from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.ops.torch_ops import bgmv_expand, bgmv_shrink
from vllm.lora.request import LoRARequest
from vllm.models.ovis.images import tile_image
from vllm.platforms import current_platform
from vllm.v1.metrics.reader import Counter

CHECKPOINT = "tiny-ovis2"
FOLDER = Path(golden.checkpoint_path(CHECKPOINT))

ON_GPU = current_platform.is_cuda()
CLOSE = 0.3 if ON_GPU else TOLERANCE
DIFFERENT = 0.6
"""Relative error of logits. On a GPU the engine computes in bfloat16 here, which costs
up to 0.1; the adapter of another request costs 0.7 and more."""

CACHE_MIB = 3
"""Of the cache of processed pictures, where memory is looked at."""

MIXED = ("two_different_grids", "size_640x480", "no_image", "size_112x112")
"""Cases of 2, 1, 0 and 1 pictures with different numbers of tiles."""


@contextmanager
def started(folder: Path = FOLDER, **options: Any) -> Iterator[LLM]:
    settings: dict[str, Any] = {
        "dtype": "bfloat16" if ON_GPU else "float32",
        "gpu_memory_utilization": 0.1,
        "enforce_eager": True,
        "max_model_len": 4096,
        "max_num_seqs": 8,
        "max_logprobs": -1,
        "logprobs_mode": "raw_logits",
        "limit_mm_per_prompt": {"image": 8},
        "mm_processor_kwargs": {"max_partition": 16},
        "generation_config": "vllm",
        **options,
    }
    llm = LLM(str(folder), **settings)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def cases(*names: str, checkpoint: str = CHECKPOINT) -> list[dict[str, Any]]:
    by_name = {case["name"]: case for case in golden.array_cases(checkpoint)}
    return [by_name[name] for name in names]


def greedy_tokens(llm: LLM, requests: list[dict[str, Any]]) -> list[list[int]]:
    return [
        list(output.outputs[0].token_ids) for output in llm.generate(requests, GREEDY)
    ]


def first_logits(
    llm: LLM, requests: list[dict[str, Any]], lora: Any = None
) -> list[np.ndarray]:
    """Logits of the first answered token, [requests][vocabulary]."""
    outputs = llm.generate(requests, FIRST_LOGITS, lora_request=lora)
    logits = []
    for output in outputs:
        steps: Any = output.outputs[0].logprobs
        by_id = steps[0]
        logits.append(np.array([by_id[i].logprob for i in range(len(by_id))]))
    return logits


# Adapters


class Adapters(NamedTuple):
    text: Path
    tower: Path
    head: Path


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    folder = tmp_path_factory.mktemp("adapters")
    return Adapters(
        adapters.write_adapter(folder / "text", FOLDER, adapters.TEXT, seed=1),
        adapters.write_adapter(folder / "tower", FOLDER, adapters.TOWER, seed=2),
        adapters.write_adapter(folder / "head", FOLDER, adapters.HEAD, seed=3),
    )


@pytest.fixture(scope="module")
def lora_engine() -> Iterator[LLM]:
    with started(
        enable_lora=True,
        enable_tower_connector_lora=True,
        max_loras=2,
        max_lora_rank=8,
        enable_mm_embeds=True,
    ) as llm:
        yield llm


def merged_logits(folder: Path, adapter: Path | None, case: Any) -> np.ndarray:
    """First logits of the plain-torch model with the adapter's product in its weights.

    Args:
        folder: Where the merged checkpoint is written, once.
        adapter: None for the checkpoint as it is.
        case: Golden case; it names the checkpoint.

    """
    checkpoint = Path(golden.checkpoint_path(case["checkpoint"]))
    if adapter is not None:
        merged = folder / f"merged-{adapter.name}"
        if not merged.exists():
            changes = adapters.changed_weights(adapter)
            adapters.write_merged(merged, checkpoint, changes)
        checkpoint = merged
    reference = Reference(checkpoint)
    images = [golden.authors_view(image) for image in golden.case_images(case)]
    ids, pixels = reference.prepare(
        images, case["conversation"], max_partition=case["max_partition"]
    )
    with torch.inference_mode():
        return reference.model.logits(reference.embed(ids, pixels)).numpy()


@pytest.fixture(scope="module")
def expected(
    written: Adapters, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], np.ndarray]:
    """Logits by adapter's name ("" for none) and case."""
    folder = tmp_path_factory.mktemp("merged")
    return {
        (adapter.name if adapter else "", case["name"]): merged_logits(
            folder, adapter, case
        )
        for adapter in (None, written.text, written.tower)
        for case in cases(*MIXED)
    }


def picture_rows(case: dict[str, Any]) -> np.ndarray:
    """The rows of a case's one picture among the authors' merged embeddings."""
    merged = golden.arrays()[f"{CHECKPOINT}/{case['name']}/inputs_embeds"]
    ids = np.array(case["expected"]["input_ids"])
    (marks,) = np.nonzero(ids < 0)
    return merged[marks[0] : len(merged) - (len(ids) - 1 - marks[-1])]


def lora_request(adapter: Path, number: int) -> LoRARequest:
    return LoRARequest(adapter.name, number, str(adapter))


@pytest.mark.parametrize("name", ["text", "tower"])
def test_an_adapter_acts_as_its_merged_weights(
    lora_engine: LLM, written: Adapters, expected: Any, name: str
) -> None:
    """Logits equal those of a plain-torch model with the product in its weights."""
    request = lora_request(getattr(written, name), 1 + ("text", "tower").index(name))
    chosen = cases(*MIXED)
    actual = first_logits(lora_engine, [as_request(case) for case in chosen], request)
    for case, logits in zip(chosen, actual, strict=True):
        assert relative_error(logits, expected[name, case["name"]]) < TOLERANCE
        change = relative_error(
            expected[name, case["name"]], expected["", case["name"]]
        )
        # A tower that sees no picture changes nothing; anything else is visible.
        if name == "text" or case["images"]:
            assert change > 100 * TOLERANCE
        else:
            assert change == 0


def test_adapters_share_a_batch(
    lora_engine: LLM, written: Adapters, expected: Any
) -> None:
    """Each picture of a batch meets its own request's adapter, in tower and text."""
    requests = {
        "": None,
        "text": lora_request(written.text, 1),
        "tower": lora_request(written.tower, 2),
    }
    pairs = [(name, case) for case in cases(*MIXED) for name in requests]
    lora_engine.reset_mm_cache()
    lora_engine.reset_prefix_cache()
    actual = first_logits(
        lora_engine,
        [as_request(case) for _, case in pairs],
        [requests[name] for name, _ in pairs],
    )
    for (name, case), logits in zip(pairs, actual, strict=True):
        right = {other: expected[other, case["name"]] for other in requests}
        check_adapter(logits, name, right)


def test_adapters_share_a_batch_of_all_kinds(
    lora_engine: LLM, written: Adapters, expected: Any, tmp_path: Path
) -> None:
    """The tower runs once per kind of input, each time with that kind's adapters."""
    picture, frames = cases("size_640x480", "video_4_frames")
    request, video = as_request(picture), as_request(frames)
    marks = "\n".join(["<image>"] * 4)
    video = {
        "prompt": video["prompt"].replace(marks, "<video>"),
        "multi_modal_data": {"video": video["multi_modal_data"]["image"]},
    }
    normalised = ready_tiles(CHECKPOINT, picture, floating=True)
    embeddings = torch.from_numpy(picture_rows(picture))
    kinds = {
        "picture": request,
        "normalised": {**request, "multi_modal_data": {"image": normalised}},
        "embeddings": {**request, "multi_modal_data": {"image": embeddings}},
        "video": video,
    }
    loras = {
        "": None,
        "text": lora_request(written.text, 1),
        "tower": lora_request(written.tower, 2),
    }
    of_video = {
        name: merged_logits(tmp_path, getattr(written, name, None), frames)
        for name in loras
    }
    pairs = [(name, kind) for name in ("tower", "", "text") for kind in kinds]
    lora_engine.reset_mm_cache()
    lora_engine.reset_prefix_cache()
    actual = first_logits(
        lora_engine,
        [kinds[kind] for _, kind in pairs],
        [loras[name] for name, _ in pairs],
    )
    for (name, kind), logits in zip(pairs, actual, strict=True):
        # Embeddings have left the tower behind.
        seen = "" if (name, kind) == ("tower", "embeddings") else name
        right = {other: expected[other, picture["name"]] for other in loras}
        check_adapter(logits, seen, of_video if kind == "video" else right)


def test_a_batch_of_embeddings_alone_needs_no_map(lora_engine: LLM) -> None:
    """Nothing passes the tower, whose adapters would have to be mapped."""
    (picture,) = cases("size_640x480")
    request = as_request(picture)
    embeddings = torch.from_numpy(picture_rows(picture))
    lora_engine.reset_mm_cache()
    lora_engine.reset_prefix_cache()
    (tokens,) = greedy_tokens(
        lora_engine, [{**request, "multi_modal_data": {"image": embeddings}}]
    )
    assert tokens == golden_greedy(CHECKPOINT)[picture["name"]]


def check_adapter(logits: np.ndarray, name: str, right: dict[str, np.ndarray]) -> None:
    """Logits are those of this adapter, and nearer to them than to another's."""
    errors = {other: relative_error(logits, right[other]) for other in right}
    assert errors[name] < CLOSE
    assert errors[name] == min(errors.values())


def test_embedding_layers_leave_out_who_has_no_adapter() -> None:
    """On a CPU they use the second product alone; slot -1 is no adapter."""
    output = torch.zeros(2, 3)
    bgmv_expand(torch.ones(2, 4), torch.ones(1, 3, 4), output, torch.tensor([0, -1]))
    assert output.tolist() == [[4] * 3, [0] * 3]


def test_a_request_without_adapter_meets_none() -> None:
    """On the CPU, slot -1 of a batch is no slot, and not the last one."""
    weights = torch.ones(2, 1, adapters.RANK, 3)
    slots = torch.tensor([0, -1, 1])
    output = torch.full((3, adapters.RANK), torch.nan)
    bgmv_shrink(torch.ones(3, 3), weights, output, slots, 2.0)
    assert output.tolist() == [[share] * adapters.RANK for share in (6.0, 0.0, 6.0)]


def test_an_adapter_of_the_head_is_refused(lora_engine: LLM, written: Adapters) -> None:
    with pytest.raises(ValueError, match=r"visual_tokenizer\.head\.0"):
        lora_engine.llm_engine.add_lora(lora_request(written.head, 3))


# Each from here on has an engine of its own: starting one ends the one before.


def test_an_adapter_of_the_first_generations_tower(tmp_path: Path) -> None:
    """Ovis 1.6's SigLIP, whose modules the authors keep under `vision_model.`."""
    checkpoint = "tiny-ovis1.6-llama"
    folder = Path(golden.checkpoint_path(checkpoint))
    adapter = adapters.write_adapter(
        tmp_path / "siglip", folder, adapters.SIGLIP, seed=4
    )
    chosen = cases("size_640x480", "no_image", checkpoint=checkpoint)
    with started(
        folder, enable_lora=True, enable_tower_connector_lora=True, max_lora_rank=8
    ) as llm:
        requests = [as_request(case) for case in chosen]
        actual = first_logits(llm, requests, lora_request(adapter, 1))
    for case, logits in zip(chosen, actual, strict=True):
        expected = merged_logits(tmp_path, adapter, case)
        assert relative_error(logits, expected) < TOLERANCE
        change = relative_error(expected, merged_logits(tmp_path, None, case))
        assert (change > 100 * TOLERANCE) == bool(case["images"])


def test_a_tower_adapter_is_not_served_in_part(written: Adapters) -> None:
    """Without the option for towers, an adapter of the tower is refused at load."""
    with started(enable_lora=True) as llm:
        with pytest.raises(ValueError, match=r"attn\.qkv.*--enable-tower-connector"):
            llm.llm_engine.add_lora(lora_request(written.tower, 1))
        assert llm.llm_engine.add_lora(lora_request(written.text, 2))


def check_tower_adapters(**options: Any) -> None:
    """What a model checks at start of tower adapters, without weights or ranks."""
    from vllm.models.ovis.model import Ovis

    model_class: Any = Ovis
    model = model_class.__new__(model_class)
    torch.nn.Module.__init__(model)
    vllm_config = EngineArgs(
        str(FOLDER), enable_lora=True, enable_tower_connector_lora=True, **options
    ).create_engine_config()
    model.vision = vllm_config.model_config.hf_config.vision
    model._refuse_what_tower_lora_cannot_follow(vllm_config)


def test_tower_adapters_need_a_tower_that_every_rank_shares(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Refused at start where each rank encodes tiles of its own."""
    from vllm.models.ovis import model as ovis

    # The engine's own answer needs two running ranks.
    monkeypatch.setattr(ovis, "is_vit_use_data_parallel", lambda num_heads: True)
    with pytest.raises(ValueError, match="--mm-encoder-tp-mode data"):
        check_tower_adapters(tensor_parallel_size=2, mm_encoder_tp_mode="data")


def test_tower_adapters_do_not_go_with_encoder_graphs() -> None:
    """Refused at start: a graph's tiles are not those that adapters are mapped to."""
    with pytest.raises(ValueError, match="does not go with cudagraph_mm_encoder"):
        check_tower_adapters(compilation_config={"cudagraph_mm_encoder": True})


@pytest.mark.skipif(not current_platform.is_cpu(), reason="others have sleep mode")
def test_sleep_mode_is_refused_on_the_cpu() -> None:
    """The engine has no sleep mode for this platform and says so at start."""
    with pytest.raises(ValueError, match="[Ss]leep mode"):
        EngineArgs(str(FOLDER), enable_sleep_mode=True).create_engine_config()


def answers_anew(llm: LLM) -> list[list[int]]:
    """Greedy answers for which nothing is taken from a cache."""
    llm.reset_prefix_cache()
    llm.reset_mm_cache()
    llm.llm_engine.reset_encoder_cache()
    return greedy_tokens(llm, [as_request(case) for case in cases(*MIXED)])


def test_reloaded_weights_are_those_of_the_checkpoint() -> None:
    """Every tensor comes back, those of the visual vocabulary included."""
    loaded: dict[str, torch.Tensor] = {}

    def spoil(model: Any) -> None:
        for name, parameter in model.named_parameters():
            loaded[name] = parameter.data.clone()
            # Still a model: not a number as logits ends a GPU's engine.
            parameter.data.mul_(0.5).add_(0.01)

    def changed(model: Any) -> list[str]:
        return [
            name
            for name, parameter in model.named_parameters()
            if not torch.equal(parameter.data, loaded[name])
        ]

    with started() as llm:
        before = answers_anew(llm)
        llm.apply_model(spoil)
        assert answers_anew(llm) != before
        llm.collective_rpc("reload_weights")
        assert llm.apply_model(changed) == [[]]
        assert answers_anew(llm) == before


@pytest.mark.skipif(not ON_GPU, reason="sleep mode needs a GPU")
def test_sleep_changes_no_answer() -> None:
    """Weights come back from the host, or from the checkpoint; graphs still hold."""
    with started(enable_sleep_mode=True, enforce_eager=False) as llm:
        before, held = answers_anew(llm), used_memory()
        llm.sleep(level=1)
        assert used_memory() < held
        llm.wake_up()
        assert answers_anew(llm) == before
        llm.sleep(level=2)
        llm.wake_up(tags=["weights"])
        llm.collective_rpc("reload_weights")
        llm.wake_up(tags=["kv_cache"])
        assert answers_anew(llm) == before


def used_memory() -> int:
    free, total = torch.accelerator.get_memory_info()
    return total - free


def test_encoder_data_mode_is_kept() -> None:
    """The engine drops the mode for a model that does not declare it."""
    config = EngineArgs(str(FOLDER), mm_encoder_tp_mode="data").create_model_config()
    assert config.get_multimodal_config().mm_encoder_tp_mode == "data"


# Only the text model, only the encoder


def test_language_model_only(written: Adapters) -> None:
    """Text is answered; a picture and an adapter of the tower are refused."""
    with started(
        language_model_only=True, limit_mm_per_prompt={}, enable_lora=True
    ) as llm:
        (text, picture) = cases("no_image", "size_640x480")
        assert greedy_tokens(llm, [as_request(text)]) == [
            golden_greedy(CHECKPOINT)["no_image"]
        ]
        with pytest.raises(ValueError, match="text-only"):
            llm.generate(as_request(picture), GREEDY)
        with pytest.raises(ValueError, match=r"trunk\.blocks\.0\.attn\.qkv"):
            llm.llm_engine.add_lora(lora_request(written.tower, 1))


def embed_tiles(model: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Visual embeddings of prepared tiles, and the names of the text model's weights.

    Args:
        model: The engine's.
        tensors: pixel_values and rectangles.

    """
    with torch.inference_mode():
        visual = model.visual_tokenizer(tensors["pixel_values"], tensors["rectangles"])
    text = [name for name, _ in model.named_parameters() if name.startswith("llm.")]
    return visual.numpy(), text


def test_encoder_only() -> None:
    """The tower gives the authors' embeddings, and no text model takes memory."""
    from vllm.models.ovis import OvisProcessor

    (case,) = cases("two_different_grids")
    request = as_request(case)
    batch = OvisProcessor.from_pretrained(str(FOLDER))(
        text=request["prompt"],
        images=request["multi_modal_data"]["image"],
        max_partition=case["max_partition"],
    )
    tensors = {
        name: torch.from_numpy(batch[name]) for name in ("pixel_values", "rectangles")
    }
    with started(mm_encoder_only=True) as llm:
        embed = functools.partial(embed_tiles, tensors=tensors)
        ((visual, text),) = llm.apply_model(embed)
    assert not text
    expected = golden.arrays()[f"{CHECKPOINT}/{case['name']}/visual_embeds"]
    assert relative_error(visual, expected) < TOLERANCE


# New weights


def test_reloaded_weights_answer(tmp_path: Path) -> None:
    """Weights of another checkpoint replace those of text model, tower and head."""
    everything = adapters.TEXT + adapters.TOWER + adapters.HEAD
    change = adapters.write_adapter(tmp_path / "all", FOLDER, everything, seed=5)
    chosen = cases(*MIXED)
    expected = [merged_logits(tmp_path, change, case) for case in chosen]
    with started() as llm:
        requests = [as_request(case) for case in chosen]
        before = first_logits(llm, requests)
        merged = str(tmp_path / "merged-all")
        llm.collective_rpc("reload_weights", kwargs={"weights_path": merged})
        llm.reset_prefix_cache()
        after = first_logits(llm, requests)
    for old, new, right in zip(before, after, expected, strict=True):
        assert relative_error(new, right) < CLOSE
        assert relative_error(old, right) > DIFFERENT


# Speculative decoding


def test_eagle3_does_not_change_answers(tmp_path: Path) -> None:
    """A drafter reads the text model's layers; greedy tokens stay the authors'."""
    draft = adapters.write_draft(tmp_path / "draft", FOLDER, seed=1)
    with started(
        speculative_config={
            "method": "eagle3",
            "model": str(draft),
            "num_speculative_tokens": 2,
        },
        disable_log_stats=False,
    ) as llm:
        chosen = cases(*MIXED)
        answers = greedy_tokens(llm, [as_request(case) for case in chosen])
        for case, tokens in zip(chosen, answers, strict=True):
            assert tokens == golden_greedy(CHECKPOINT)[case["name"]], case["name"]
        drafted = [
            metric.value
            for metric in llm.get_metrics()
            if isinstance(metric, Counter)
            and metric.name == "vllm:spec_decode_num_draft_tokens"
        ]
        assert sum(drafted) > 0


# Memory


def live_mib() -> float:
    """Memory of all tensors that are still referred to, in MiB."""
    gc.collect()
    sizes = {}
    for found in gc.get_objects():
        # isinstance() would import what stands behind lazy modules.
        if issubclass(type(found), torch.Tensor):
            storage = found.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values()) / 2**20


def test_new_pictures_leave_nothing_behind() -> None:
    """Beyond what the caches may hold, no tensor outlives its request.

    What the process takes from the system is measured by `make load`, not here: it
    depends on the machine.
    """
    settings = SamplingParams(max_tokens=1)
    with started(mm_processor_cache_gb=CACHE_MIB / 1024) as llm:

        def show(seeds: range) -> float:
            prompt = cases("size_640x480")[0]["expected"]["prompt"]
            llm.generate(
                [
                    {
                        "prompt": prompt,
                        "multi_modal_data": {"image": pictures.picture(seed)},
                    }
                    for seed in seeds
                ],
                settings,
                use_tqdm=False,
            )
            return live_mib()

        # Enough to fill the caches of pictures and of embeddings.
        before = show(range(80))
        tiled = (tile_image(pictures.picture(seed), 112, 16) for seed in range(80))
        assert sum(tiles.pixels.nbytes for tiles in tiled) / 2**20 > 2 * CACHE_MIB
        after = show(range(80, 240))
    assert after - before < CACHE_MIB
