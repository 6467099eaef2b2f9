"""Bodies for `run_ranks` about FSDP2: two linear layers, fp32 originals, bf16 products."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from megatron_frozen import linear_with_grad_accumulation_and_async_allreduce
from megatron_frozen.integrations.fsdp import fp32_grads
from megatron_frozen.testing import relative_error

NUM_TOKENS, HIDDEN, WIDE = 48, 64, 128


class Linear(nn.Module):
    """The product under test on one rank: ours, or torch's."""

    def __init__(self, num_in: int, num_out: int, *, bias: bool, ours: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_out, num_in) / num_in**0.5)
        self.bias = nn.Parameter(torch.randn(num_out)) if bias else None
        self.ours = ours
        self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.ours:
            return nn.functional.linear(x, self.weight, self.bias)
        return linear_with_grad_accumulation_and_async_allreduce(
            x,
            self.weight,
            self.bias,
            gradient_accumulation_fusion=False,
            allreduce_dgrad=False,
            sequence_parallel=False,
        )


class MLP(nn.Module):
    """Two linears that keep each call's input and output gradient, from which the exact weight gradient follows."""

    def __init__(self, *, bias: bool = False, ours: bool = True) -> None:
        super().__init__()
        self.a = Linear(HIDDEN, WIDE, bias=bias, ours=ours)
        self.b = Linear(WIDE, HIDDEN, bias=bias, ours=ours)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._watched(self.b, torch.relu(self._watched(self.a, x)))

    def _watched(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        y = layer(x)
        y.register_hook(lambda grad: layer.seen.append((grad.double(), x.detach().double())))
        return y


def sharded_mlp(*, bias: bool = False, ours: bool = True, reshard: bool = True, dtype: Any = torch.float32) -> MLP:
    """An MLP whose two linears and whole are FSDP2 groups over all ranks, computed with in bf16."""
    torch.manual_seed(0)
    model = MLP(bias=bias, ours=ours).to(dtype)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (model.a, model.b, model):
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    return model


def train(model: MLP, *, num_batches: int, sync_each: bool) -> None:
    """Forward and backward over micro-batches that differ between ranks."""
    assert isinstance(model, FSDPModule)
    torch.manual_seed(10 + dist.get_rank())
    for index in range(num_batches):
        model.set_requires_gradient_sync(sync_each or index == num_batches - 1)
        model(torch.randn(NUM_TOKENS, 2, HIDDEN, dtype=torch.bfloat16)).square().sum().backward()


def errors(model: MLP) -> dict[str, float]:
    """The relative error of each full gradient (FSDP2's mean over ranks) against fp64 from the same bf16 operands."""
    found = {}
    for name, layer in (("a", model.a), ("b", model.b)):
        exact = {
            "weight": sum(torch.einsum("sbo,sbi->oi", grad, x) for grad, x in layer.seen),
            "bias": sum(grad.sum((0, 1)) for grad, _ in layer.seen),
        }
        for kind, param in layer.named_parameters():
            total = exact[kind]
            assert isinstance(total, torch.Tensor)
            assert isinstance(param.grad, DTensor)
            assert param.grad.dtype == torch.float32
            dist.all_reduce(total)
            found[f"{name}.{kind}"] = relative_error(param.grad.full_tensor(), total / dist.get_world_size())
    return found


def precision(rank: int, world_size: int, *, fp32: bool, num_batches: int, sync_each: bool, **model: Any) -> Any:
    """Errors of the gradients after one step."""
    mlp = sharded_mlp(**model)
    if fp32:
        fp32_grads(mlp)
    train(mlp, num_batches=num_batches, sync_each=sync_each)
    return errors(mlp)


def undone(rank: int, world_size: int) -> tuple[dict[str, float], dict[str, float]]:
    """Errors with the handle of a second call in force, and after it was removed."""
    mlp = sharded_mlp(bias=True)
    fp32_grads(mlp.a)
    handle = fp32_grads(mlp)
    train(mlp, num_batches=2, sync_each=True)
    with_handle = errors(mlp)
    hooks = len(mlp.a._forward_pre_hooks)
    assert fp32_grads(mlp) is not handle
    assert len(mlp.a._forward_pre_hooks) == hooks
    handle.remove()
    assert len(mlp.a._forward_pre_hooks) == hooks - 1
    for layer in (mlp.a, mlp.b):
        layer.seen.clear()
        layer.zero_grad()
    train(mlp, num_batches=2, sync_each=True)
    return with_handle, errors(mlp)


def frozen_then_trained(rank: int, world_size: int) -> dict[str, float]:
    """Errors where a layer is frozen when fp32_grads is called."""
    mlp = sharded_mlp()
    mlp.a.requires_grad_(requires_grad=False)
    fp32_grads(mlp)
    mlp.a.requires_grad_(requires_grad=True)
    train(mlp, num_batches=1, sync_each=True)
    return errors(mlp)


def foreign_bias(rank: int, world_size: int) -> str:
    """What FSDP2 says where only the weight of a group has fp32 gradients."""
    mlp = sharded_mlp(bias=True)
    for layer in (mlp.a, mlp.b):
        layer.register_forward_pre_hook(lambda module, _: setattr(module.weight, "grad_dtype", torch.float32))
    return _said(lambda: train(mlp, num_batches=1, sync_each=True))


def refusals(rank: int, world_size: int) -> dict[str, str]:
    """What fp32_grads says of what it cannot do."""
    compiled = sharded_mlp()
    compiled.a.compile(backend="eager")
    wrapped = sharded_mlp()
    later = sharded_mlp()
    fp32_grads(later)
    later.a.compile(backend="eager")
    return {
        "not sharded": _said(lambda: fp32_grads(MLP())),
        "bf16": _said(lambda: fp32_grads(sharded_mlp(dtype=torch.bfloat16))),
        "compiled": _said(lambda: fp32_grads(compiled)),
        "wrapped": _said(lambda: fp32_grads(nn.ModuleList([cast(nn.Module, torch.compile(wrapped, backend="eager"))]))),
        "compiled later": _said(lambda: train(later, num_batches=1, sync_each=True)),
    }


def _said(act: Any) -> str:
    try:
        act()
    except (ValueError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
