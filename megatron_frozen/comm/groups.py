"""Process groups: the tensor-parallel and the data-parallel one, and sizes of any group.

A group is a ``torch.distributed.ProcessGroup`` or None, which means one rank and no communication.
"""

from __future__ import annotations

import datetime
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch.distributed as dist

from megatron_frozen.errors import ParallelError

Group: TypeAlias = dist.ProcessGroup | None


@dataclass
class _ModelParallelState:
    is_set_up: bool = False
    tensor: Any = None  # a Group; torch types what it makes more widely
    data: Any = None


_STATE = _ModelParallelState()


class _World:
    """Stands for the default group, or for one rank where none was set up."""

    def __repr__(self) -> str:
        return "WORLD"


WORLD = _World()

AnyGroup: TypeAlias = Group | _World


def resolve(group: AnyGroup) -> Group:
    """Return the default group for ``WORLD`` (None where no group was initialised), else ``group`` itself."""
    if isinstance(group, _World):
        return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    return group


def group_size(group: AnyGroup) -> int:
    """Return the number of ranks in ``group``; 1 for None."""
    group = resolve(group)
    return 1 if group is None else dist.get_world_size(group)


def group_rank(group: AnyGroup) -> int:
    """Return this process's rank in ``group``; 0 for None."""
    group = resolve(group)
    return 0 if group is None else dist.get_rank(group)


def global_rank(rank: int, *, group: AnyGroup) -> int:
    """Return the number that rank ``rank`` of ``group`` has among all ranks."""
    group = resolve(group)
    return rank if group is None else dist.get_global_rank(group, rank)


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    *,
    context_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    distributed_timeout_minutes: float = 30,
) -> None:
    """Cut the default process group into tensor-parallel groups of neighbours and data-parallel groups across them.

    With 6 ranks and tensor_model_parallel_size 3 the tensor-parallel groups are (0 1 2) (3 4 5) and the data-parallel
    ones (0 3) (1 4) (2 5), as in Megatron's ``parallel_state.initialize_model_parallel``, whose other sizes must be 1
    here. Every rank calls it. A rank that waits for another one in these groups gives up after the timeout (torch
    does not hand that of the default group down). Without an initialised process group, size 1 is one rank.

    Raises ParallelError where it was called before, or a size does not fit.
    """
    if _STATE.is_set_up:
        raise ParallelError(
            "initialize_model_parallel was called twice; call destroy_model_parallel before setting up other groups"
        )
    others = (pipeline_model_parallel_size, context_parallel_size, expert_model_parallel_size)
    if any(size != 1 for size in others) or virtual_pipeline_model_parallel_size is not None:
        raise ParallelError(
            f"pipeline, context and expert parallel sizes are {others}; this package shards over tensor and data "
            f"parallel ranks only, so leave them at 1"
        )
    world_size = group_size(WORLD)
    if tensor_model_parallel_size < 1 or world_size % tensor_model_parallel_size:
        raise ParallelError(
            f"tensor_model_parallel_size is {tensor_model_parallel_size} with {world_size} ranks; "
            f"start a number of ranks that it divides (torchrun --nproc-per-node)"
        )
    if resolve(WORLD) is not None:
        tensor_ranks = [
            list(range(start, start + tensor_model_parallel_size))
            for start in range(0, world_size, tensor_model_parallel_size)
        ]
        data_ranks = [list(ranks) for ranks in zip(*tensor_ranks, strict=True)]
        timeout = datetime.timedelta(minutes=distributed_timeout_minutes)
        _STATE.tensor, _ = dist.new_subgroups_by_enumeration(tensor_ranks, timeout=timeout)
        _STATE.data, _ = dist.new_subgroups_by_enumeration(data_ranks, timeout=timeout)
    _STATE.is_set_up = True


def destroy_model_parallel() -> None:
    """Forget the groups; the default process group stays. Safe to call where nothing was set up."""
    groups = (_STATE.tensor, _STATE.data)
    _STATE.is_set_up, _STATE.tensor, _STATE.data = False, None, None
    for group in groups:
        if group is not None and dist.is_initialized():
            with suppress(ValueError):  # torch forgot it when the default group it was cut from went away
                dist.destroy_process_group(group)


def get_tensor_model_parallel_group() -> Group:
    """Return the tensor-parallel group of this rank; None where nothing was set up."""
    return _STATE.tensor


def chosen_group(tp_group: Group) -> Group:
    """Return ``tp_group``; where it is None, the group of ``initialize_model_parallel``."""
    return tp_group if tp_group is not None else _STATE.tensor


def get_data_parallel_group() -> Group:
    """Return the data-parallel group of this rank; None where nothing was set up."""
    return _STATE.data


def get_tensor_model_parallel_rank() -> int:
    """Return this rank's place in its tensor-parallel group."""
    return group_rank(_STATE.tensor)


def get_tensor_model_parallel_world_size() -> int:
    """Return the size of the tensor-parallel group; 1 where nothing was set up."""
    return group_size(_STATE.tensor)


def get_data_parallel_rank() -> int:
    """Return this rank's place in its data-parallel group."""
    return group_rank(_STATE.data)


def get_data_parallel_world_size() -> int:
    """Return the size of the data-parallel group; 1 where nothing was set up."""
    return group_size(_STATE.data)
