"""Shards of parameters: Megatron's attributes on them, and the way from the full tensor to a shard and back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from megatron_frozen.comm import all_gather
from megatron_frozen.comm.groups import Group, chosen_group, group_rank, group_size
from megatron_frozen.errors import ParallelError
from megatron_frozen.main_grad import hand_over
from megatron_frozen.partition import divide, stride_pieces

InitMethod = Callable[[torch.Tensor], Any]

_MARKS = ("tensor_model_parallel", "partition_dim", "partition_stride", "sequence_parallel", "allreduce")


def set_tensor_model_parallel_attributes(
    tensor: torch.Tensor,
    is_parallel: bool,  # noqa: FBT001 - Megatron's signature
    dim: int,
    stride: int,
) -> None:
    """Set ``tensor_model_parallel``, ``partition_dim`` and ``partition_stride``, as Megatron's function does."""
    attributes = {"tensor_model_parallel": is_parallel, "partition_dim": dim, "partition_stride": stride}
    for name, value in attributes.items():
        setattr(tensor, name, value)


class SharesGroups(torch.nn.Module):
    """A module that may hold process groups, which nothing can copy: its copies share them and the configs."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        for name, value in vars(self).items():
            if value is not None and (isinstance(value, dist.ProcessGroup) or name in ("config", "parallel")):
                memo[id(value)] = value
        memo[id(self)] = copied = type(self).__new__(type(self))
        copied.__setstate__(copy.deepcopy(vars(self), memo))
        return copied


class KeepsMarks(SharesGroups):
    """A module whose own parameters keep their marks where torch puts new objects in their place, and in copies.

    ``load_state_dict(assign=True)`` and ``to_empty`` from the meta device do; unmarked, a shard would pass for a
    replica, and a partial gradient would never be summed."""

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        with marks_kept(self._parameters):
            return super()._apply(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        with marks_kept(self._parameters):
            super()._load_from_state_dict(*args, **kwargs)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for param in self._parameters.values():
            if param is not None:  # out of a pickle it carries the key of the one that was saved
                hand_over(param, param, is_copy=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = super().__deepcopy__(memo)
        for name, param in copied._parameters.items():
            _mark_as(self._parameters[name], param, is_copy=True)
        return copied


@contextmanager
def marks_kept(params: Mapping[str, torch.nn.Parameter | None]) -> Iterator[None]:
    """Give the objects that the body puts into a module's ``params`` the marks of those that were there."""
    before = dict(params)
    yield
    for name, param in params.items():
        _mark_as(before[name], param, is_copy=False)


def _mark_as(old: torch.nn.Parameter | None, new: torch.nn.Parameter | None, *, is_copy: bool) -> None:
    if old is None or new is None or new is old:
        return
    for mark in _MARKS:
        if hasattr(old, mark):
            setattr(new, mark, getattr(old, mark))
    hand_over(old, new, is_copy=is_copy)


def is_sharded(param: torch.Tensor) -> bool:
    """Return whether the ranks of a tensor-parallel group hold different parts of ``param``."""
    return getattr(param, "tensor_model_parallel", False)


def param_is_not_tensor_parallel_duplicate(param: torch.Tensor, tp_group: Group = None) -> bool:
    """Return whether this rank counts ``param`` in a sum over ranks: each shard counts, a replica on rank 0 only."""
    return is_sharded(param) or group_rank(chosen_group(tp_group)) == 0


def mark_partial_grad(param: torch.Tensor) -> None:
    """Say that each tensor-parallel rank computes a part of this replicated parameter's gradient.

    The parts are summed once per step by ``sum_partial_grads``. The mark is Megatron's attribute
    ``sequence_parallel``, which its ``finalize_model_grads`` acts on in the same way."""
    param.sequence_parallel = True  # pyright: ignore[reportAttributeAccessIssue]


def is_partial_grad(param: torch.Tensor) -> bool:
    """Return whether ``mark_partial_grad`` was called for ``param``."""
    return getattr(param, "sequence_parallel", False)


def shard_of(full: torch.Tensor, *, partition_dim: int, group: Group, stride: int = 1) -> torch.Tensor:
    """Return this rank's part of ``full``, cut along ``partition_dim``, as a dense tensor; no communication.

    Raises ConfigError where the dim does not divide by the number of ranks.
    """
    world_size = group_size(group)
    shard_size = divide(full.shape[partition_dim], world_size, what="the size of a sharded dimension")
    pieces = stride_pieces(shard_size, rank=group_rank(group), world_size=world_size, stride=stride)
    parts = [full.narrow(partition_dim, start, stop - start) for start, stop in pieces]
    return torch.cat(parts, dim=partition_dim) if len(parts) > 1 else parts[0].contiguous()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a DTensor gathered over its own mesh, by one all-gather; any other tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gather_full(param: torch.Tensor, *, group: Group) -> torch.Tensor:
    """Return the full tensor of a sharded ``param`` on every rank: one all-gather; a replica as it is, detached.

    A DTensor is gathered over its own mesh first, by one more all-gather.

    Raises ParallelError where a sharded parameter does not say along which dim it is cut.
    """
    shard = whole(param.detach())
    if not is_sharded(param) or group_size(group) == 1:
        return shard
    dim = getattr(param, "partition_dim", -1)
    if dim < 0:
        raise ParallelError(
            f"a sharded parameter of shape {list(param.shape)} has no partition_dim; "
            f"mark it with set_tensor_model_parallel_attributes"
        )
    full, _ = all_gather(shard, group=group, dim=dim)
    stride = getattr(param, "partition_stride", 1)
    if stride == 1:
        return full
    parts = full.chunk(group_size(group) * stride, dim=dim)  # rank-major; the full order is piece-major
    return torch.cat([part for i in range(stride) for part in parts[i::stride]], dim=dim)


def init_shard_(
    shard: torch.Tensor,
    *,
    full_shape: Sequence[int],
    partition_dim: int,
    init_method: InitMethod,
    group: Group,
    stride: int = 1,
) -> torch.Tensor:
    """Fill ``shard`` with its part of a full fp32 tensor on the CPU that ``init_method`` fills; return the full one.

    The gathered parameter is bit-equal at any number of ranks, and so is its fan, as long as the ranks enter with the
    same CPU random state. Each rank builds the full tensor once and drops it. No collectives. Source: Megatron's
    ``_initialize_affine_weight_cpu``."""
    master = torch.empty(*full_shape, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        init_method(master)
        shard.copy_(shard_of(master, partition_dim=partition_dim, group=group, stride=stride))
    return master
