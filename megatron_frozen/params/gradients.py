"""Gradients of all parameters at once: sums over ranks in one bucket per dtype, the global norm, clipping."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor

from megatron_frozen.comm import all_reduce_
from megatron_frozen.comm.groups import Group, group_rank, group_size
from megatron_frozen.errors import ConfigError
from megatron_frozen.params.shards import is_partial_grad, is_sharded


def _trainable(params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return each parameter that requires grad once; a tied one counts once."""
    return list({id(param): param for param in params if param.requires_grad}.values())


def sum_partial_grads(params: Iterable[torch.Tensor], *, group: Group) -> None:
    """Sum over the tensor-parallel ``group`` the gradients of those ``params`` that ``mark_partial_grad`` marked.

    To be called once per step, after the last backward and before ``sum_grads``, clipping and the optimizer;
    afterwards the replicated factors' gradients are bit-equal on all ranks. One all-reduce per parameter dtype, in at
    least fp32."""
    sum_grads((param for param in params if is_partial_grad(param)), group=group)


def sum_grads(params: Iterable[torch.Tensor], *, group: Group) -> None:
    """Sum the gradients of the trainable ``params`` over ``group``: one all-reduce per parameter dtype, in at least
    fp32.

    A gradient that is absent on this rank but present on another counts as zeros; one absent everywhere stays absent.
    Every rank passes the same parameters in the same order. Of DTensors the local parts are summed, so ``group`` must
    be another one than that of their mesh.
    """
    if group_size(group) == 1:
        return
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for param in _trainable(params):
        by_dtype.setdefault(param.dtype, []).append(param)
    for same_dtype in by_dtype.values():
        _sum_bucket(same_dtype, group=group)


def _sum_bucket(params: list[torch.Tensor], *, group: Group) -> None:
    wide = torch.promote_types(params[0].dtype, torch.float32)
    device = params[0].device
    # One flag per parameter travels with the values, so that ranks need not agree beforehand on which are absent.
    flags = torch.tensor([float(param.grad is not None) for param in params], dtype=wide, device=device)
    grads = [torch.zeros_like(param) if param.grad is None else param.grad for param in params]
    parts = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
    bucket = torch.cat([part.reshape(-1).to(wide) for part in parts] + [flags])
    all_reduce_(bucket, group=group)
    start = 0
    for index, (param, grad, part) in enumerate(zip(params, grads, parts, strict=True)):
        part.copy_(bucket[start : start + part.numel()].view_as(part))
        start += part.numel()
        if param.grad is None and bucket[index - len(params)] > 0:
            param.grad = grad


def grad_norm(params: Iterable[torch.Tensor], *, group: Group) -> torch.Tensor:
    """Return the 2-norm of all gradients of the trainable ``params`` as an fp32 scalar, the same on all ranks.

    Shards add up over the tensor-parallel ``group``; a replica and a tied parameter count once. DTensors are summed
    over their own mesh first. One all-reduce, and one for each mesh. Call it after the sums over ranks."""
    with_grad = [param for param in _trainable(params) if param.grad is not None]
    device = with_grad[0].device if with_grad else torch.device("cpu")
    sums: dict[tuple[Group, bool], torch.Tensor] = {}
    for param in with_grad:
        local = _local_grad(param)
        norm = torch.linalg.vector_norm(local, dtype=torch.promote_types(local.dtype, torch.float32))
        place = _mesh_group(param), is_sharded(param)
        sums[place] = sums.get(place, 0.0) + norm * norm
    total = torch.zeros((), dtype=torch.float32, device=device)
    for (mesh_group, sharded), part in sums.items():
        whole = all_reduce_(part, group=mesh_group)[0]  # of every rank, counted or not
        if sharded or group_rank(group) == 0:
            total += whole
    return all_reduce_(total, group=group)[0].sqrt_()


def _mesh_group(param: torch.Tensor) -> Group:
    """Return the group that a DTensor's parts are spread over; None for any other tensor."""
    if not isinstance(param, DTensor):
        return None
    assert len(param.placements) == 1, "one group per DTensor, as FSDP over one group makes them"
    return None if param.placements[0].is_replicate() else param.device_mesh.get_group()


def _local_grad(param: torch.Tensor) -> torch.Tensor:
    assert param.grad is not None
    return param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad


def clip_grad_norm(params: Iterable[torch.Tensor], *, max_norm: float, group: Group) -> torch.Tensor:
    """Scale all gradients so that their common norm is at most ``max_norm``; return the norm before that.

    The norm is ``grad_norm``'s. If it is not finite the gradients are spoilt: look at what is returned. One
    all-reduce. A ``max_norm`` of infinity measures and leaves the gradients alone.

    Raises ConfigError for a ``max_norm`` that is not above 0.
    """
    if not max_norm > 0:
        raise ConfigError(f"max_norm is {max_norm}; gradients are clipped to a norm above 0")
    params = _trainable(params)
    norm = grad_norm(params, group=group)
    scale = (max_norm / norm).clamp(max=1.0)
    for param in params:
        if param.grad is not None:
            _local_grad(param).mul_(scale)
    return norm
