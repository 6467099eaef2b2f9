"""What the layers run in each branch: one 2-D GEMM per product, no copy of dY, the fp32 options bit by bit (case 3)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch

from megatron_frozen import ColumnParallelLinear, ModelParallelConfig, RowParallelLinear, initialize_model_parallel
from megatron_frozen.comm import get_tensor_model_parallel_group, group_size
from megatron_frozen.diagnostics import Recorder
from megatron_frozen.testing import relative_error, run_ranks
from tests.unit.core_ranks import MEMORY, seeded

S, B, IN, OUT = 6, 3, 8, 10
SWITCHES = {
    "dgrad_in_fp32": "MEGATRON_TRUE_ON_POLICY_LINEAR_DGRAD_FP32",
    "allreduce_dgrad_in_fp32": "MEGATRON_TRUE_ON_POLICY_DGRAD_ALLREDUCE_FP32",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Branch:
    """One cell of case 3's matrix."""

    kind: str  # column, row, head
    fp32_options: tuple[str, ...]
    by_environment: bool
    sequence_parallel: bool
    reduces: bool
    is_frozen: bool


def branches() -> Iterator[Branch]:
    names, either = tuple(SWITCHES), (False, True)
    for kind, options, by_environment in product(("column", "row", "head"), ((), names[:1], names[1:], names), either):
        for sequence_parallel, reduces, is_frozen in product(either, either, either):
            if (kind == "row" and not reduces) or (by_environment and not options):
                continue  # a row layer has no dX to reduce; no option, no switch
            yield Branch(
                kind=kind,
                fp32_options=options,
                by_environment=by_environment,
                sequence_parallel=sequence_parallel,
                reduces=reduces,
                is_frozen=is_frozen,
            )


@contextmanager
def switched_on(branch: Branch) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as environment:
        if branch.by_environment:
            for option in branch.fp32_options:
                environment.setenv(SWITCHES[option], "1")
        yield


def layer_of(branch: Branch, *, weight: torch.Tensor) -> Any:
    """Return a layer, and what to call it with beside the input."""
    options = {} if branch.by_environment else dict.fromkeys(branch.fp32_options, True)
    config = ModelParallelConfig(sequence_parallel=branch.sequence_parallel, params_dtype=weight.dtype, **options)
    common: dict[str, Any] = {"config": config, "init_method": torch.nn.init.zeros_, "bias": False}
    world_size = group_size(get_tensor_model_parallel_group())
    if branch.kind == "row":
        layer = RowParallelLinear(world_size * IN, OUT, input_is_parallel=True, skip_bias_add=True, **common)
    else:
        layer = ColumnParallelLinear(
            IN,
            world_size * OUT,
            disable_grad_reduce=not branch.reduces,
            skip_weight_param_allocation=branch.kind == "head",
            **common,
        )
    if branch.kind == "head":
        given = weight.clone().requires_grad_(not branch.is_frozen)
        return lambda x: layer(x, weight=given)[0]
    with torch.no_grad():
        assert layer.weight is not None
        layer.weight.copy_(weight).requires_grad_(not branch.is_frozen)
    return lambda x: layer(x)[0]


def expected_input_gradient(branch: Branch, grads: list[torch.Tensor], weights: list[torch.Tensor]) -> torch.Tensor:
    """The sum over ranks of dY W, in the precision that the options ask for, of rank 0."""
    wide = torch.float32 if "dgrad_in_fp32" in branch.fp32_options else grads[0].dtype
    parts = [
        (grad.transpose(0, 1).reshape(-1, OUT).to(wide) @ weight.to(wide)).view(B, -1, IN).transpose(0, 1)
        for grad, weight in zip(grads, weights, strict=True)
    ]
    if branch.kind == "row" or (not branch.reduces and not branch.sequence_parallel):
        return parts[0].to(grads[0].dtype)
    # Of two ranks: a sum in bf16 and one in fp32 of the same bf16 parts round alike.
    return (parts[0].float() + parts[1].float()).to(grads[0].dtype)


def branches_body(rank: int, world_size: int) -> int:
    initialize_model_parallel(world_size)
    checked = 0
    for branch in branches():
        dtype = torch.bfloat16
        weights = [seeded(OUT, IN, seed=10 + number, dtype=dtype) for number in range(world_size)]
        scattered = branch.sequence_parallel and branch.kind == "row"
        # Under sequence parallelism the row layer's dY is joined from shards, the same on all ranks.
        whole = seeded(S, B, OUT, seed=20, dtype=dtype)
        grads = [whole if scattered else seeded(S, B, OUT, seed=20 + number, dtype=dtype) for number in range(2)]
        grad = MEMORY["leading dims swapped"](grads[rank].chunk(world_size)[rank] if scattered else grads[rank])
        gathers = branch.sequence_parallel and branch.kind != "row"
        x = seeded(S // world_size if gathers else S, B, IN, seed=rank, dtype=dtype).requires_grad_()
        with switched_on(branch):
            y = layer_of(branch, weight=weights[rank])(x)
        with Recorder() as seen:
            y.backward(grad)
        assert seen.count("aten.bmm") == 0, branch
        assert seen.count("aten.mm") == (1 if branch.is_frozen else 2), branch
        own_first = ([grads[rank], grads[1 - rank]], [weights[rank], weights[1 - rank]])
        expected = expected_input_gradient(branch, *own_first)
        assert x.grad is not None
        expected = expected.chunk(world_size)[rank] if gathers else expected
        assert torch.equal(x.grad, expected), branch
        checked += 1
    return checked


def test_case_3_no_branch_batches_or_rounds_otherwise() -> None:
    assert run_ranks(2, branches_body) == [5 * 7 * 4] * 2


def entered_sum_body(rank: int, world_size: int) -> None:
    """The entry that adapters share rounds the sum of three ranks' dX once, if a field or the switch asks for it."""
    initialize_model_parallel(world_size)
    dtype = torch.bfloat16
    gradients = [seeded(S, B, 100, seed=number, dtype=dtype) for number in range(world_size)]
    rounded_once = torch.stack(gradients).double().sum(0).to(dtype)
    for sequence_parallel in (False, True):
        for by_environment, options in ((False, {}), (False, {"allreduce_dgrad_in_fp32": True}), (True, {})):
            config = ModelParallelConfig(sequence_parallel=sequence_parallel, params_dtype=dtype, **options)
            layer = ColumnParallelLinear(100, world_size, config=config, init_method=torch.nn.init.zeros_)
            x = torch.zeros(S // world_size if sequence_parallel else S, B, 100, dtype=dtype, requires_grad=True)
            with pytest.MonkeyPatch.context() as environment:
                if by_environment:
                    environment.setenv(SWITCHES["allreduce_dgrad_in_fp32"], "1")
                entered = layer.enter_parallel(x)
            (dx,) = torch.autograd.grad(entered, x, gradients[rank])
            expected = rounded_once.chunk(world_size)[rank] if sequence_parallel else rounded_once
            assert torch.equal(dx, expected) is (by_environment or bool(options))


def test_shared_entry_heeds_the_fp32_options() -> None:
    run_ranks(3, entered_sum_body)


def test_fp32_dgrad_does_round_less() -> None:
    """The control of the matrix above: the options change the bits they are asked to change."""
    branch = Branch(
        kind="column",
        fp32_options=(),
        by_environment=False,
        sequence_parallel=False,
        reduces=True,
        is_frozen=True,
    )
    grads = [seeded(S, B, OUT, seed=seed, dtype=torch.bfloat16) for seed in (20, 21)]
    weights = [seeded(OUT, IN, seed=seed, dtype=torch.bfloat16) for seed in (10, 11)]
    plain = expected_input_gradient(branch, grads, weights)
    in_fp32 = Branch(**{**{name: getattr(branch, name) for name in branch.__slots__}, "fp32_options": tuple(SWITCHES)})
    exact = sum(g.double() @ w.double() for g, w in zip(grads, weights, strict=True))
    assert isinstance(exact, torch.Tensor)
    assert relative_error(expected_input_gradient(in_fp32, grads, weights), exact) < 0.8 * relative_error(plain, exact)


def copies_body(rank: int, world_size: int) -> None:
    """A frozen layer copies neither X nor dY in any layout that collapses, at rank 3 and 4."""
    initialize_model_parallel(world_size)
    config = ModelParallelConfig()
    init: dict[str, Any] = {"config": config, "init_method": torch.nn.init.normal_}
    column = ColumnParallelLinear(IN, world_size * OUT, **init)
    row = RowParallelLinear(world_size * IN, OUT, bias=True, input_is_parallel=True, skip_bias_add=False, **init)
    for layer in (column, row):
        assert layer.weight is not None
        layer.weight.requires_grad = False
        for shape in ((S, B), (S, B, 2)):
            for memory in ("dense", "leading dims swapped"):
                x = MEMORY[memory](seeded(*shape, IN, seed=rank, dtype=torch.float32)).requires_grad_()
                grad = MEMORY[memory](seeded(*shape, OUT, seed=rank, dtype=torch.float32))
                y, _ = layer.leave_parallel(layer.multiply(layer.enter_parallel(x)))
                with Recorder() as multiplying:
                    layer.multiply(x)
                with Recorder() as backward:
                    y.backward(grad)
                assert multiplying.copied_bytes() == 0, (layer, shape, memory)
                y, _ = layer(x)
                with Recorder() as whole:
                    y.backward(grad)
                assert whole.copied_bytes() == 0, (layer, shape, memory)
                # An adapter's shared entry sums a dX that is not its own, so it is copied, once.
                assert backward.copied_bytes() <= x.numel() * 4, (layer, shape, memory)


def test_frozen_layers_copy_no_activation() -> None:
    for world_size in (1, 2):
        run_ranks(world_size, copies_body)


def saved_shapes(layer: torch.nn.Module, x: torch.Tensor) -> list[tuple[int, ...]]:
    """Run forward and backward; return the shapes that the forward kept."""
    shapes = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = layer(x)[0]
    y.sum().backward()
    return shapes


def freezing_body(rank: int, world_size: int) -> None:
    """Each call looks at what is frozen then; a frozen call keeps its weight alone, a trainable one X as well."""
    del rank
    initialize_model_parallel(world_size)
    for sequence_parallel in (False, True):
        config = ModelParallelConfig(sequence_parallel=sequence_parallel)
        init: dict[str, Any] = {"config": config, "init_method": torch.nn.init.normal_, "bias": False}
        column = ColumnParallelLinear(IN, world_size * OUT, **init)
        row = RowParallelLinear(world_size * IN, OUT, input_is_parallel=True, skip_bias_add=False, **init)
        for layer in (column, row):
            assert layer.weight is not None
            x = torch.randn(S, B, IN, requires_grad=True)
            for trains in (True, False, True, False):
                layer.weight.requires_grad, layer.weight.grad = trains, None
                with Recorder() as seen:
                    shapes = saved_shapes(layer, x)
                assert (OUT, IN) in shapes
                assert (tuple(x.shape) in shapes) is trains, (layer, shapes)
                assert seen.count("aten.mm") == 2 + trains
                assert (layer.weight.grad is not None) is trains


def test_freezing_between_calls_takes_the_other_path() -> None:
    run_ranks(2, freezing_body)


@pytest.mark.parametrize("is_frozen", [True, False], ids=["frozen", "trainable"])
def test_one_graph_serves_sizes_and_layouts_that_change(*, is_frozen: bool) -> None:
    config = ModelParallelConfig(params_dtype=torch.float64)
    layer = ColumnParallelLinear(IN, OUT, config=config, init_method=torch.nn.init.normal_)
    assert layer.weight is not None
    layer.weight.requires_grad_(not is_frozen)
    torch.compiler.reset()  # what other tests compiled counts towards one limit
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    inputs = [
        seeded(S, B, IN, seed=1),
        seeded(S + 1, B + 2, IN, seed=2),
        seeded(B, S, IN, seed=3).transpose(0, 1),
        seeded(1, B, IN, seed=4).expand(S, B, IN),
    ]
    for input_ in inputs:
        leaves = [input_.requires_grad_(), *(p for p in layer.parameters() if p.requires_grad)]
        output = compiled(input_)[0].transpose(0, 1)
        expected = torch.nn.functional.linear(input_, layer.weight, layer.bias).transpose(0, 1)
        torch.testing.assert_close(output, expected)
        grad = seeded(*output.shape, seed=5)
        grads, expected_grads = (torch.autograd.grad(out, leaves, grad) for out in (output, expected))
        torch.testing.assert_close(grads, expected_grads)


def test_input_that_needs_no_gradient_costs_none() -> None:
    layer = ColumnParallelLinear(IN, OUT, config=ModelParallelConfig(), init_method=torch.nn.init.normal_)
    assert layer.weight is not None
    layer.weight.requires_grad = False
    y, _ = layer(torch.randn(S, B, IN))
    with Recorder() as seen:
        y.sum().backward()
    assert seen.count("aten.mm") == 0
    assert layer.bias is not None
    assert layer.bias.grad is not None
    assert torch.equal(layer.bias.grad, torch.full((OUT,), float(S * B)))
