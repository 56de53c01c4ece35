# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The engine in this process, with hooks on what its model computes."""

import argparse
import gc
import inspect
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import trace
from .cases import Case

if TYPE_CHECKING:
    from vllm import LLM

MAX_LENGTH = 12288
"""Tokens of the longest request, if the checkpoint allows as many."""

GPU_MEMORY: dict[str, Any] = {
    "kv_cache_memory_bytes": 4 * 2**30,
    "gpu_memory_utilization": 0.1,
}
"""On a GPU the cache has a fixed size, enough for all cases at once in float32, and a
tenth of the memory has to be free: the engine's own measurement of what is left would
take other processes' memory for its own, so that reports could not run side by side."""

IEEE_FLOAT32: dict[str, Any] = {
    "mm_encoder_attn_backend": "TORCH_SDPA",
    "attention_config": {"backend": "FLEX_ATTENTION"},
}
"""On a GPU the default attention for float32 multiplies in TF32, whose ten bits would
hide a fault behind rounding: these back ends multiply in float32."""


def prepare_environment(batch_invariant: bool) -> None:
    """Set what vLLM reads when it is imported."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if batch_invariant:
        os.environ["VLLM_BATCH_INVARIANT"] = "1"


def arguments(text: str) -> dict[str, Any]:
    """Read arguments of the engine.

    Args:
        text: A JSON object; names are those of `vllm.LLM`.

    Raises:
        argparse.ArgumentTypeError: It is something else.

    """
    try:
        read = json.loads(text)
    except json.JSONDecodeError:
        read = None
    if not isinstance(read, dict):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no JSON object, such as "
            """{"quantization": "fp8_per_channel"}"""
        )
    return read


@contextmanager
def started(model: str, dtype: str, device: str, **options: Any) -> "Iterator[LLM]":
    """An engine that keeps nothing between requests, unless `options` ask for it."""
    from vllm import LLM

    config = json.loads((Path(model) / "config.json").read_text("utf-8"))
    allowed = config["llm_config"]["max_position_embeddings"]
    settings: dict[str, Any] = {
        "dtype": dtype,
        "enforce_eager": True,
        "max_model_len": min(MAX_LENGTH, allowed),
        "max_num_batched_tokens": MAX_LENGTH,
        "max_num_seqs": 16,
        "limit_mm_per_prompt": {"image": 4},
        "mm_processor_kwargs": {"max_partition": 16},
        "enable_prefix_caching": False,
        "mm_processor_cache_gb": 0,
        # A checkpoint's own generation_config.json could add penalties.
        "generation_config": "vllm",
        "gpu_memory_utilization": 0.3,
    }
    if device == "cuda":
        settings |= GPU_MEMORY
        if dtype == "float32":
            settings |= IEEE_FLOAT32
    # An engine before this one holds its memory until its cycles are collected.
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    llm = LLM(model, **settings | options)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def request(prompt: str, case: Case) -> dict[str, Any]:
    """A case as the engine takes it."""
    made: dict[str, Any] = {"prompt": prompt}
    if case.sizes:
        made["multi_modal_data"] = {"image": case.pictures()}
        made["mm_processor_kwargs"] = {"max_partition": case.max_partition}
    return made


def generate(
    llm: "LLM", requests: list[dict[str, Any]], count: int
) -> list[tuple[list[int], list[int]]]:
    """Greedy answers of `count` tokens.

    Returns:
        Prompt ids and answered ids of each request.

    """
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    prompts: Any = requests
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    return [
        (list(o.prompt_token_ids or ()), list(o.outputs[0].token_ids)) for o in outputs
    ]


def attention_backends(llm: "LLM") -> dict[str, str]:
    """Names of the attention back ends in tower and text model."""
    return llm.apply_model(_attention_backends)[0]


def _attention_backends(model: Any) -> dict[str, str]:
    names = {}
    for part, root in (("tower", model.visual_tokenizer), ("text", model.llm)):
        for module in root.modules():
            backend = getattr(module, "attn_backend", None)
            if backend is not None:
                get_name = getattr(backend, "get_name", None)
                names[part] = get_name() if get_name else backend.name
    return names


class Recorder:
    """Keeps what the engine's model makes of one prompt.

    Recording ends with the prompt's logits, so the steps after it are not recorded.
    The modules' `forward` is wrapped: classes that vLLM may compile call it themselves,
    past torch's hooks.
    """

    def __init__(self, model: Any) -> None:
        self.made: dict[str, list[Tensor]] | None = None
        self.finished: dict[str, list[Tensor]] = {}
        backbone, layers = model.visual_tokenizer.backbone, model.llm.model.layers
        for index, layer in enumerate(trace.layers_of(backbone)):
            self._tap(layer, trace.tower_layer(index))
        self._tap(backbone, trace.FEATURES, ("patches", trace.PIXELS))
        self._tap(model.visual_tokenizer.head, trace.VISUAL)
        for index, layer in enumerate(layers):
            inputs = ("hidden_states", trace.MERGED) if index == 0 else None
            self._tap(layer, trace.text_layer(index), inputs)
        self._compute_logits = model.compute_logits
        model.compute_logits = self._logits

    def _tap(
        self, module: Any, name: str, taken: tuple[str, str] | None = None
    ) -> None:
        """Keep a module's output as `name`, and an argument as another name."""
        forward = module.forward
        signature = inspect.signature(forward)

        def recording(*inputs: Any, **named: Any) -> Any:
            if taken is not None:
                bound = signature.bind(*inputs, **named)
                self._keep(taken[1], bound.arguments[taken[0]])
            output = forward(*inputs, **named)
            self._keep(name, output)
            return output

        module.forward = recording

    def _keep(self, name: str, output: Any) -> None:
        if self.made is None:
            return
        if isinstance(output, tuple):
            # The residual travels beside the update; their sum is the layer's output.
            update, residual = output
            output = update if residual is None else residual + update
        # The engine's kernels write over their inputs.
        self.made.setdefault(name, []).append(output.detach().clone())

    def _logits(self, hidden_states: Tensor) -> Any:
        logits = self._compute_logits(hidden_states)
        if self.made is not None:
            self._keep(trace.LOGITS, logits)
            self.finished, self.made = self.made, None
        return logits

    def record(
        self, llm: "LLM", asked: dict[str, Any]
    ) -> tuple[trace.Trace, list[int]]:
        """Answer one request, alone.

        Returns:
            The prompt's trace, and the tokens of the greedy continuation.

        """
        self.made = {}
        ((ids, tokens),) = generate(llm, [asked], trace.COUNT)
        traced = {name: torch.cat(parts) for name, parts in self.finished.items()}
        for name in (trace.MERGED, *(n for n in traced if n.startswith("text layer"))):
            traced[name] = traced[name][: len(ids)]
        traced[trace.LOGITS] = traced[trace.LOGITS][-1]
        traced[trace.IDS] = torch.tensor(ids)
        return traced, tokens


def recorder(llm: "LLM") -> Recorder:
    """Attach a recorder to an engine."""
    return llm.apply_model(Recorder)[0]
