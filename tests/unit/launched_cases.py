"""What tests/unit/test_testing_launched.py runs under torchrun; some fail on purpose, so pytest does not collect it."""

from __future__ import annotations

import os
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist

from megatron_frozen.testing import rank_device, run_ranks


def _sum_of_ranks(rank: int, world_size: int, start: torch.Tensor) -> torch.Tensor:
    total = (start + rank).to(rank_device())
    dist.all_reduce(total)
    assert dist.get_world_size() == world_size == int(os.environ["WORLD_SIZE"])
    return total.cpu()


def _pid(rank: int, world_size: int) -> int:
    warnings.warn("no fault of a body", stacklevel=1)
    return os.getpid()


def _fail_on_1(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("row 7 is broken")
    dist.barrier()  # for a rank that never comes


def _wait_for_ever(rank: int, world_size: int) -> None:
    if rank == 0:
        dist.barrier()
    time.sleep(12)  # longer than rank 0 waits for it


def _return_a_function(rank: int, world_size: int) -> Any:
    return lambda: rank


def test_every_rank_runs_and_large_tensors_come_back() -> None:
    for world_size in (2, 1, 2):
        results = run_ranks(world_size, _sum_of_ranks, torch.full((3, 2**20), 0.5))  # 12 MiB
        assert len(results) == world_size
        assert all((result == 0.5 * world_size + sum(range(world_size))).all() for result in results)


def test_ranks_are_the_processes_of_torchrun() -> None:
    first, second = run_ranks(2, _pid)
    assert first == os.getpid()
    assert run_ranks(2, _pid) == [first, second]


def test_outside_bodies_there_is_one_rank() -> None:
    assert not dist.is_initialized()
    assert not dist.is_torchelastic_launched()
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} & set(os.environ)


def test_of_more_ranks_than_there_are() -> None:
    run_ranks(3, _pid)


def test_whose_rank_1_fails() -> None:
    run_ranks(2, _fail_on_1, timeout_s=60)


def test_whose_value_cannot_travel() -> None:
    run_ranks(2, _return_a_function)


def test_whose_ranks_do_not_meet() -> None:
    run_ranks(2, _wait_for_ever, timeout_s=5)


def test_after_those_that_failed() -> None:
    assert len(run_ranks(2, _pid)) == 2
