"""The mappings at 1, 2 and 3 ranks against plain torch: values, gradients, collectives, and what stays untouched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from megatron_frozen import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    initialize_model_parallel,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from megatron_frozen.comm import get_tensor_model_parallel_group
from megatron_frozen.diagnostics import Recorder
from megatron_frozen.errors import LayoutError
from megatron_frozen.testing import run_ranks
from tests.unit.core_ranks import MEMORY, Untouched, seeded

S, B, H = 6, 2, 6
Values = Sequence[torch.Tensor]  # one tensor per rank


class Mapping(NamedTuple):
    """A mapping, what it gives each rank, and the collectives of its two passes."""

    function: Callable[..., torch.Tensor]
    forward: Callable[[Values, int], torch.Tensor]
    backward: Callable[[Values, int], torch.Tensor]
    sends: tuple[dict[str, int], dict[str, int]]


def own(values: Values, rank: int) -> torch.Tensor:
    return values[rank]


def total(values: Values, rank: int) -> torch.Tensor:
    del rank
    return torch.stack(list(values)).sum(0)


def part(dim: int) -> Callable[[Values, int], torch.Tensor]:
    return lambda values, rank: values[rank].chunk(len(values), dim=dim)[rank]


def joined(dim: int) -> Callable[[Values, int], torch.Tensor]:
    return lambda values, rank: torch.cat(list(values), dim=dim)


def part_of_total(values: Values, rank: int) -> torch.Tensor:
    return total(values, rank).chunk(len(values))[rank]


def gather_own_gradient(input_: torch.Tensor, group: Any = None) -> torch.Tensor:
    return gather_from_sequence_parallel_region(input_, tensor_parallel_output_grad=False, group=group)


REDUCE, GATHER, SCATTER = {"all_reduce": 1}, {"all_gather": 1}, {"reduce_scatter": 1}
MAPPINGS = {
    "copy": Mapping(copy_to_tensor_model_parallel_region, own, total, ({}, REDUCE)),
    "reduce": Mapping(reduce_from_tensor_model_parallel_region, total, own, (REDUCE, {})),
    "scatter": Mapping(scatter_to_tensor_model_parallel_region, part(-1), joined(-1), ({}, GATHER)),
    "gather": Mapping(gather_from_tensor_model_parallel_region, joined(-1), part(-1), (GATHER, {})),
    "scatter sequence": Mapping(scatter_to_sequence_parallel_region, part(0), joined(0), ({}, GATHER)),
    "gather sequence": Mapping(
        lambda input_, group=None: gather_from_sequence_parallel_region(input_, group=group),
        joined(0),
        part_of_total,
        (GATHER, SCATTER),
    ),
    "gather sequence, own gradient": Mapping(gather_own_gradient, joined(0), part(0), (GATHER, {})),
    "reduce-scatter": Mapping(reduce_scatter_to_sequence_parallel_region, part_of_total, joined(0), (SCATTER, GATHER)),
}


def check_mapping(mapping: Mapping, *, memory: str, rank: int, world_size: int, group: Any) -> None:
    """Both passes with input and gradient in the given memory."""
    inputs = [seeded(S, B, H, seed=number) for number in range(world_size)]
    expected = mapping.forward(inputs, rank)
    gradients = [seeded(*expected.shape, seed=100 + number) for number in range(world_size)]
    if memory == "expanded":
        gradients = [gradient[:1].expand_as(gradient) for gradient in gradients]
    lay_out = MEMORY.get(memory, lambda tensor: tensor)
    x, gradient = lay_out(inputs[rank]).requires_grad_(), lay_out(gradients[rank])
    untouched = Untouched(x, gradient)
    with Recorder() as forward:
        y = mapping.function(x, group=group)
    with Recorder() as backward:
        (dx,) = torch.autograd.grad(y, x, gradient)
    torch.testing.assert_close(y, expected, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(dx, mapping.backward(gradients, rank), rtol=1e-14, atol=1e-14)
    sends = mapping.sends if world_size > 1 else ({}, {})
    assert (dict(forward.collectives()), dict(backward.collectives())) == sends
    untouched.check()


def values_body(rank: int, world_size: int) -> None:
    initialize_model_parallel(world_size)
    for mapping in MAPPINGS.values():
        for memory in [*MEMORY, "expanded"]:
            check_mapping(mapping, memory=memory, rank=rank, world_size=world_size, group=None)
        for group in (get_tensor_model_parallel_group(), dist.group.WORLD):
            check_mapping(mapping, memory="dense", rank=rank, world_size=world_size, group=group)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_values_gradients_and_collectives(world_size: int) -> None:
    run_ranks(world_size, values_body)


def small_group_body(rank: int, world_size: int) -> None:
    """With nothing set up the default group is no tensor-parallel group; an explicit group of one is one rank."""
    alone, _ = dist.new_subgroups(1)
    x = seeded(S, B, H, seed=rank)
    for mapping in MAPPINGS.values():
        with Recorder() as seen:
            assert mapping.function(x) is x
            assert mapping.function(x, group=alone) is x
        assert not seen.collectives()
    check_mapping(MAPPINGS["gather sequence"], memory="dense", rank=rank, world_size=world_size, group=dist.group.WORLD)


def test_no_group_is_one_rank() -> None:
    x = torch.ones(3, 5)
    assert all(mapping.function(x) is x for mapping in MAPPINGS.values())
    run_ranks(2, small_group_body)


def fp32_body(rank: int, world_size: int) -> None:
    """In fp32 each sum is rounded once; in bf16 the sum of three is rounded twice, which shows somewhere."""
    initialize_model_parallel(world_size)
    dtype = torch.bfloat16
    gradients = [seeded(3, 2, 400, seed=number, dtype=dtype) for number in range(world_size)]
    rounded_once = torch.stack(gradients).double().sum(0).to(dtype)
    for in_fp32 in (False, True):
        x = torch.zeros(3, 2, 400, dtype=dtype, requires_grad=True)
        y = copy_to_tensor_model_parallel_region(x, reduce_in_fp32=in_fp32)
        (dx,) = torch.autograd.grad(y, x, gradients[rank])
        assert dx.dtype == dtype
        assert torch.equal(dx, rounded_once) is in_fp32
        x = torch.zeros(1, 2, 400, dtype=dtype, requires_grad=True)
        y = gather_from_sequence_parallel_region(x, reduce_in_fp32=in_fp32)
        (dx,) = torch.autograd.grad(y, x, gradients[rank])
        assert dx.dtype == dtype
        assert torch.equal(dx, rounded_once[rank : rank + 1]) is in_fp32
    # "in fp32" widens bf16 and fp16; it must not narrow fp64.
    fine = torch.full((3, 2, 4), 1 + 2.0**-40, dtype=torch.float64)
    x = torch.zeros(3, 2, 4, dtype=torch.float64, requires_grad=True)
    (dx,) = torch.autograd.grad(copy_to_tensor_model_parallel_region(x, reduce_in_fp32=True), x, fine)
    assert torch.equal(dx, world_size * fine)
    x = torch.zeros(1, 2, 4, dtype=torch.float64, requires_grad=True)
    (dx,) = torch.autograd.grad(gather_from_sequence_parallel_region(x, reduce_in_fp32=True), x, fine)
    assert torch.equal(dx, world_size * fine[:1])


def test_gradients_are_summed_in_fp32_if_asked() -> None:
    run_ranks(3, fp32_body)


def errors_body(rank: int, world_size: int) -> None:
    del rank
    initialize_model_parallel(world_size)
    x = torch.zeros(5, 2, 7, requires_grad=True)
    by_sequence = r"dim 0 of a tensor of shape \[5, 2, 7\] is to be cut over 2 ranks; give a size that divides by 2"
    with pytest.raises(LayoutError, match=by_sequence):
        scatter_to_sequence_parallel_region(x)
    with pytest.raises(LayoutError, match=by_sequence):
        reduce_scatter_to_sequence_parallel_region(x)
    with pytest.raises(LayoutError, match=r"dim -1 of a tensor of shape \[5, 2, 7\] is to be cut over 2 ranks"):
        scatter_to_tensor_model_parallel_region(x)
    for mapping in MAPPINGS.values():
        x = torch.ones(4, 2, 4, requires_grad=True)
        y = mapping.function(x)
        gradient = torch.ones_like(y).requires_grad_()
        (dx,) = torch.autograd.grad(y, x, gradient, create_graph=True)
        if dx.requires_grad:  # that of `reduce` is the incoming gradient itself
            with pytest.raises(RuntimeError, match="once_differentiable"):
                dx.sum().backward()


def test_uneven_dims_and_double_backward_raise() -> None:
    run_ranks(2, errors_body)


def odd_shapes_body(rank: int, world_size: int) -> None:
    """A loss without dims and a vector are summed like anything else."""
    initialize_model_parallel(world_size)
    for shape in ((), (3,), (1, 1)):
        for name in ("copy", "reduce"):
            x = torch.full(shape, rank + 1.0, requires_grad=True)
            y = MAPPINGS[name].function(x)
            (dx,) = torch.autograd.grad(y, x, torch.full(shape, rank + 1.0))
            assert (y.shape, dx.shape) == (shape, shape)
            assert torch.equal(y, torch.full(shape, 3.0 if name == "reduce" else rank + 1.0))
            assert torch.equal(dx, torch.full(shape, 3.0 if name == "copy" else rank + 1.0))


def test_scalars_and_vectors() -> None:
    run_ranks(2, odd_shapes_body)


def no_tokens_body(rank: int, world_size: int) -> None:
    """Case 16: ranks without tokens take part in the same collectives."""
    del rank
    initialize_model_parallel(world_size)
    for mapping in MAPPINGS.values():
        x = torch.zeros(0, 1, 4, requires_grad=True)
        with Recorder() as forward:
            y = mapping.function(x)
        with Recorder() as backward:
            y.sum().backward()
        assert y.shape[0] == 0
        assert x.grad is not None
        assert x.grad.shape == x.shape
        assert (dict(forward.collectives()), dict(backward.collectives())) == mapping.sends


def test_no_tokens() -> None:
    run_ranks(2, no_tokens_body)
