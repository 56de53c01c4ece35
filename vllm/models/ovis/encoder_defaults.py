# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the vision encoder does where the user leaves it open."""

from typing import TYPE_CHECKING

from vllm import envs
from vllm.config.compilation import CompilationMode, CUDAGraphMode
from vllm.config.vllm import OptimizationLevel
from vllm.platforms import current_platform

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def is_tuned_for_gpu() -> bool:
    """Whether choices that were made by measuring on Hopper GPUs hold here.

    Not where results must not depend on the batch: they go by its size.
    """
    return (
        current_platform.is_cuda()
        and current_platform.is_device_capability(90)
        and not envs.VLLM_BATCH_INVARIANT
    )


def set_encoder_defaults(config: "VllmConfig") -> None:
    """Decide on CUDA graphs for the encoder, and for which numbers of tiles.

    What the user has set stays.
    """
    compilation = config.compilation_config
    if compilation.cudagraph_mm_encoder is None:
        compilation.cudagraph_mm_encoder = encoder_graphs_fit(config)
    if compilation.cudagraph_mm_encoder and (
        not compilation.encoder_cudagraph_token_budgets
    ):
        vision = config.model_config.hf_config.vision
        compilation.encoder_cudagraph_token_budgets = vision.encoder_graph_tokens


def encoder_graphs_fit(config: "VllmConfig") -> bool:
    """Whether the encoder runs in CUDA graphs unless the user says otherwise.

    On one Hopper GPU with the second model runner, where that has been measured: one
    tile takes a seventh of the time that it takes the release, and large batches as
    long as without. Not where graphs are not wanted, neither images nor videos are
    served, adapters change the tower, another attention is named, or results must not
    depend on the batch.
    """
    compilation, parallel = config.compilation_config, config.parallel_config
    media, lora = config.model_config.multimodal_config, config.lora_config
    return (
        is_tuned_for_gpu()
        and not config.model_config.enforce_eager
        and config.optimization_level != OptimizationLevel.O0
        and compilation.cudagraph_mode != CUDAGraphMode.NONE
        and compilation.mode != CompilationMode.STOCK_TORCH_COMPILE
        and not compilation.compile_mm_encoder
        and media is not None
        and any(media.get_limit_per_prompt(kind) for kind in ("image", "video"))
        and media.mm_encoder_attn_backend is None
        and parallel.tensor_parallel_size == parallel.pipeline_parallel_size == 1
        and not (lora is not None and lora.enable_tower_connector_lora)
        and config.use_v2_model_runner
    )
