"""Body for `run_ranks`: a LoraLinear as one unit of FSDP2 or FSDP1, two micro-batches, other data on each rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

from megatron_frozen import ColumnParallelLinear, LoraConfig, ModelParallelConfig
from megatron_frozen.lora import LoraLinear
from megatron_frozen.testing import relative_error

IN, OUT, RANK, NUM_TOKENS = 8, 6, 4, 5


def _layer(dtype: torch.dtype) -> LoraLinear:
    torch.manual_seed(0)
    config = ModelParallelConfig(params_dtype=dtype)
    base = ColumnParallelLinear(IN, OUT, config=config, init_method=nn.init.normal_, bias=False)
    layer = LoraLinear(base)
    layer.add_adapter("default", LoraConfig(r=RANK), full_A=torch.randn(RANK, IN), full_B=torch.randn(OUT, RANK))
    layer.weight.requires_grad = False
    return layer


def _micro_batches(rank: int, *, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(10 + rank)
    return [torch.randn(NUM_TOKENS, 1, IN, generator=generator).to(dtype) for _ in range(2)]


def _step(run: Any, layer: LoraLinear, *, rank: int) -> torch.dtype:
    """The base alone, then base and adapter; return the output's dtype."""
    unused, used = _micro_batches(rank, dtype=layer.weight.dtype)
    layer.active_adapter = None
    run(unused.requires_grad_())[0].sum().backward()
    layer.active_adapter = "default"
    output = run(used.requires_grad_())[0]
    (output.float() * torch.arange(1.0, OUT + 1)).sum().backward()
    return output.dtype


def _full(gradient: torch.Tensor | None) -> torch.Tensor:
    assert gradient is not None
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def _mean_gradients(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The mean over ranks of what each rank alone would compute."""
    totals: dict[str, torch.Tensor] = {}
    for rank in range(dist.get_world_size()):
        layer = _layer(dtype)
        _step(layer, layer, rank=rank)
        for name, parameter in layer.named_parameters():
            if parameter.requires_grad:
                totals[name] = totals.get(name, 0) + _full(parameter.grad) / dist.get_world_size()
    return totals


def train_mixed(rank: int, world_size: int, *, kind: str, dtype: torch.dtype) -> dict[str, Any]:
    """Return the gradients' error, the frozen parameters that hold a gradient, the output's dtype, or a refusal."""
    layer = _layer(dtype)
    if kind == "fsdp2":
        fully_shard(layer, mesh=dist.device_mesh.init_device_mesh("cpu", (world_size,)))
        run: nn.Module = layer
        gradients = {name: parameter for name, parameter in layer.named_parameters() if parameter.requires_grad}
    else:
        try:
            run = FullyShardedDataParallel(
                layer, use_orig_params="orig" in kind, device_id=torch.device("cpu"), sync_module_states=False
            )
        except ValueError as error:
            return {"refusal": str(error)}
        gradients = {}
    output_dtype = _step(run, layer, rank=rank)
    expected = _mean_gradients(dtype)
    if gradients:
        found = {name: _full(parameter.grad) for name, parameter in gradients.items()}
    else:
        with FullyShardedDataParallel.summon_full_params(run, with_grads=True):
            found = {name: _full(p.grad).clone() for name, p in layer.named_parameters() if p.requires_grad}
    return {
        "adapter_error": max(relative_error(found[name], gradient) for name, gradient in expected.items()),
        "base_gradients": [n for n, p in run.named_parameters() if not p.requires_grad and p.grad is not None],
        "output_dtype": str(output_dtype),
    }
