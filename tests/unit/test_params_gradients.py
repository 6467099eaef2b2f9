"""Sums of gradients over ranks, their common norm and clipping; cases 10 (data parallel), 17 and 23."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from megatron_frozen import clip_grad_norm, sum_grads, sum_partial_grads
from megatron_frozen.comm import (
    WORLD,
    gather_objects,
    get_data_parallel_group,
    get_tensor_model_parallel_group,
    initialize_model_parallel,
)
from megatron_frozen.diagnostics import Recorder
from megatron_frozen.errors import ConfigError
from megatron_frozen.params import grad_norm, mark_partial_grad, set_tensor_model_parallel_attributes
from megatron_frozen.testing import run_ranks
from tests.unit.core_ranks import seeded


def with_grad(grad: torch.Tensor | None, *shape: int, dtype: torch.dtype | None = None) -> torch.nn.Parameter:
    """Return a parameter that holds this gradient."""
    values = torch.zeros(shape, dtype=dtype or torch.float32) if grad is None else torch.zeros_like(grad)
    parameter = torch.nn.Parameter(values)
    parameter.grad = grad
    return parameter


def grad_of(parameter: torch.nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def sums_body(rank: int, world_size: int) -> None:
    initialize_model_parallel(world_size)
    group = get_tensor_model_parallel_group()
    summed = torch.stack([seeded(4, 3, seed=number, dtype=torch.float32) for number in range(world_size)]).sum(0)
    own = seeded(4, 3, seed=rank, dtype=torch.float32)
    plain, transposed = with_grad(own.clone()), with_grad(own.t().contiguous().t())
    # In bf16 256 + 1 = 256, so in whatever order three ranks are summed, one of these places would lose a 1.
    low_values = [torch.full((3,), 256.0).where(torch.arange(3) == number, 1.0) for number in range(world_size)]
    low = with_grad(low_values[rank].bfloat16())
    elsewhere = with_grad(torch.ones(5) if rank == 1 else None, 5)
    nowhere = with_grad(None, 2, 2)
    frozen = with_grad(torch.ones(3))
    frozen.requires_grad = False
    double = with_grad(torch.full((1,), 1 + 2.0**-40, dtype=torch.float64))
    parameters = [plain, low, elsewhere, nowhere, frozen, transposed, plain, double]
    before = [parameter.grad for parameter in parameters]
    with Recorder() as seen:
        sum_grads(parameters, group=group)
    assert dict(seen.collectives()) == {"all_reduce": 3}  # fp32, bf16, fp64
    torch.testing.assert_close(grad_of(plain), summed)  # tied: summed once
    torch.testing.assert_close(grad_of(transposed), summed)
    assert torch.equal(grad_of(low), torch.full((3,), 258.0, dtype=torch.bfloat16))
    assert torch.equal(grad_of(elsewhere), torch.ones(5))
    assert nowhere.grad is None
    assert torch.equal(grad_of(frozen), torch.ones(3))
    assert torch.equal(grad_of(double), torch.full((1,), 3 * (1 + 2.0**-40), dtype=torch.float64))
    for parameter, grad in zip(parameters, before, strict=True):
        assert grad is None or parameter.grad is grad  # written in place: an optimizer or hook may hold it
    for parameter in parameters:
        if parameter.requires_grad:
            bits = None if parameter.grad is None else parameter.grad.tolist()
            assert gather_objects(bits, group=group) == [bits] * world_size
    with Recorder() as seen:
        sum_grads([nowhere, frozen], group=group)
        sum_grads([], group=group)
        sum_grads(parameters, group=None)
    assert dict(seen.collectives()) == {"all_reduce": 1}
    assert nowhere.grad is None


def partial_body(rank: int, world_size: int) -> None:
    initialize_model_parallel(2)
    tensor, data = get_tensor_model_parallel_group(), get_data_parallel_group()
    marked, plain = with_grad(torch.full((3,), float(rank))), with_grad(torch.full((3,), float(rank)))
    late = with_grad(torch.ones(2) if rank % 2 else None, 2)
    for parameter in (marked, late):
        mark_partial_grad(parameter)
    with Recorder() as seen:
        sum_partial_grads(iter([marked, plain, late]), group=tensor)
    assert dict(seen.collectives()) == {"all_reduce": 1}
    assert torch.equal(grad_of(plain), torch.full((3,), float(rank)))
    assert torch.equal(grad_of(marked), torch.full((3,), 1.0 if rank < 2 else 5.0))
    assert torch.equal(grad_of(late), torch.ones(2))
    sum_grads([marked, plain, late], group=data)
    assert world_size == 4
    assert torch.equal(grad_of(marked), torch.full((3,), 6.0))
    assert torch.equal(grad_of(plain), torch.full((3,), 2.0 * (rank % 2) + 2.0))


def test_sums_over_ranks() -> None:
    run_ranks(3, sums_body)
    run_ranks(4, partial_body)


def case_23(rank: int, *, dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    """Return sharded (3, 0) and (0, 4), a replicated 12 and others that must not count."""
    shard = with_grad(torch.tensor([3.0, 0.0] if rank == 0 else [0.0, 4.0], dtype=dtype))
    set_tensor_model_parallel_attributes(shard, is_parallel=True, dim=0, stride=1)
    replica = with_grad(torch.tensor([12.0], dtype=dtype))
    frozen = with_grad(torch.tensor([100.0]))
    frozen.requires_grad = False
    return [shard, replica, frozen, with_grad(None, 4), replica]


def expect_grads(parameters: Sequence[torch.nn.Parameter], *, rank: int, scale: float) -> None:
    shard, replica, frozen = parameters[:3]
    expected = torch.tensor([3.0, 0.0] if rank == 0 else [0.0, 4.0])
    torch.testing.assert_close(grad_of(shard), expected * scale, check_dtype=False)
    torch.testing.assert_close(grad_of(replica), torch.tensor([12.0]) * scale, check_dtype=False)
    assert grad_of(frozen).item() == 100.0
    assert parameters[3].grad is None


def norm_body(rank: int, world_size: int) -> None:
    initialize_model_parallel(world_size)
    group = get_tensor_model_parallel_group()
    for dtype in (torch.float32, torch.float64):
        parameters = case_23(rank, dtype=dtype)
        with Recorder() as seen:
            norm = clip_grad_norm(iter(parameters), max_norm=1.0, group=group)
        assert dict(seen.collectives()) == {"all_reduce": 1}
        assert (norm.item(), norm.dtype) == (13.0, torch.float32)
        expect_grads(parameters, rank=rank, scale=1 / 13)
        assert grad_norm(parameters, group=group).item() == pytest.approx(1.0, abs=1e-6)
    # At or under the limit nothing changes, not in the last bit.
    parameters = case_23(rank)
    for max_norm in (13.0, 13.5, float("inf")):
        assert clip_grad_norm(parameters, max_norm=max_norm, group=group).item() == 13.0
        assert torch.equal(grad_of(parameters[0]), torch.tensor([3.0, 0.0] if rank == 0 else [0.0, 4.0]))
    low = case_23(rank, dtype=torch.bfloat16)
    assert clip_grad_norm(low, max_norm=6.5, group=group).item() == 13.0
    assert grad_of(low[1]).dtype == torch.bfloat16
    assert grad_of(low[1]).item() == 6.0
    # A rank without any gradient takes part.
    only_here = [with_grad(torch.tensor([2.0]) if rank == 1 else None, 1)]
    set_tensor_model_parallel_attributes(only_here[0], is_parallel=True, dim=0, stride=1)
    assert grad_norm(only_here, group=group).item() == 2.0
    assert grad_norm([], group=group).item() == 0.0
    assert clip_grad_norm([with_grad(torch.zeros(2))], max_norm=1.0, group=group).item() == 0.0
    # Group None is one rank whatever is set up: this rank's replicas count.
    assert grad_norm(case_23(0), group=None).item() == pytest.approx((9 + 144) ** 0.5)
    for bad in (float("inf"), float("nan")):
        spoilt = case_23(rank)
        if rank == 1:
            grad_of(spoilt[0])[1] = bad
        norms = gather_objects(clip_grad_norm(spoilt, max_norm=1.0, group=group).item(), group=WORLD)
        assert not any(torch.isfinite(torch.tensor(norms)))


def dtensor_body(rank: int, world_size: int) -> None:
    """A DTensor and a plain parameter in one call: of a fully sharded module, and of one that is not."""
    initialize_model_parallel(world_size)
    group = get_tensor_model_parallel_group()
    mesh = init_device_mesh("cpu", (world_size,))
    local = torch.tensor([3.0, 0.0] if rank == 0 else [0.0, 4.0])
    for norm_group in (group, None):
        dtensor = torch.nn.Parameter(DTensor.from_local(torch.zeros(2), mesh, [Shard(0)]))
        dtensor.grad = DTensor.from_local(local.clone(), mesh, [Shard(0)])
        plain = with_grad(torch.tensor([12.0]))
        assert clip_grad_norm([dtensor, plain], max_norm=1.0, group=norm_group).item() == 13.0
        assert isinstance(dtensor.grad, DTensor)
        torch.testing.assert_close(dtensor.grad.to_local(), local / 13)
        torch.testing.assert_close(plain.grad, torch.tensor([12.0]) / 13)


def test_norm_counts_each_parameter_once() -> None:
    run_ranks(2, norm_body)
    run_ranks(2, dtensor_body)


@pytest.mark.parametrize("max_norm", [0.0, -1.0, float("nan")])
def test_limits_are_above_zero(max_norm: float) -> None:
    with pytest.raises(ConfigError, match=rf"max_norm is {max_norm}; gradients are clipped to a norm above 0"):
        clip_grad_norm([with_grad(torch.ones(1))], max_norm=max_norm, group=None)
