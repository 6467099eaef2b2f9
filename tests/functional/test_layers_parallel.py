"""Column and row layers at 1 to 4 ranks against one unsharded product in fp64: y, dx, dw and db apart, in every mode.

What each mode sends and how many products it runs are asserted on the same passes, and that what every rank holds in
full is the same on all to the bit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from megatron_frozen import (
    ColumnParallelLinear,
    ModelParallelConfig,
    RowParallelLinear,
    initialize_model_parallel,
    sum_partial_grads,
)
from megatron_frozen.comm import get_tensor_model_parallel_group
from megatron_frozen.diagnostics import Recorder
from megatron_frozen.testing import assert_close_to, assert_no_worse_than, rank_device, run_ranks
from tests.functional.replicas import assert_equal_on_all_ranks
from tests.unit.core_ranks import MEMORY, Untouched, seeded

S, B, IN, OUT = 12, 2, 24, 36
Tensors = dict[str, torch.Tensor | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A layer and how it is fed."""

    kind: str
    sequence_parallel: bool
    is_frozen: bool
    bias: str  # none, added, returned
    whole: bool  # column: gather the output; row: take the whole input
    memory: str
    shape: tuple[int, ...] = (S, B)
    dtype: torch.dtype = torch.float32

    def is_legal(self) -> bool:
        return not (self.kind == "row" and self.sequence_parallel and self.whole)


def cases(**fixed: Any) -> Iterator[Case]:
    """Every legal mode."""
    names = {
        "kind": ("column", "row"),
        "sequence_parallel": (False, True),
        "is_frozen": (True, False),
        "bias": ("none", "added", "returned"),
        "whole": (False, True),
        "memory": ("dense", "leading dims swapped", "a slice"),
    }
    choices = [(fixed[name],) if name in fixed else values for name, values in names.items()]
    others = {name: value for name, value in fixed.items() if name not in names}
    for chosen in itertools.product(*choices):
        case = Case(**dict(zip(names, chosen, strict=True)), **others)
        if case.is_legal():
            yield case


def layer_of(case: Case) -> ColumnParallelLinear | RowParallelLinear:
    config = ModelParallelConfig(
        sequence_parallel=case.sequence_parallel, params_dtype=case.dtype, use_cpu_initialization=True
    )
    common: dict[str, Any] = {
        "config": config,
        "init_method": torch.nn.init.normal_,
        "bias": case.bias != "none",
        "skip_bias_add": case.bias == "returned",
    }
    torch.manual_seed(7)
    if case.kind == "column":
        layer = ColumnParallelLinear(IN, OUT, gather_output=case.whole, **common)
    else:
        layer = RowParallelLinear(IN, OUT, input_is_parallel=not case.whole, **common)
    assert layer.weight is not None
    layer.weight.requires_grad = not case.is_frozen
    return layer.to(rank_device())


def full_operands(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """X, W, b and dY of the whole layer, in the layer's dtype."""
    torch.manual_seed(7)
    weight = torch.nn.init.normal_(torch.empty(OUT, IN)).to(case.dtype)
    x, grad = seeded(*case.shape, IN, seed=1, dtype=case.dtype), seeded(*case.shape, OUT, seed=2, dtype=case.dtype)
    tensors = (x, weight, seeded(OUT, seed=3, dtype=case.dtype), grad)
    x, weight, bias, grad = (tensor.to(rank_device()) for tensor in tensors)
    return x, weight, bias, grad


def whole_results(case: Case, dtype: torch.dtype) -> Tensors:
    """What plain torch gives for the whole layer in ``dtype``."""
    x, weight, bias, grad = (tensor.to(dtype).requires_grad_() for tensor in full_operands(case))
    y = F.linear(x, weight, bias if case.bias == "added" else None)
    y.backward(grad.detach())
    return {"y": y.detach(), "dx": x.grad, "dw": weight.grad, "db": bias.grad}


def shard_results(case: Case, results: Tensors, *, rank: int, world_size: int) -> Tensors:
    """This rank's parts of the whole results."""

    def part(name: str, dim: int) -> None:
        tensor = results[name]
        parts[name] = None if tensor is None else tensor.chunk(world_size, dim=dim)[rank]

    parts = dict(results)
    if case.kind == "column":
        part("dw", 0)
        part("db", 0)
        if not case.whole:
            part("y", -1)
        if case.sequence_parallel:
            part("dx", 0)
    else:
        part("dw", 1)
        if not case.whole:
            part("dx", -1)
        if case.sequence_parallel:
            part("y", 0)
    if case.is_frozen:
        parts["dw"] = None
    return parts


def fed(case: Case, tensor: torch.Tensor, *, dims: list[int], rank: int, world_size: int) -> torch.Tensor:
    for dim in dims:
        tensor = tensor.chunk(world_size, dim=dim)[rank]
    return MEMORY[case.memory](tensor)


def expected_counts(case: Case, *, world_size: int) -> tuple[dict[str, int], dict[str, int]]:
    """The collectives of both passes."""
    forward, backward = dict.fromkeys(("all_reduce", "all_gather", "reduce_scatter"), 0), {}
    backward = dict(forward)
    if world_size > 1 and case.kind == "column":
        forward["all_gather"] = case.sequence_parallel + case.whole
        backward["reduce_scatter" if case.sequence_parallel else "all_reduce"] = 1
        backward["all_gather"] = int(case.sequence_parallel and not case.is_frozen)
    elif world_size > 1:
        forward["reduce_scatter" if case.sequence_parallel else "all_reduce"] = 1
        backward["all_gather"] = int(case.sequence_parallel or case.whole)
    return (
        {name: count for name, count in forward.items() if count},
        {name: count for name, count in backward.items() if count},
    )


def check(case: Case, *, rank: int, world_size: int) -> Tensors:
    """Run both passes, assert what they send and run, and return y, dx, dw, db of this rank."""
    layer = layer_of(case)
    x_full, _, bias, grad_full = full_operands(case)
    is_column = case.kind == "column"
    if layer.bias is not None:
        with torch.no_grad():
            layer.bias.copy_(bias.chunk(world_size)[rank] if is_column else bias)
    x_dims, y_dims = ([], [-1]) if is_column else ([-1], [])
    if case.whole:
        x_dims, y_dims = [], []
    if case.sequence_parallel:
        (x_dims if is_column else y_dims).insert(0, 0)
    x = fed(case, x_full, dims=x_dims, rank=rank, world_size=world_size).requires_grad_()
    grad = fed(case, grad_full, dims=y_dims, rank=rank, world_size=world_size)
    untouched = Untouched(x, grad, *layer.parameters())
    with Recorder() as forward:
        y, returned = layer(x)
    with Recorder() as backward:
        y.backward(grad)
    untouched.check()
    assert returned is (layer.bias if case.bias == "returned" else None)
    sent = (dict(forward.collectives()), dict(backward.collectives()))
    assert sent == expected_counts(case, world_size=world_size)
    assert forward.count("aten.bmm") + backward.count("aten.bmm") == 0
    assert forward.count("aten.mm") + forward.count("aten.addmm") == 1
    assert backward.count("aten.mm") == (1 if case.is_frozen else 2)
    sum_partial_grads(layer.parameters(), group=get_tensor_model_parallel_group())
    assert layer.weight is not None
    db = None if layer.bias is None else layer.bias.grad
    results: Tensors = {"y": y.detach(), "dx": x.grad, "dw": layer.weight.grad, "db": db}
    assert_equal_on_all_ranks({name: results[name] for name in replicated(case)})
    return results


def replicated(case: Case) -> list[str]:
    """The results that every rank holds in full."""
    if case.kind == "column":
        held = {"y": case.whole, "dx": not case.sequence_parallel}
    else:
        held = {"y": not case.sequence_parallel, "dx": case.whole, "db": True}
    return [name for name, is_full in held.items() if is_full]


def parity_body(rank: int, world_size: int, chosen: list[Case]) -> int:
    initialize_model_parallel(world_size)
    for case in chosen:
        if world_size == 1 and case.sequence_parallel and case.kind == "column":
            with pytest.warns(UserWarning, match="sequence_parallel is on with one tensor-parallel rank; it is turned"):
                results = check(case, rank=rank, world_size=world_size)
        else:
            results = check(case, rank=rank, world_size=world_size)
        reference = shard_results(case, whole_results(case, torch.float64), rank=rank, world_size=world_size)
        try:
            if case.dtype == torch.float32:
                assert_close_to(results, reference, tolerance=1e-6)
            else:
                plain = shard_results(case, whole_results(case, case.dtype), rank=rank, world_size=world_size)
                assert_no_worse_than(results, plain, reference)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error
    return len(chosen)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_mode_against_the_whole_layer(world_size: int) -> None:
    chosen = list(cases()) if world_size == 2 else list(cases(memory="leading dims swapped"))
    assert run_ranks(world_size, parity_body, chosen) == [len(chosen)] * world_size


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_is_no_worse_than_plain_torch(dtype: torch.dtype) -> None:
    run_ranks(2, parity_body, list(cases(memory="dense", dtype=dtype)))


def test_rank_4_and_rank_2_inputs() -> None:
    """[s, b, n, h] in any memory, and [s, h]."""
    chosen = [case for memory in MEMORY for case in cases(memory=memory, bias="added", shape=(4, 2, 3))]
    chosen += list(cases(memory="dense", bias="added", shape=(4,)))
    run_ranks(2, parity_body, chosen)
