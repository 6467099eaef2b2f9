"""Shards: Megatron's attributes, cutting and joining with any stride, and weights that do not depend on the ranks."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import pytest
import torch

from megatron_frozen.comm import get_tensor_model_parallel_group, initialize_model_parallel
from megatron_frozen.diagnostics import Recorder
from megatron_frozen.errors import ConfigError, ParallelError
from megatron_frozen.params import (
    KeepsMarks,
    gather_full,
    init_shard_,
    is_partial_grad,
    is_sharded,
    mark_partial_grad,
    param_is_not_tensor_parallel_duplicate,
    set_tensor_model_parallel_attributes,
    shard_of,
)
from megatron_frozen.testing import run_ranks

FULL_SHAPE = (12, 24)


def sharded(tensor: torch.Tensor, *, dim: int, stride: int = 1) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(tensor)
    set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=dim, stride=stride)
    return parameter


def test_attributes_are_megatrons() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, 3))
    assert not is_sharded(parameter)
    assert not is_partial_grad(parameter)
    set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=1, stride=2)
    mark_partial_grad(parameter)
    names = ("tensor_model_parallel", "partition_dim", "partition_stride", "sequence_parallel")
    assert [getattr(parameter, name) for name in names] == [True, 1, 2, True]
    assert is_sharded(parameter)
    assert is_partial_grad(parameter)


def test_marks_stay_where_a_parameter_is_replaced() -> None:
    class Layer(KeepsMarks):
        def __init__(self) -> None:
            super().__init__()
            self.weight = sharded(torch.zeros(2, 3, device="meta"), dim=1, stride=2)
            self.bias = torch.nn.Parameter(torch.zeros(2, device="meta"))
            mark_partial_grad(self.bias)

    layer = Layer()
    filled = {"weight": torch.ones(2, 3), "bias": torch.ones(2)}
    for replace in (
        lambda: layer.to_empty(device="cpu"),
        lambda: layer.load_state_dict(filled, assign=True),
        lambda: layer.bfloat16(),
    ):
        old = layer.weight
        replace()
        assert layer.weight is not old or layer.weight.dtype == torch.bfloat16
        assert (is_sharded(layer.weight), is_partial_grad(layer.weight)) == (True, False)
        assert (is_sharded(layer.bias), is_partial_grad(layer.bias)) == (False, True)
        assert [getattr(layer.weight, name) for name in ("partition_dim", "partition_stride")] == [1, 2]


def round_trip_body(rank: int, world_size: int) -> None:
    initialize_model_parallel(world_size)
    group = get_tensor_model_parallel_group()
    full = torch.arange(math.prod(FULL_SHAPE), dtype=torch.float32).view(FULL_SHAPE)
    for dim in (0, 1):
        for stride in (1, 2):
            shard = shard_of(full, partition_dim=dim, group=group, stride=stride)
            pieces = full.split(FULL_SHAPE[dim] // world_size // stride, dim=dim)[rank::world_size]
            assert torch.equal(shard, torch.cat(pieces, dim=dim))
            assert shard.is_contiguous()
            with Recorder() as seen:
                gathered = gather_full(sharded(shard, dim=dim, stride=stride), group=group)
            assert torch.equal(gathered, full)
            assert not gathered.requires_grad
            assert dict(seen.collectives()) == ({"all_gather": 1} if world_size > 1 else {})
    replica = torch.nn.Parameter(full)
    with Recorder() as seen:
        assert torch.equal(gather_full(replica, group=group), full)
        assert torch.equal(gather_full(sharded(full, dim=0), group=None), full)
    assert not seen.collectives()
    assert param_is_not_tensor_parallel_duplicate(replica) is (rank == 0)
    assert param_is_not_tensor_parallel_duplicate(replica, group) is (rank == 0)
    assert param_is_not_tensor_parallel_duplicate(sharded(full, dim=0), group)
    if world_size == 2:
        with pytest.raises(ConfigError, match="the size of a sharded dimension is 3, which does not divide by 2"):
            shard_of(torch.zeros(3, 4), partition_dim=0, group=group)
        unsaid = torch.nn.Parameter(torch.zeros(3, 4))
        set_tensor_model_parallel_attributes(unsaid, is_parallel=True, dim=-1, stride=1)
        with pytest.raises(ParallelError, match=r"a sharded parameter of shape \[3, 4\] has no partition_dim; mark it"):
            gather_full(unsaid, group=group)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_cut_and_joined(world_size: int) -> None:
    run_ranks(world_size, round_trip_body)


INIT_METHODS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normal": functools.partial(torch.nn.init.normal_, std=0.02),
    "xavier": torch.nn.init.xavier_normal_,
    "kaiming": functools.partial(torch.nn.init.kaiming_uniform_, a=math.sqrt(5)),
}


def init_body(rank: int, world_size: int, method: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """The gathered parameter of each cut, a second one from the same random stream, and the last full tensor."""
    del rank
    initialize_model_parallel(world_size)
    group = get_tensor_model_parallel_group()
    torch.manual_seed(5)
    gathered = []
    for dim, stride in ((0, 1), (1, 1), (0, 2)):
        shape = [size // (world_size if index == dim else 1) for index, size in enumerate((4, 64))]
        parameter = sharded(torch.full(shape, torch.nan, dtype=dtype), dim=dim, stride=stride)
        master = init_shard_(
            parameter,
            full_shape=(4, 64),
            partition_dim=dim,
            init_method=INIT_METHODS[method],
            group=group,
            stride=stride,
        )
        assert master.dtype == torch.float32
        assert parameter.requires_grad
        gathered.append(gather_full(parameter, group=group))
        assert torch.equal(gathered[-1], master.to(dtype))
    return gathered


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("method", INIT_METHODS)
def test_initial_weights_do_not_depend_on_the_ranks(method: str, dtype: torch.dtype) -> None:
    """Case 21: fan and random stream are those of the full weight, the values those of plain torch with its seed."""
    torch.manual_seed(5)
    plain = [INIT_METHODS[method](torch.empty(4, 64)).to(dtype) for _ in range(3)]
    for world_size in (1, 2):
        for by_rank in run_ranks(world_size, init_body, method, dtype):
            for gathered, expected in zip(by_rank, plain, strict=True):
                assert torch.equal(gathered, expected)
    if method == "kaiming":  # 0.1768 from the shard of two ranks
        assert 0.12 < torch.stack(plain).abs().max() <= 0.125
    if method == "xavier":  # 0.2357 from the shard of two ranks
        assert 0.15 < torch.stack(plain).float().std() < 0.19
