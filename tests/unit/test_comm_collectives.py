"""Raw collectives at 3 ranks: values, what stays untouched, asynchronous handles, objects; None is one rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron_frozen import gather_from_tensor_model_parallel_region
from megatron_frozen.comm import (
    WORLD,
    all_gather,
    all_reduce,
    all_reduce_,
    broadcast_,
    broadcast_object,
    gather_objects,
    get_tensor_model_parallel_group,
    initialize_model_parallel,
    reduce_scatter,
)
from megatron_frozen.comm.collectives import local_slice
from megatron_frozen.errors import LayoutError
from megatron_frozen.testing import run_ranks
from tests.unit.core_ranks import MEMORY, Untouched, seeded

SHAPE = (6, 3, 9)


def check_values(*, rank: int, world_size: int, memory: str) -> None:
    group = get_tensor_model_parallel_group()
    tensors = [seeded(*SHAPE, seed=number) for number in range(world_size)]
    x = MEMORY[memory](tensors[rank])
    untouched = Untouched(x)
    stacked = torch.stack(tensors)
    results = {
        "sum": all_reduce(x, group=group)[0],
        "max": all_reduce(x, group=group, op="max")[0],
        **{f"gather {dim}": all_gather(x, group=group, dim=dim)[0] for dim in range(-3, 3)},
        **{f"scatter {dim}": reduce_scatter(x, group=group, dim=dim)[0] for dim in range(-3, 3)},
        **{f"slice {dim}": local_slice(x, group=group, dim=dim) for dim in range(-3, 3)},
    }
    expected = {
        "sum": stacked.sum(0),
        "max": stacked.amax(0),
        **{f"gather {dim}": torch.cat(tensors, dim=dim) for dim in range(-3, 3)},
        **{f"scatter {dim}": stacked.sum(0).chunk(world_size, dim=dim)[rank] for dim in range(-3, 3)},
        **{f"slice {dim}": x.chunk(world_size, dim=dim)[rank] for dim in range(-3, 3)},
    }
    for name, result in results.items():
        torch.testing.assert_close(result, expected[name], rtol=1e-14, atol=1e-14, msg=name)
        assert result.is_contiguous(), name
    untouched.check()


def values_body(rank: int, world_size: int) -> None:
    initialize_model_parallel(world_size)
    group = get_tensor_model_parallel_group()
    for memory in MEMORY:
        check_values(rank=rank, world_size=world_size, memory=memory)
    for launch, expected in (
        (all_reduce, torch.full((3, 2), 3.0)),
        (all_gather, torch.cat([torch.full((3, 2), float(number)) for number in range(3)])),
        (reduce_scatter, torch.full((1, 2), 3.0)),
    ):
        result, work = launch(torch.full((3, 2), float(rank)), group=group, async_op=True)
        assert work is not None
        work.wait()
        assert torch.equal(result, expected)
    x = torch.full((2,), float(rank))
    result, _ = all_reduce_(x, group=group)
    assert result is x
    assert torch.equal(x, torch.full((2,), 3.0))
    assert all_gather(torch.zeros(0, 4), group=group, dim=1)[0].shape == (0, 12)
    assert reduce_scatter(torch.zeros(0, 6), group=group, dim=1)[0].shape == (0, 2)
    for dim, number in ((0, 4), (1, 5), (-1, 5)):
        with pytest.raises(LayoutError, match=r"dim \d of a tensor of shape \[4, 5\] is to be cut over 3 ranks"):
            reduce_scatter(torch.zeros(4, 5), group=group, dim=dim)
        assert number % 3


def test_values() -> None:
    run_ranks(3, values_body)


def thin_body(rank: int, world_size: int) -> None:
    """Shards of one column, and rows of which there is one, whose join could be a view of what was gathered."""
    initialize_model_parallel(world_size)
    group = get_tensor_model_parallel_group()
    for shape in ((4, 3, 1), (1, 1, 4), (1, 4), (1, 1), (4, 1, 2)):
        parts = [seeded(*shape, seed=number) for number in range(world_size)]
        for dim in range(1, len(shape)):
            gathered, _ = all_gather(parts[rank], group=group, dim=dim)
            assert torch.equal(gathered, torch.cat(parts, dim=dim))
            assert gathered.is_contiguous()
            assert not gathered._is_view()
        x = parts[rank].clone().requires_grad_()
        (grad,) = torch.autograd.grad(gather_from_tensor_model_parallel_region(x).mul_(2).sum(), x)
        assert torch.equal(grad, torch.full(shape, 2.0, dtype=x.dtype))


def test_a_thin_join_has_memory_of_its_own() -> None:
    run_ranks(3, thin_body)


def autocast_body(rank: int, world_size: int) -> None:
    initialize_model_parallel(world_size)
    group = get_tensor_model_parallel_group()
    with torch.autocast("cpu", torch.float16):
        gathered, _ = all_gather(torch.full((2, 3), rank, dtype=torch.bfloat16), group=group, dim=1)
        scattered, _ = reduce_scatter(torch.ones(2, 9, dtype=torch.bfloat16), group=group, dim=1)
    ranks = torch.arange(3, dtype=torch.bfloat16).repeat_interleave(3).expand(2, 9)
    assert torch.equal(gathered, ranks)
    assert torch.equal(scattered, torch.full((2, 3), 3, dtype=torch.bfloat16))


def test_the_autocast_of_another_dtype() -> None:
    """Under one to fp16, CUDA's default, torch puts no bf16 tensors beside each other."""
    run_ranks(3, autocast_body)


def objects_body(rank: int, world_size: int) -> None:
    initialize_model_parallel(2)  # groups (0 1) and (2 3): src is the rank inside the group
    group = get_tensor_model_parallel_group()
    first = rank - rank % 2
    assert gather_objects({"rank": rank}, group=group) == [{"rank": first}, {"rank": first + 1}]
    assert gather_objects(rank) == list(range(world_size))
    assert broadcast_object(rank, group=group, src=1) == first + 1
    assert broadcast_object(("first", rank)) == ("first", 0)
    x = torch.full((2,), float(rank))
    assert broadcast_(x, src=1, group=group) is x
    assert torch.equal(x, torch.full((2,), first + 1.0))
    assert torch.equal(broadcast_(x.clone(), src=3, group=WORLD), torch.full((2,), 3.0))
    assert torch.equal(broadcast_(x.clone(), src=3, group=dist.group.WORLD), torch.full((2,), 3.0))


def test_objects_and_broadcasts_count_ranks_inside_the_group() -> None:
    run_ranks(4, objects_body)


def test_none_is_one_rank() -> None:
    x = torch.ones(3, 5)
    for collective in (all_reduce, all_reduce_, all_gather, reduce_scatter):
        assert collective(x, group=None) == (x, None)
    assert local_slice(x, group=None, dim=0) is x
    assert broadcast_(x, src=0, group=None) is x
    assert broadcast_(x, src=0, group=WORLD) is x
    thing = object()
    assert broadcast_object(thing, group=None) is thing
    assert gather_objects(thing) == [thing]
