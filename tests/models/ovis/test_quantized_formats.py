# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""AWQ, FP8 and INT8: only the text model is quantized, and it answers as it should.

The expected logits are those of a plain-torch model with the weights that the quantized
ones stand for, whose linear layers round their inputs as the format says.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn

from tests.models.ovis import adapters, golden
from tests.models.ovis.make_quantized import FORMATS, make_quantized, pack_outputs
from tests.models.ovis.test_engine_golden import FIRST_LOGITS, relative_error
from tests.models.ovis.test_gptq import (
    QUESTION,
    SERVED,
    recorded_engine,
    unquantized_linears,
)
from tests.reference.model import Reference
from tests.reference.prompt import qwen_prompt
from vllm.config.quantization import QuantizationConfigArgs
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.quantization.online.base import (
    OnlineQuantizationConfig,
)
from vllm.models.ovis import quantization
from vllm.models.ovis.quantization import check_kernels
from vllm.platforms import current_platform

ADDS_IN_16_BITS = current_platform.is_cpu() and not torch.cpu._is_vnni_supported()

TOLERANCE = {"awq": 0.04, "fp8": 0.25, "int8": 0.3 if ADDS_IN_16_BITS else 0.08}
"""Largest difference of logits over their largest magnitude.

The engine computes in bfloat16, whose noise moves an activation between neighbours of
the 8-bit format; floats of 8 bits lie furthest apart. Without VNNI a CPU's matrix
library adds pairs of products in 16 bits, where they saturate.
"""


def as_they_are(inputs: torch.Tensor) -> torch.Tensor:
    return inputs


def to_fp8(inputs: torch.Tensor) -> torch.Tensor:
    scale = inputs.abs().amax(-1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    return (inputs / scale).to(torch.float8_e4m3fn).float() * scale


def to_int8(inputs: torch.Tensor) -> torch.Tensor:
    scale = inputs.abs().amax(-1, keepdim=True) / 127
    return (inputs / scale).round() * scale


@pytest.fixture(scope="module")
def random_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return adapters.write_random(tmp_path_factory.mktemp("formats") / "float")


ROUNDING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "awq": as_they_are,
    "fp8": to_fp8,
    "int8": to_int8,
}


def test_a_word_of_an_awq_file() -> None:
    """Columns 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits on."""
    (word,) = pack_outputs(torch.arange(8)[None])[0].tolist()
    assert f"{word:08x}" == "75316420"


@functools.cache
def expected_logits(folder: Path, form: str) -> np.ndarray:
    """Logits of the plain model with a checkpoint's weights and a format's rounding."""
    reference = Reference(folder)
    for name, module in reference.model.llm.model.named_modules():
        if isinstance(module, nn.Linear) and "layers." in name:
            module.register_forward_pre_hook(
                lambda _, inputs: (ROUNDING[form](inputs[0]),)
            )
    ids, pixels = reference.prepare(picture(), QUESTION)
    with torch.inference_mode():
        return reference.model.logits(reference.embed(ids, pixels)).numpy()


def picture() -> list[Any]:
    (case,) = (
        c for c in golden.array_cases("tiny-ovis2") if c["name"] == "size_640x480"
    )
    return golden.case_images(case)


def served(
    folder: Path, **options: Any
) -> tuple[np.ndarray, dict[str, bool], dict[str, Any]]:
    """Serve a checkpoint once.

    Returns:
        Its logits; which linear layers are not quantized, by name; what was loaded.

    """
    with recorded_engine(folder, **options) as (llm, seen):
        request = {
            "prompt": qwen_prompt(QUESTION, ""),
            "multi_modal_data": {"image": picture()},
        }
        steps: Any = llm.generate(request, FIRST_LOGITS)[0].outputs[0].logprobs
        logits = np.array([steps[0][i].logprob for i in range(len(steps[0]))])
        return logits, llm.apply_model(unquantized_linears)[0], seen


def only_the_text_model(in_float: dict[str, bool]) -> bool:
    return any(in_float) and all(
        value == name.startswith("visual_tokenizer.")
        for name, value in in_float.items()
    )


@pytest.mark.parametrize("form", FORMATS)
def test_a_quantized_checkpoint(
    random_checkpoint: Path,
    tmp_path: Path,
    form: str,
) -> None:
    """Each tensor is used once, tower and head stay as stored, answers are right."""
    if form == "awq" and not SERVED:
        pytest.skip("vLLM's library for this CPU has no kernel for 4-bit weights")
    target, twin = tmp_path / "quantized", tmp_path / "twin"
    make_quantized(random_checkpoint, target, twin, form)
    logits, in_float, seen = served(target)
    with safe_open(target / "model.safetensors", "pt") as stored:
        assert sorted(stored.keys()) == sorted(seen["stored"])
    # Scales of the key-value cache are parameters that a file may leave out.
    left = seen["parameters"] - seen["loaded"]
    assert all(".self_attn.attn." in name for name in left), left
    assert only_the_text_model(in_float)
    error = relative_error(logits, expected_logits(twin, form))
    print(f"{form}: to the twin {error:.1e}")
    assert error < TOLERANCE[form]


def test_fp8_while_loading(random_checkpoint: Path, tmp_path: Path) -> None:
    """A float checkpoint becomes what the FP8 file of the same weights holds."""
    make_quantized(random_checkpoint, tmp_path / "file", tmp_path / "twin", "fp8")
    logits, in_float, _ = served(random_checkpoint, quantization="fp8_per_channel")
    assert only_the_text_model(in_float)
    error = relative_error(logits, expected_logits(tmp_path / "twin", "fp8"))
    print(f"fp8 while loading: to the twin {error:.1e}")
    assert error < TOLERANCE["fp8"]


@pytest.mark.skipif(not current_platform.is_cpu(), reason="GPUs have such kernels")
@pytest.mark.parametrize(
    "settings, words",
    [
        ({"linear": "fp8_per_tensor"}, "per_tensor.*fp8_per_channel"),
        ({"linear": "fp8_per_block"}, "row=128.*fp8_per_channel"),
        ({"targets": {"*llm*": "fp8_per_tensor"}}, "fp8_per_tensor.*fp8_per_channel"),
        ({"targets": {"*llm*": "fp8_per_channel"}}, None),
        ({"linear": "fp8_per_channel"}, None),
    ],
)
def test_a_cpu_names_what_it_can_quantize_to(
    settings: dict[str, Any], words: str | None
) -> None:
    config = OnlineQuantizationConfig(QuantizationConfigArgs(**settings))
    if words is None:
        check_kernels(config)
    else:
        with pytest.raises(ValueError, match=words):
            check_kernels(config)


@pytest.mark.skipif(not current_platform.is_cpu(), reason="GPUs have such kernels")
def test_a_cpu_without_the_kernel_refuses_awq(monkeypatch: pytest.MonkeyPatch) -> None:
    config = get_quantization_config("awq").from_config(FORMATS["awq"][1])
    monkeypatch.setattr(quantization, "has_cpu_kernel", lambda: False)
    with pytest.raises(ValueError, match="AWQ checkpoints. CPUs with AVX-512"):
        check_kernels(config)


def test_bitsandbytes_is_refused(random_checkpoint: Path) -> None:
    """The release no longer has that format, and lists those it has."""
    arguments = EngineArgs(str(random_checkpoint), quantization="bitsandbytes")
    with pytest.raises(ValueError, match="bitsandbytes.*compressed-tensors"):
        arguments.create_model_config()
