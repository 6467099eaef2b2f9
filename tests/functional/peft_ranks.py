"""What the spawn pool runs for the round trip through peft."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_frozen.checkpoint.hf_folder import load_hf_folder
from megatron_frozen.comm import initialize_model_parallel
from megatron_frozen.layers import ModelParallelConfig
from megatron_frozen.lora import load_adapter
from megatron_frozen.testing import rank_device


def adapter_logits(rank: int, world_size: int, base: str, adapters: list[str], input_ids: Tensor) -> list[Tensor]:
    """This rank's fp32 logits [b, s, V / ranks] of a base folder, with each of the adapter folders on it."""
    del rank
    initialize_model_parallel(world_size)
    parallel = ModelParallelConfig(tensor_model_parallel_size=world_size, sequence_parallel=world_size > 1)
    results = []
    for adapter in adapters:
        model = load_adapter(load_hf_folder(base, parallel=parallel), adapter).to(rank_device())
        with torch.no_grad():
            results.append(model(input_ids.to(rank_device())).cpu())
    return results
