"""The recorder sees what runs: operations, copies and collectives, in forward and backward."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_frozen.comm import (
    WORLD,
    all_gather,
    all_reduce,
    all_reduce_,
    broadcast_,
    get_tensor_model_parallel_group,
    initialize_model_parallel,
    reduce_scatter,
)
from megatron_frozen.diagnostics import Recorder
from megatron_frozen.testing import run_ranks


def test_counts_operations_forward_and_backward() -> None:
    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    with Recorder() as seen:
        y = torch.mm(x, weight.t())
        y.sum().backward()
    assert seen.count("aten.mm") == 3
    assert seen.count("aten.bmm") == 0
    first = next(operation for operation in seen.operations if operation.name == "aten.mm")
    assert first.shapes == ((3, 4), (4, 5))
    assert first.written_bytes == 3 * 5 * 4
    num_before = len(seen.operations)
    torch.mm(x, weight.t())
    assert len(seen.operations) == num_before


def test_counts_copies_by_bytes_and_no_views() -> None:
    x = torch.randn(6, 4)
    with Recorder() as seen:
        x.t().reshape(-1)
        x.to(torch.float64)
        x.transpose(0, 1).view(4, 6)
        x.contiguous()
        torch.cat([x, x])
        torch.zeros(6, 4).copy_(x)
        torch.zeros(0).clone()
    assert [operation.written_bytes for operation in seen.copies()] == [96, 192, 192, 96]
    assert seen.copied_bytes() == 576
    assert seen.copied_bytes(min_bytes=100) == 384
    assert seen.copies(min_bytes=1000) == []


def collectives_body(rank: int, world_size: int) -> tuple[dict[str, int], dict[str, int]]:
    initialize_model_parallel(world_size)
    group = get_tensor_model_parallel_group()
    x = torch.ones(4, 4)
    with Recorder() as seen:
        all_reduce(x, group=group)
        all_reduce_(x, group=group)
        all_reduce(x, group=group, op="max", async_op=True)[1].wait()  # pyright: ignore[reportOptionalMemberAccess]
        all_gather(x, group=group)
        all_gather(x, group=group, dim=1)
        reduce_scatter(x, group=group)
        broadcast_(x, src=1, group=WORLD)
        dist.barrier()
        all_reduce(x, group=None)
    return dict(seen.collectives()), dict(seen.payload_bytes())


def test_counts_collectives() -> None:
    expected = {"all_reduce": 3, "all_gather": 2, "reduce_scatter": 1, "broadcast": 1}
    payload = {"all_reduce": 3 * 64, "all_gather": 2 * 128, "reduce_scatter": 64, "broadcast": 64}
    assert run_ranks(2, collectives_body) == [(expected, payload)] * 2
