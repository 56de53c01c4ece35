# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The engine, in process, against the numbers of the authors' code."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vllm
from tests.models.ovis import golden
from vllm import LLM, SamplingParams
from vllm.exceptions import VLLMValidationError

TOLERANCE = 1e-4
"""Largest difference over the largest magnitude of the golden array."""

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
FIRST_LOGITS = SamplingParams(temperature=0, max_tokens=1, logprobs=-1)


@pytest.fixture(scope="module", params=golden.CHECKPOINTS)
def engine(request: pytest.FixtureRequest) -> Iterator[tuple[str, LLM]]:
    llm = LLM(
        golden.checkpoint_path(request.param),
        dtype="float32",
        enforce_eager=True,
        max_model_len=4096,
        max_num_seqs=8,
        max_logprobs=-1,
        logprobs_mode="raw_logits",
        limit_mm_per_prompt={"image": 8},
        mm_processor_kwargs={"max_partition": 16},
        enable_mm_embeds=True,
        # An absent generation_config.json default would add sampling penalties.
        generation_config="vllm",
    )
    yield request.param, llm
    llm.llm_engine.engine_core.shutdown()


def as_request(case: dict[str, Any], **extra: Any) -> dict[str, Any]:
    request: dict[str, Any] = {"prompt": case["expected"]["prompt"], **extra}
    if case["images"]:
        images = [golden.authors_view(image) for image in golden.case_images(case)]
        request["multi_modal_data"] = {"image": images}
        request["mm_processor_kwargs"] = {"max_partition": case["max_partition"]}
    return request


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    assert actual.shape == expected.shape
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


def expected_array(checkpoint: str, case: dict[str, Any], what: str) -> np.ndarray:
    return golden.arrays()[f"{checkpoint}/{case['name']}/{what}"]


def merged_embeddings(model: Any, ids: list[int], pad: int, tensors: Any) -> Any:
    device = model.visual_tokenizer.head.indicators.device
    token_ids = torch.tensor(ids, device=device)
    with torch.inference_mode():
        if tensors is None:
            return None, model.embed_input_ids(token_ids).cpu().numpy()
        pixels, rectangles = (
            tensors[key].to(device) for key in ("pixel_values", "rectangles")
        )
        items = model.embed_multimodal(
            pixel_values=pixels, rectangles=rectangles, grids=tensors["grids"]
        )
        visual = model.visual_tokenizer(pixels, rectangles)
        merged = model.embed_input_ids(token_ids, items, is_multimodal=token_ids == pad)
    return visual.cpu().numpy(), merged.cpu().numpy()


def test_embeddings(engine: tuple[str, LLM]) -> None:
    """Visual and merged embeddings of every array case."""
    from vllm.models.ovis import OvisProcessor

    checkpoint, llm = engine
    processor = OvisProcessor.from_pretrained(golden.checkpoint_path(checkpoint))
    scale = llm.llm_engine.model_config.hf_config.embedding_scale or 1.0
    worst = {"visual": 0.0, "merged": 0.0}
    for case in golden.array_cases(checkpoint):
        request = as_request(case)
        if case["images"]:
            batch = processor(
                text=request["prompt"],
                images=request["multi_modal_data"]["image"],
                max_partition=case["max_partition"],
            )
            ids = batch.pop("input_ids")[0]
            tensors = {key: torch.from_numpy(array) for key, array in batch.items()}
        else:
            ids, tensors = processor(text=request["prompt"])["input_ids"][0], None
        visual, merged = llm.apply_model(
            functools.partial(
                merged_embeddings,
                ids=ids,
                pad=processor.image_pad_id,
                tensors=tensors,
            )
        )[0]
        # The reference arrays are taken before Gemma 2's factor on all embeddings.
        expected = expected_array(checkpoint, case, "inputs_embeds") * scale
        worst["merged"] = max(worst["merged"], relative_error(merged, expected))
        if visual is not None:
            expected = expected_array(checkpoint, case, "visual_embeds")
            worst["visual"] = max(worst["visual"], relative_error(visual, expected))
    print(f"{checkpoint}: largest relative error {worst}")
    assert max(worst.values()) < TOLERANCE


def test_first_token_logits(engine: tuple[str, LLM]) -> None:
    """Logits of the whole vocabulary at the last prompt position."""
    checkpoint, llm = engine
    cases = golden.array_cases(checkpoint)
    outputs = llm.generate([as_request(case) for case in cases], FIRST_LOGITS)
    worst = 0.0
    for case, output in zip(cases, outputs, strict=True):
        expected = expected_array(checkpoint, case, "logits")
        all_logprobs = output.outputs[0].logprobs
        assert isinstance(all_logprobs, list)
        logprobs = all_logprobs[0]
        actual = np.array([logprobs[i].logprob for i in range(len(expected))])
        worst = max(worst, relative_error(actual, expected))
    print(f"{checkpoint}: largest relative error of logits {worst:.2e}")
    assert worst < TOLERANCE


@pytest.mark.parametrize("together", [True, False], ids=["batched", "alone"])
def test_greedy_tokens(engine: tuple[str, LLM], together: bool) -> None:
    """24 greedy tokens, all cases in one batch and each by itself."""
    checkpoint, llm = engine
    cases = golden.array_cases(checkpoint)
    requests = [as_request(case) for case in cases]
    if together:
        outputs = llm.generate(requests, GREEDY)
    else:
        llm.reset_mm_cache()
        llm.reset_prefix_cache()
        outputs = [llm.generate(request, GREEDY)[0] for request in requests]
    expected_greedy = golden_greedy(checkpoint)
    wrong = [
        case["name"]
        for case, output in zip(cases, outputs, strict=True)
        if list(output.outputs[0].token_ids) != expected_greedy[case["name"]]
    ]
    assert not wrong


def named_case(checkpoint: str, name: str) -> dict[str, Any]:
    (case,) = (c for c in golden.array_cases(checkpoint) if c["name"] == name)
    return case


@functools.cache
def golden_greedy(checkpoint: str) -> dict[str, list[int]]:
    return {
        case["name"]: golden.arrays()[f"{checkpoint}/{case['name']}/greedy"].tolist()
        for case in golden.array_cases(checkpoint)
    }


def test_prompt_as_token_ids(engine: tuple[str, LLM]) -> None:
    """A prompt of token ids expands and answers as its text does."""
    checkpoint, llm = engine
    case = next(
        c for c in golden.array_cases(checkpoint) if c["name"] == "two_different_grids"
    )
    request = as_request(case)
    prompt = request.pop("prompt")
    tokenizer = llm.get_tokenizer()
    request["prompt_token_ids"] = tokenizer.encode(prompt, add_special_tokens=False)
    output = llm.generate(request, GREEDY)[0]
    assert list(output.outputs[0].token_ids) == golden_greedy(checkpoint)[case["name"]]


def test_chat_with_picture_parts(engine: tuple[str, LLM]) -> None:
    """`LLM.chat` reaches the authors' prompt and tokens."""
    checkpoint, llm = engine
    case = next(
        c for c in golden.array_cases(checkpoint) if c["name"] == "size_640x480"
    )
    (image,) = golden.case_images(case)
    question = case["conversation"].removeprefix("<image>\n")
    messages = [
        {
            "role": "user",
            "content": [
                {"type": "image_pil", "image_pil": image},
                {"type": "text", "text": question},
            ],
        }
    ]
    output = llm.chat(
        messages,
        GREEDY,
        mm_processor_kwargs={"max_partition": case["max_partition"]},
        # The golden Gemma and Llama checkpoints' own templates leave out the default
        # system turn that the authors' formatter writes.
        chat_template=FALLBACK_TEMPLATE.read_text(),
        use_tqdm=False,
    )[0]
    assert list(output.outputs[0].token_ids) == golden_greedy(checkpoint)[case["name"]]


FALLBACK_TEMPLATE = Path(vllm.__file__).parent.joinpath(
    "transformers_utils", "chat_templates", "template_ovis.jinja"
)


def test_a_single_picture_without_a_list(engine: tuple[str, LLM]) -> None:
    """`multi_modal_data` may hold the picture itself."""
    checkpoint, llm = engine
    case = next(c for c in golden.array_cases(checkpoint) if c["name"] == "size_31x7")
    request = as_request(case)
    request["multi_modal_data"] = {"image": request["multi_modal_data"]["image"][0]}
    output = llm.generate(request, GREEDY)[0]
    assert list(output.outputs[0].token_ids) == golden_greedy(checkpoint)[case["name"]]


def test_frames_of_a_video(engine: tuple[str, LLM]) -> None:
    """A video gives the ids and tokens of the authors' frames, beside an image too."""
    checkpoint, llm = engine
    case = named_case(checkpoint, "video_4_frames")
    frames = golden.case_images(case)
    prompt = case["expected"]["prompt"]
    marks = "\n".join(["<image>"] * 4)
    video = {
        "prompt": prompt.replace(marks, "<video>"),
        "multi_modal_data": {"video": frames},
    }
    mixed = {
        "prompt": prompt.replace(marks, "<image>\n<video>"),
        "multi_modal_data": {"image": frames[0], "video": np.stack(frames[1:])},
        "mm_processor_kwargs": {"max_partition": 1},
    }
    for output in llm.generate([video, mixed], GREEDY):
        assert output.prompt_token_ids is not None
        assert len(output.prompt_token_ids) == case["expected"]["merged_length"]
        tokens = list(output.outputs[0].token_ids)
        assert tokens == golden_greedy(checkpoint)[case["name"]]


def ready_tiles(
    checkpoint: str, case: dict[str, Any], floating: bool
) -> list[dict[str, Any]]:
    """A case's pictures as tiles that a client prepared, normalised or as bytes."""
    from vllm.models.ovis import OvisProcessor
    from vllm.models.ovis.images import normalization_table, normalize, tile_image

    settings = OvisProcessor.from_pretrained(
        golden.checkpoint_path(checkpoint)
    ).image_settings
    table = normalization_table(settings.mean, settings.std)
    ready = []
    for picture in golden.case_images(case):
        tiled = tile_image(picture, settings.side, case["max_partition"])
        tiles: dict[str, Any] = {"grid": tiled.grid}
        if floating:
            pixels = normalize(tiled.pixels, tiled.rectangles, table)
            tiles["pixel_values"] = torch.from_numpy(pixels)
        else:
            tiles |= {"pixel_values": tiled.pixels, "rectangles": tiled.rectangles}
        ready.append(tiles)
    return ready


@pytest.mark.parametrize("floating", [True, False], ids=["normalised", "bytes"])
def test_ready_tiles(engine: tuple[str, LLM], floating: bool) -> None:
    """Tiles that a client prepared are seen as the pictures they come from."""
    checkpoint, llm = engine
    case = named_case(checkpoint, "two_different_grids")
    request = as_request(case)
    request["multi_modal_data"] = {"image": ready_tiles(checkpoint, case, floating)}
    output = llm.generate(request, GREEDY)[0]
    assert list(output.outputs[0].token_ids) == golden_greedy(checkpoint)[case["name"]]


def image_embeddings(model: Any, tensors: Any) -> Any:
    device = model.visual_tokenizer.head.indicators.device
    with torch.inference_mode():
        items = model.embed_multimodal(
            pixel_values=tensors["pixel_values"].to(device),
            rectangles=tensors["rectangles"].to(device),
            grids=tensors["grids"],
        )
    return [item.cpu().clone() for item in items]


def test_precomputed_embeddings(engine: tuple[str, LLM]) -> None:
    """What `embed_multimodal` returned is accepted in place of the pictures."""
    from vllm.models.ovis import OvisProcessor

    checkpoint, llm = engine
    case = named_case(checkpoint, "two_different_grids")
    request = as_request(case)
    batch = OvisProcessor.from_pretrained(golden.checkpoint_path(checkpoint))(
        text=request["prompt"],
        images=request["multi_modal_data"]["image"],
        max_partition=case["max_partition"],
    )
    tensors = {key: torch.from_numpy(batch[key]) for key in batch if key != "input_ids"}
    (embeddings,) = llm.apply_model(
        functools.partial(image_embeddings, tensors=tensors)
    )
    requests = [
        {**request, "multi_modal_data": {"image": data}}
        for data in (
            embeddings,
            {"image_embeds": embeddings, "grids": tensors["grids"]},
        )
    ]
    # In one batch with pictures, which take another path.
    for output in llm.generate([as_request(case), *requests], GREEDY):
        tokens = list(output.outputs[0].token_ids)
        assert tokens == golden_greedy(checkpoint)[case["name"]]


@pytest.mark.parametrize(
    "prompt, images, words",
    [
        ("<image>", 2, "1 image mark"),
        ("<image><image>", 1, "2 image mark"),
        ("no mark", 1, "0 image mark"),
    ],
)
def test_wrong_mark_counts_are_refused(
    engine: tuple[str, LLM], prompt: str, images: int, words: str
) -> None:
    """The message names expected and found; the engine answers the next request."""
    checkpoint, llm = engine
    picture = Image.new("RGB", (50, 40))
    with pytest.raises(VLLMValidationError, match=words):
        llm.generate(
            {"prompt": prompt, "multi_modal_data": {"image": [picture] * images}},
            GREEDY,
        )
    case = next(c for c in golden.array_cases(checkpoint) if c["name"] == "no_image")
    output = llm.generate(as_request(case), GREEDY)[0]
    assert list(output.outputs[0].token_ids) == golden_greedy(checkpoint)["no_image"]
