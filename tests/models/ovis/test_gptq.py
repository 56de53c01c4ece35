# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A GPTQ checkpoint of our own against what its integers stand for."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from tests.models.ovis import adapters, golden
from tests.models.ovis.make_gptq import dequantize, make_gptq, pack, quantize
from tests.models.ovis.test_engine_golden import FIRST_LOGITS, relative_error
from tests.reference.model import Reference
from vllm import LLM
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.quantization.utils.gptq_utils import (
    is_layer_gptq_quantized,
)
from vllm.models.ovis import quantization
from vllm.models.ovis.model import Ovis
from vllm.models.ovis.quantization import check_kernels, has_cpu_kernel
from vllm.platforms import current_platform

QUESTION = "<image>\nWhat is this?"


@pytest.mark.parametrize("bits", [4, 8])
def test_packing_keeps_every_integer(bits: int) -> None:
    generator = torch.Generator().manual_seed(0)
    levels = torch.randint(0, 2**bits, (64, 5), generator=generator)
    packed = pack(levels, bits)
    assert packed.shape == (64 * bits // 32, 5) and packed.dtype == torch.int32
    for row in range(64):
        word, place = divmod(row, 32 // bits)
        value = packed[word] >> (place * bits) & (2**bits - 1)
        assert torch.equal(value, levels[row].int())


@pytest.mark.parametrize("bits", [4, 8])
def test_rounding_error_is_half_a_step(bits: int) -> None:
    weight = torch.randn(6, 256, generator=torch.Generator().manual_seed(0))
    levels, scales = quantize(weight, bits, 128)
    error = (dequantize(levels, scales, bits) - weight).abs().t().view(2, 128, 6)
    # The scale itself is rounded to bfloat16, which the largest weights notice.
    assert (error <= scales.float()[:, None] * (0.5 + 2 ** (bits - 8))).all()


def test_group_must_divide_the_inputs() -> None:
    with pytest.raises(ValueError, match="128 does not divide 192"):
        quantize(torch.zeros(4, 192), 4, 128)


@pytest.fixture(scope="module")
def random_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return adapters.write_random(tmp_path_factory.mktemp("gptq") / "float")


SERVED = not current_platform.is_cpu() or has_cpu_kernel()


@contextmanager
def recorded_engine(
    folder: Path, **options: Any
) -> Iterator[tuple[LLM, dict[str, Any]]]:
    """An engine in bfloat16, with what it loaded.

    Yields:
        The engine; names of the tensors that are stored, of the model's parameters,
        and of those that were loaded.

    """
    seen: dict[str, Any] = {}
    original = Ovis.load_weights

    def record(model: Ovis, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        stored = list(weights)
        seen["stored"] = [name for name, _ in stored]
        seen["parameters"] = {name for name, _ in model.named_parameters()}
        seen["loaded"] = original(model, stored)
        return seen["loaded"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ovis, "load_weights", record)
        # Else a machine with tile instructions rounds activations of 4-bit weights.
        patch.setenv("VLLM_CPU_INT4_W4A8", "0")
        llm = LLM(
            str(folder),
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=1024,
            max_num_seqs=4,
            max_logprobs=-1,
            logprobs_mode="raw_logits",
            generation_config="vllm",
            **options,
        )
    try:
        yield llm, seen
    finally:
        llm.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="module", params=[False, True], ids=["no list", "module list"])
def quantized(
    request: pytest.FixtureRequest, random_checkpoint: Path
) -> Iterator[tuple[Path, Path, LLM, dict[str, Any]]]:
    if not SERVED:
        pytest.skip("vLLM's library for this CPU has no kernel for 4-bit weights")
    suffix = "-listed" if request.param else ""
    target, twin = (
        random_checkpoint.with_name(name + suffix) for name in ("gptq", "twin")
    )
    make_gptq(random_checkpoint, target, list_modules=request.param, twin=twin)
    with recorded_engine(target) as (llm, seen):
        yield target, twin, llm, seen


def test_every_tensor_is_used_once(
    quantized: tuple[Path, Path, LLM, dict[str, Any]],
) -> None:
    target, _, _, seen = quantized
    with safe_open(target / "model.safetensors", "pt") as stored:
        assert sorted(stored.keys()) == sorted(seen["stored"])
    assert seen["parameters"] == seen["loaded"]


def unquantized_linears(model: Any) -> dict[str, bool]:
    return {
        name: isinstance(module.quant_method, UnquantizedLinearMethod)
        for name, module in model.named_modules()
        if isinstance(module, LinearBase)
    }


def test_only_the_text_model_is_quantized(
    quantized: tuple[Path, Path, LLM, dict[str, Any]],
) -> None:
    linears = quantized[2].apply_model(unquantized_linears)[0]
    assert any(name.startswith("visual_tokenizer.backbone") for name in linears)
    for name, in_float in linears.items():
        assert in_float == name.startswith("visual_tokenizer."), name


def test_answers_as_its_twin(
    quantized: tuple[Path, Path, LLM, dict[str, Any]], random_checkpoint: Path
) -> None:
    """Logits of the twin in float32, up to bfloat16; the unrounded weights differ."""
    _, twin, llm, _ = quantized
    case = next(
        c for c in golden.array_cases("tiny-ovis2") if c["name"] == "size_640x480"
    )
    (image,) = golden.case_images(case)

    def plain_logits(folder: Path) -> np.ndarray:
        reference = Reference(folder)
        ids, pixels = reference.prepare([image], QUESTION)
        with torch.inference_mode():
            return reference.model.logits(reference.embed(ids, pixels)).numpy()

    prompt = Reference(twin).format(QUESTION, "")
    output = llm.generate(
        {"prompt": prompt, "multi_modal_data": {"image": image}}, FIRST_LOGITS
    )[0]
    logprobs = output.outputs[0].logprobs
    assert isinstance(logprobs, list)
    expected = plain_logits(twin)
    actual = np.array([logprobs[0][i].logprob for i in range(len(expected))])
    error = relative_error(actual, expected)
    rounding = relative_error(plain_logits(random_checkpoint), expected)
    print(f"to the twin {error:.1e}, rounding the weights {rounding:.1e}")
    assert error < 0.03
    assert rounding > 3 * error


@pytest.mark.skipif(not current_platform.is_cpu(), reason="GPUs serve 8 bits")
def test_a_cpu_without_the_kernel_names_what_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = {"bits": 8, "group_size": 128, "desc_act": False, "sym": True}
    quant_config = get_quantization_config("gptq").from_config(settings)
    with pytest.raises(ValueError, match="8 bits .* on 'cpu'. CUDA GPUs .* serve"):
        check_kernels(quant_config)
    settings["bits"] = 4
    four_bits = get_quantization_config("gptq").from_config(settings)
    if SERVED:
        check_kernels(four_bits)
    monkeypatch.setattr(quantization, "has_cpu_kernel", lambda: False)
    with pytest.raises(ValueError, match="4 bits .* CPUs with AVX-512 serve"):
        check_kernels(four_bits)


def test_fused_layers_are_found_by_the_names_of_their_parts() -> None:
    """Gemma 2 in the engine does not tell GPTQ what it fuses, so the model does."""
    stored = ["llm.model.layers.0.self_attn.q_proj", "llm.model.layers.0.mlp.up_proj"]
    stored += [n.replace("q_proj", p) for n in stored[:1] for p in ("k_proj", "v_proj")]
    stored += [n.replace("up_proj", "gate_proj") for n in stored[1:2]]
    for fused in ("self_attn.qkv_proj", "mlp.gate_up_proj"):
        prefix = f"llm.model.layers.0.{fused}"
        assert is_layer_gptq_quantized(prefix, stored, Ovis.packed_modules_mapping)
        assert not is_layer_gptq_quantized(
            prefix.replace(".0.", ".1."), stored, Ovis.packed_modules_mapping
        )
