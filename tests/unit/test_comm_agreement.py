"""Agreement: a failure on one rank is one on all, at once, with rank and cause; nobody waits for ever (case 40)."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron_frozen.comm import (
    WORLD,
    all_reduce,
    get_data_parallel_group,
    get_tensor_model_parallel_group,
    initialize_model_parallel,
    on_first_rank,
    raise_together,
    together,
)
from megatron_frozen.errors import ConfigError, ParallelError
from megatron_frozen.testing import run_ranks


def check_in_step(world_size: int) -> None:
    """Assert that the next collective of all ranks is one and the same."""
    total, _ = all_reduce(torch.ones(3), group=dist.group.WORLD)
    assert torch.equal(total, torch.full((3,), float(world_size)))


def raise_if(error: Exception | None) -> None:
    """Raise ``error`` if there is one."""
    if error is not None:
        raise error


def raise_together_body(rank: int, world_size: int) -> None:
    raise_together(None, doing="nothing")
    for failing in ({1}, {0, 2}, {0, 1, 2}):
        error = ValueError(f"row {rank}") if rank in failing else None
        if error is None:
            first = min(failing)
            with pytest.raises(
                ParallelError, match=rf"^rank {first} failed while reading rows: ValueError: row {first}$"
            ):
                raise_together(error, doing="reading rows")
        else:
            with pytest.raises(ValueError, match=f"^row {rank}$") as raised:
                raise_together(error, doing="reading rows")
            assert raised.value is error
        check_in_step(world_size)
    # A user's error is a sentence already, so its class is left out.
    error = ConfigError("lr is -1; give a number above 0") if rank == 2 else None
    with pytest.raises(ValueError, match="lr is -1; give") as raised:
        raise_together(error, doing="reading the config")
    if rank != 2:
        assert str(raised.value) == "rank 2 failed while reading the config: lr is -1; give a number above 0"
    check_in_step(world_size)


def test_raise_together_names_rank_and_cause() -> None:
    run_ranks(3, raise_together_body)


def read_row(number: int, *, rank: int) -> int:
    if rank == 1 and number == 7:
        raise ValueError(f"row {number} is broken")
    return number


def together_body(rank: int, world_size: int) -> None:
    with together(doing="reading the data"):
        rows = [read_row(number, rank=0) for number in range(9)]
    assert rows == list(range(9))
    # The trap of case 40: the error is caught, so that torchrun does not see a rank end.
    caught = None
    try:
        with together(doing="reading the data"):
            for number in range(9):
                read_row(number, rank=rank)
        check_in_step(world_size)
    except ValueError as error:
        caught = str(error)
    said = "row 7 is broken" if rank == 1 else "rank 1 failed while reading the data: ValueError: row 7 is broken"
    assert caught == said
    check_in_step(world_size)


def test_together_ends_all_ranks_inside_a_try_block() -> None:
    run_ranks(3, together_body)


def crossing_groups_body(rank: int, world_size: int) -> None:
    """Over two groups at once, as a checkpoint is loaded: all ranks hear of rank 3, if only from one that has heard."""
    initialize_model_parallel(2)  # tensor-parallel groups (0 1) (2 3), data-parallel groups (0 2) (1 3)
    tensor, data = get_tensor_model_parallel_group(), get_data_parallel_group()
    heard = "rank 3 failed while loading: no disk"
    said = [f"rank 2 failed while loading: {heard}", heard, heard, "no disk"][rank]
    error = ConfigError("no disk") if rank == 3 else None
    with (
        pytest.raises(ValueError, match=f"^{said}$"),
        together(group=data, doing="loading"),
        together(group=tensor, doing="loading"),
    ):
        raise_if(error)
    check_in_step(world_size)


def one_group_only_body(rank: int, world_size: int) -> None:
    """What fails in one tensor-parallel group is no business of the other."""
    initialize_model_parallel(2)
    group = get_tensor_model_parallel_group()
    caught = None
    try:
        with together(group=group, doing="testing"):
            raise_if(ValueError("here") if rank == 3 else None)
    except ValueError as error:
        caught = str(error)
    assert caught == [None, None, "rank 3 failed while testing: ValueError: here", "here"][rank]
    # An outer block over the same ranks, with the inner one reached by all, raises what the inner one raised.
    with pytest.raises(ValueError, match=r"inner$"), together(doing="outside"), together(doing="inside"):
        raise_if(ValueError("inner") if rank == 0 else None)
    check_in_step(world_size)


def test_nested_blocks_and_groups() -> None:
    run_ranks(4, crossing_groups_body)
    run_ranks(4, one_group_only_body)


def first_rank_body(rank: int, world_size: int) -> None:
    calls: list[int] = []

    def work() -> dict[str, torch.Tensor]:
        calls.append(rank)
        return {"rank": torch.tensor(rank)}

    assert on_first_rank(work, doing="working") == {"rank": torch.tensor(0)}
    assert calls == ([0] if rank == 0 else [])
    for bad, said in (
        (lambda: 1 // 0, "ZeroDivisionError: integer division or modulo by zero"),
        (lambda: (number for number in range(3)), "TypeError: cannot pickle 'generator' object"),
    ):
        with pytest.raises(Exception, match=said.split(": ")[1]) as raised:
            on_first_rank(bad, doing="making the folder")
        if rank != 0:
            assert str(raised.value) == f"rank 0 failed while making the folder: {said}"
        check_in_step(world_size)
    # Inside another block, as a checkpoint is written.
    with pytest.raises(Exception, match="no space"), together(doing="saving"):
        on_first_rank(lambda: exec("raise OSError('no space')"), doing="making the folder")
    check_in_step(world_size)
    initialize_model_parallel(world_size)
    assert on_first_rank(lambda: rank, group=get_tensor_model_parallel_group(), doing="asking") == 0


def test_on_first_rank_runs_once_and_fails_everywhere() -> None:
    run_ranks(3, first_rank_body)


def test_one_rank_without_a_process_group() -> None:
    for group in (WORLD, None):
        raise_together(None, group=group, doing="x")
        with pytest.raises(ValueError, match=r"^mine$"):
            raise_together(ValueError("mine"), group=group, doing="x")
        with pytest.raises(ValueError, match=r"^mine$"), together(group=group, doing="x"):
            raise ValueError("mine")
        result = object()
        assert on_first_rank(lambda result=result: result, group=group, doing="x") is result
