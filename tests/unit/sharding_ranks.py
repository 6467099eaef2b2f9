"""Bodies for `run_ranks` about a model that FSDP cuts over data-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_frozen.checkpoint.hf_folder import load_hf_folder
from megatron_frozen.comm import (
    WORLD,
    destroy_model_parallel,
    gather_objects,
    get_data_parallel_group,
    get_data_parallel_world_size,
    initialize_model_parallel,
)
from megatron_frozen.layers import ModelParallelConfig
from megatron_frozen.lora import LoraConfig, LoraLinear, apply_lora, lora_parameters
from megatron_frozen.models import CausalLM
from megatron_frozen.params import gather_full, is_partial_grad, is_sharded, sum_grads
from megatron_frozen.train.sharding import cut_over_data_parallel

VOCAB_SIZE = 401


def load(folder: str, *, cut: bool, tp_size: int = 1, dtype: torch.dtype, cast_to: Any = None) -> CausalLM:
    """The model of the folder, cut or whole."""
    initialize_model_parallel(tp_size)
    parallel = ModelParallelConfig(
        tensor_model_parallel_size=tp_size, sequence_parallel=tp_size > 1, params_dtype=dtype
    )
    place = partial(cut_over_data_parallel, device=torch.device("cpu"), cast_to=cast_to)
    return load_hf_folder(folder, parallel=parallel, cut=place if cut else None)


def step(model: nn.Module, *, rank: int) -> None:
    """One forward and backward over this rank's own tokens."""
    torch.manual_seed(rank)
    ids = torch.randint(0, VOCAB_SIZE, (1, 8))
    model(ids, labels=ids).sum().backward()


def storage_bytes(params: Iterable[torch.Tensor]) -> int:
    """Bytes of the parameters registered now: parts, and what is gathered at this moment. Some share a storage."""
    local = [p.to_local() if isinstance(p, DTensor) else p for p in params]
    return sum({part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in local}.values())


def memory(rank: int, world_size: int, *, folder: str, cut: bool, lora: bool) -> dict[str, int]:
    """Bytes of base weights: held between steps, at most in a step beyond that, and of the largest two groups."""
    model = load(folder, cut=cut, dtype=torch.float32)
    held = storage_bytes(model.parameters())
    largest = max(sum(p.numel() * 4 for p in layer.parameters()) for layer in model.model.layers)
    root = sum(p.numel() * 4 for p in model.parameters()) - largest * len(model.model.layers)
    if lora:
        apply_lora(model, LoraConfig(r=1))
    adapters = storage_bytes(model.parameters()) - held
    peak = held

    def look(*_: Any) -> None:
        nonlocal peak
        gathered = [p for p in model.parameters() if not isinstance(p, DTensor)]
        now = storage_bytes(gathered) - adapters
        peak = max(peak, held + now if cut else now)

    for layer in model.model.layers:
        layer.get_submodule("mlp").register_forward_hook(lambda _m, _i, output: (look(), output.register_hook(look))[0])
    step(model, rank=rank)
    assert storage_bytes(model.parameters()) - adapters == held
    return {"held": held, "peak": peak, "layer": largest, "root": root}


def adapters(rank: int, world_size: int, *, folder: str) -> dict[str, Any]:
    """Gradients of fp32 adapters on a bf16 base, cut and whole, over two micro-batches; the first leaves one unused."""
    found = {}
    for cut in (True, False):
        torch.manual_seed(10 + rank)
        model = load(folder, cut=cut, dtype=torch.bfloat16)
        apply_lora(model, LoraConfig(r=4), seed=3)
        factors = lora_parameters(model)
        assert all(type(factor) is nn.Parameter and factor.dtype == torch.float32 for factor in factors)
        start = gather_objects([factor.detach() for factor in factors], group=WORLD)
        assert all(torch.equal(a, b) for a, b in zip(start[0], start[1], strict=True))
        q_proj = model.get_submodule("model.layers.0.self_attn.q_proj")
        assert isinstance(q_proj, LoraLinear)
        for name in (None, "default"):
            q_proj.active_adapter = name
            step(model, rank=rank)
        sum_grads(factors, group=get_data_parallel_group())
        base = [p for p in model.parameters() if not p.requires_grad]
        assert len(base) > 0
        found["cut" if cut else "whole"] = [factor.grad for factor in factors]
        found["base without gradient"] = all(p.grad is None for p in base)
        destroy_model_parallel()
    return found


def marks(rank: int, world_size: int, *, folder: str) -> dict[str, Any]:
    """Each parameter's marks and full value at two tensor-parallel ranks, cut over two data-parallel ones and whole."""
    found = {}
    for cut in (True, False):
        model = load(folder, cut=cut, tp_size=2, dtype=torch.float32)
        assert get_data_parallel_world_size() == 2
        found[cut] = {
            name: (is_sharded(p), is_partial_grad(p), gather_full(p, group=model.tp_group))
            for name, p in model.named_parameters()
        }
        assert all(isinstance(p, DTensor) == cut for p in model.parameters())
        destroy_model_parallel()
    return found
