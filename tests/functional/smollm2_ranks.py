"""What the spawn pool runs for the SmolLM2 test."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_frozen.checkpoint.hf_folder import load_hf_folder
from megatron_frozen.comm import initialize_model_parallel
from megatron_frozen.layers import ModelParallelConfig
from megatron_frozen.testing import rank_device

PROMPT_LENGTH = 48


def folder_logits(rank: int, world_size: int, folder: str, input_ids: Tensor, sequence_parallel: bool) -> Tensor:  # noqa: FBT001
    """This rank's fp32 logits [b, s, V / ranks] of a Hugging Face folder."""
    del rank
    initialize_model_parallel(world_size)
    parallel = ModelParallelConfig(
        tensor_model_parallel_size=world_size, sequence_parallel=sequence_parallel, params_dtype=torch.float32
    )
    with torch.no_grad():
        return load_hf_folder(folder, parallel=parallel).to(rank_device())(input_ids.to(rank_device())).cpu()
