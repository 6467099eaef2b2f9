"""Linear layers at two ranks where a mode has a trap: biases of frozen weights, empty ranks, experts, shared entries.

Cases 5, 6, 16 and the base layers' half of 19."""

from __future__ import annotations

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
from megatron_frozen.params import is_partial_grad
from megatron_frozen.testing import assert_close_to, run_ranks
from tests.unit.core_ranks import seeded

S, B, IN, OUT = 6, 3, 14, 10
KINDS = ("column", "row")
Layer = ColumnParallelLinear | RowParallelLinear


def layer_of(
    kind: str,
    *,
    is_frozen: bool,
    config: ModelParallelConfig | None = None,
    size: tuple[int, int] = (IN, OUT),
    **options: Any,
) -> Layer:
    """Return a layer of seeded weights with a bias of zeros."""
    torch.manual_seed(0)
    common: dict[str, Any] = {"config": config or ModelParallelConfig(), "init_method": torch.nn.init.normal_}
    if kind == "column":
        layer = ColumnParallelLinear(*size, **common, **options)
    else:
        layer = RowParallelLinear(
            *size, **common, **{"bias": True, "input_is_parallel": True, "skip_bias_add": False, **options}
        )
    assert layer.weight is not None
    layer.weight.requires_grad = not is_frozen
    return layer


def whole_weight(size: tuple[int, int] = (IN, OUT)) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.nn.init.normal_(torch.empty(size[1], size[0]))


def parts_of(layer: Layer) -> tuple[torch.nn.Parameter, torch.nn.Parameter]:
    assert layer.weight is not None
    assert layer.bias is not None
    return layer.weight, layer.bias


def bias_body(rank: int, world_size: int) -> None:
    """Case 6: db is 18 (6 x 3 tokens), column (sharded) and row (replicated), SP on and off; case 5: y.sum()."""
    initialize_model_parallel(world_size)
    group = get_tensor_model_parallel_group()
    for sequence_parallel in (False, True):
        for kind in KINDS:
            for bias_trains in (True, False):
                config = ModelParallelConfig(sequence_parallel=sequence_parallel)
                layer = layer_of(kind, is_frozen=True, config=config)
                weight, bias = parts_of(layer)
                bias.requires_grad = bias_trains
                shard = S // world_size if sequence_parallel and kind == "column" else S
                features = IN if kind == "column" else IN // world_size
                x = seeded(shard, B, features, seed=rank, dtype=torch.float32).requires_grad_()
                y, _ = layer(x)
                y.sum().backward()
                assert is_partial_grad(bias) is (sequence_parallel and kind == "row")
                sum_partial_grads(layer.parameters(), group=group)
                assert weight.grad is None
                assert (bias.grad is not None) is bias_trains
                if bias.grad is not None:
                    assert torch.equal(bias.grad, torch.full_like(bias, float(S * B))), (kind, sequence_parallel)
                columns = whole_weight().sum(0) if kind == "column" else weight.detach().sum(0)
                assert x.grad is not None
                assert_close_to({"dx": x.grad}, {"dx": columns.expand_as(x)}, tolerance=1e-6)


def test_trainable_bias_under_a_frozen_weight() -> None:
    run_ranks(2, bias_body)


def summed_outputs_body(rank: int, world_size: int) -> None:
    """Case 5: outputs of two layers joined before the loss, so that each dY is a slice of a broadcast or larger one."""
    initialize_model_parallel(world_size)
    for is_frozen in (True, False):
        for kind in KINDS:
            x = seeded(S, B, IN if kind == "column" else IN // world_size, seed=rank).float().requires_grad_()
            layers = [layer_of(kind, is_frozen=is_frozen) for _ in range(2)]
            joined = torch.cat([layer(x)[0] for layer in layers], dim=-1)
            scale = seeded(S, B, joined.shape[-1], seed=5, dtype=torch.float32)
            (joined * scale).sum().backward()
            total = sum(scale.chunk(2, dim=-1))
            assert isinstance(total, torch.Tensor)
            weight, bias = parts_of(layers[0])
            if kind == "column":
                # Each rank sums over its own outputs, and the parts meet in the all-reduce.
                dx = total @ whole_weight().view(world_size, OUT // world_size, IN).sum(0)
            else:
                dx = total @ weight.detach()
            assert x.grad is not None
            assert_close_to({"dx": x.grad}, {"dx": dx}, tolerance=1e-5)
            assert bias.grad is not None
            assert_close_to({"db": bias.grad}, {"db": scale.chunk(2, dim=-1)[0].sum((0, 1))}, tolerance=1e-5)
            assert (weight.grad is None) is is_frozen


def test_outputs_joined_before_the_loss() -> None:
    run_ranks(2, summed_outputs_body)


def collectives_of(layer: Layer, x: torch.Tensor) -> list[dict[str, int]]:
    with Recorder() as forward:
        y, _ = layer(x)
    with Recorder() as backward:
        y.sum().backward()
    return [dict(forward.collectives()), dict(backward.collectives())]


def empty_body(rank: int, world_size: int) -> None:
    """Case 16: ranks without tokens send as often as ranks with some, and every gradient is 0, not unset."""
    del rank
    initialize_model_parallel(world_size)
    for sequence_parallel in (False, True):
        for is_frozen in (True, False):
            for fused in (False, True):
                for kind in KINDS:
                    config = ModelParallelConfig(
                        sequence_parallel=sequence_parallel, gradient_accumulation_fusion=fused
                    )
                    layer = layer_of(kind, is_frozen=is_frozen, config=config)
                    weight, bias = parts_of(layer)
                    weight.main_grad = torch.full_like(weight, 3.0)  # pyright: ignore[reportAttributeAccessIssue]
                    features = IN if kind == "column" else IN // world_size
                    x = torch.zeros(0, 1, features, requires_grad=True)
                    sent = collectives_of(layer, x)
                    assert x.grad is not None
                    assert x.grad.shape == (0, 1, features)
                    assert bias.grad is not None
                    assert not bias.grad.any()
                    assert torch.equal(weight.main_grad, torch.full_like(weight, 3.0))  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
                    if not is_frozen and not fused:
                        assert weight.grad is not None
                        assert not weight.grad.any()
                    assert sent == collectives_of(layer, torch.zeros(2, 1, features, requires_grad=True))


def test_ranks_without_tokens() -> None:
    run_ranks(2, empty_body)


def partial_body(rank: int, world_size: int) -> None:
    """Case 19: with its reduction off a layer gives this rank's part, sends nothing, and the parts sum to the whole."""
    initialize_model_parallel(world_size)
    group = get_tensor_model_parallel_group()
    weight = whole_weight()
    x = seeded(S, B, IN, seed=1, dtype=torch.float32)
    grad = seeded(S, B, OUT, seed=2, dtype=torch.float32)
    for sequence_parallel in (False, True):
        config = ModelParallelConfig(sequence_parallel=sequence_parallel)
        by_argument = [
            layer_of(kind, is_frozen=True, config=config, is_expert=True, skip_bias_add=True) for kind in KINDS
        ]
        by_attribute = [layer_of(kind, is_frozen=True, config=config, skip_bias_add=True) for kind in KINDS]
        for layer in by_attribute:  # Megatron's shared experts set it on a layer that is built
            layer.explicit_expert_comm = True
        for column, row in (by_argument, by_attribute):
            assert column.explicit_expert_comm
            leaf = x.clone().requires_grad_()
            with Recorder() as seen:
                y, bias = column(leaf)
                y.backward(grad.chunk(world_size, dim=-1)[rank])
            assert not seen.collectives()
            assert bias is column.bias
            part = weight.chunk(world_size)[rank]
            assert_close_to({"y": y.detach(), "dx": leaf.grad}, {
                "y": F.linear(x, part), "dx": grad.chunk(world_size, dim=-1)[rank] @ part,
            }, tolerance=1e-6)  # fmt: skip
            leaf = x.chunk(world_size, dim=-1)[rank].clone().requires_grad_()
            with Recorder() as seen:
                y, bias = row(leaf)
                y.backward(grad)
            assert not seen.collectives()
            assert bias is row.bias
            whole = y.detach().clone()
            torch.distributed.all_reduce(whole, group=group)
            assert_close_to({"y": whole, "dx": leaf.grad}, {
                "y": F.linear(x, weight), "dx": (grad @ weight).chunk(world_size, dim=-1)[rank],
            }, tolerance=1e-6)  # fmt: skip
    # A column layer that leaves its reduction to the caller gives its part of dX.
    for is_frozen in (True, False):
        layer = layer_of("column", is_frozen=is_frozen, disable_grad_reduce=True)
        leaf = x.clone().requires_grad_()
        y, _ = layer(leaf)
        with Recorder() as seen:
            y.backward(grad.chunk(world_size, dim=-1)[rank])
        assert not seen.collectives()
        dx = grad.chunk(world_size, dim=-1)[rank] @ weight.chunk(world_size)[rank]
        assert_close_to({"dx": leaf.grad}, {"dx": dx}, tolerance=1e-6)


def test_layers_with_their_reduction_off() -> None:
    run_ranks(2, partial_body)


def passes(layer: Layer, x: torch.Tensor, *, in_steps: bool, **options: Any) -> tuple[dict[str, Any], Any]:
    """Run both passes, whole or in the three steps that an adapter uses; return results and collectives."""
    leaf = x.clone().requires_grad_()
    layer.zero_grad()
    with Recorder() as seen:
        if in_steps:
            y, bias = layer.leave_parallel(layer.multiply(layer.enter_parallel(leaf)), **options)
        else:
            y, bias = layer(leaf, **options)
        (y * seeded(*y.shape, seed=4, dtype=torch.float32)).sum().backward()
    weight, own_bias = parts_of(layer)
    assert (bias is own_bias) is layer.skip_bias_add
    return {"y": y.detach(), "dx": leaf.grad, "dw": weight.grad, "db": own_bias.grad}, seen.collectives()


def steps_body(rank: int, world_size: int) -> None:
    initialize_model_parallel(world_size)
    modes: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("column", {}, {}),
        ("column", {"gather_output": True}, {}),
        ("column", {"gather_output": True}, {"runtime_gather_output": False}),
        ("column", {}, {"runtime_gather_output": True}),
        ("column", {"skip_bias_add": True}, {}),
        ("column", {"disable_grad_reduce": True}, {}),
        ("row", {}, {}),
        ("row", {"skip_bias_add": True}, {}),
        ("row", {"input_is_parallel": False}, {}),
        ("column", {"is_expert": True}, {}),
        ("row", {"is_expert": True, "skip_bias_add": True}, {}),
    ]
    for kind, built, called in modes:
        for sequence_parallel in (False, True):
            if sequence_parallel and not built.get("input_is_parallel", True):
                continue
            config = ModelParallelConfig(sequence_parallel=sequence_parallel)
            takes_whole = kind == "column" or not built.get("input_is_parallel", True)
            x = seeded(S, B, IN if takes_whole else IN // world_size, seed=rank, dtype=torch.float32)
            for is_frozen in (True, False):
                layer = layer_of(kind, is_frozen=is_frozen, config=config, **built)
                with torch.no_grad():
                    parts_of(layer)[1].normal_(generator=torch.Generator().manual_seed(rank))
                whole, sent_whole = passes(layer, x, in_steps=False, **called)
                steps, sent_steps = passes(layer, x, in_steps=True, **called)
                assert_close_to(steps, whole, tolerance=1e-6)
                gathers_again = kind == "column" and layer.sequence_parallel and not layer.explicit_expert_comm
                if gathers_again and not is_frozen:
                    # Whole, a trainable layer saves its shard of X and gathers it again; entered, X is there in full.
                    sent_whole["all_gather"] -= 1
                assert sent_steps == +sent_whole, (kind, built, called, sequence_parallel, is_frozen)


def test_three_steps_are_forward() -> None:
    run_ranks(1, steps_body)
    run_ranks(2, steps_body)


def deferral_body(rank: int, world_size: int) -> None:
    """The head's dY and X are kept for the buffers' owner, up to a limit; those of others and a frozen head are not."""
    initialize_model_parallel(world_size)
    for limit, kept in ((0, 3), (2, 2)):
        config = ModelParallelConfig(defer_embedding_wgrad_compute=True, wgrad_deferral_limit=limit)
        inputs: list[torch.Tensor] = []
        grads: list[torch.Tensor] = []
        buffers: dict[str, Any] = {"embedding_activation_buffer": inputs, "grad_output_buffer": grads}
        head = layer_of("column", is_frozen=False, config=config, **buffers)
        weight, _ = parts_of(head)
        batches = [seeded(S, B, IN, seed=number, dtype=torch.float32) for number in range(3)]
        scale = seeded(S, B, OUT // world_size, seed=rank, dtype=torch.float32)
        for batch in batches:
            y, _ = head(batch.clone().requires_grad_())
            (y * scale).sum().backward()
        assert (len(inputs), len(grads)) == (kept, kept)
        assert all(torch.equal(left, right) for left, right in zip(inputs, batches[:kept], strict=True))
        expected = sum(scale.view(-1, OUT // world_size).t() @ batch.view(-1, IN) for batch in batches)
        late = sum(g.reshape(-1, OUT // world_size).t() @ x.view(-1, IN) for g, x in zip(grads, inputs, strict=True))
        assert (weight.grad is None) is (kept == 3)
        total = late if weight.grad is None else late + weight.grad
        assert isinstance(total, torch.Tensor)
        assert isinstance(expected, torch.Tensor)
        assert_close_to({"dw": total.detach()}, {"dw": expected}, tolerance=1e-6)
        weight.requires_grad = False
        other = layer_of("column", is_frozen=False, config=config)
        for layer in (head, other):
            leaf = batches[0].clone().requires_grad_()
            layer(leaf)[0].sum().backward()
            assert leaf.grad is not None
        assert (len(inputs), len(grads)) == (kept, kept)
        assert parts_of(other)[0].grad is not None


def test_weight_gradients_put_off_for_the_head() -> None:
    run_ranks(2, deferral_body)


def autocast_body(rank: int, world_size: int) -> None:
    """fp32 layers under autocast: bf16 products and messages forward, gradients in the parameters' dtype."""
    initialize_model_parallel(world_size)
    for sequence_parallel in (False, True):
        for is_frozen in (True, False):
            config = ModelParallelConfig(sequence_parallel=sequence_parallel)
            column = layer_of("column", is_frozen=is_frozen, config=config)
            row = layer_of("row", is_frozen=is_frozen, config=config, size=(OUT, IN))
            x = seeded(S // world_size if sequence_parallel else S, B, IN, seed=rank, dtype=torch.float32)
            x.requires_grad_()
            with torch.autocast("cpu", torch.bfloat16):
                middle, _ = column(x)
                in_steps, _ = column.leave_parallel(column.multiply(column.enter_parallel(x)))
                y, _ = row(middle)
                assert (middle.dtype, in_steps.dtype, y.dtype) == (torch.bfloat16,) * 3
                loss = y.float().sum()
            loss.backward()
            assert x.grad is not None
            assert x.grad.dtype == torch.float32
            grads = [parameter.grad for layer in (column, row) for parameter in layer.parameters()]
            assert {grad.dtype for grad in grads if grad is not None} == {torch.float32}
            assert sum(grad is None for grad in grads) == 2 * is_frozen


def test_autocast() -> None:
    run_ranks(2, autocast_body)


def test_sequence_parallel_on_one_rank_is_off() -> None:
    config = ModelParallelConfig(sequence_parallel=True)
    with pytest.warns(UserWarning, match="sequence_parallel is on with one tensor-parallel rank; it is turned off"):
        column = layer_of("column", is_frozen=True, config=config)
    row = layer_of("row", is_frozen=True, config=config)
    assert not column.sequence_parallel
    assert not row.sequence_parallel
    assert not is_partial_grad(parts_of(row)[1])


def writable_body(rank: int, world_size: int) -> None:
    """What comes after a layer may work in place: an activation, a residual sum, a temperature."""
    initialize_model_parallel(world_size)
    modes: list[tuple[str, dict[str, Any]]] = [("column", {}), ("column", {"gather_output": True}), ("row", {})]
    for sequence_parallel in (False, True):
        config = ModelParallelConfig(sequence_parallel=sequence_parallel)
        for kind, options in modes:
            for is_frozen in (True, False):
                layer = layer_of(kind, is_frozen=is_frozen, config=config, **options)
                x = seeded(B, S, IN if kind == "column" else IN // world_size, seed=rank, dtype=torch.float32)
                leaf = x.transpose(0, 1).requires_grad_()
                results, written = layer(leaf)[0], layer(leaf)[0]
                written.mul_(2)
                assert torch.equal(written, 2 * results)
                (dx,) = torch.autograd.grad(written.sum(), leaf)
                (single,) = torch.autograd.grad(results.sum(), leaf)
                assert_close_to({"dx": dx}, {"dx": 2 * single}, tolerance=1e-6)


def test_outputs_may_be_written_into() -> None:
    run_ranks(2, writable_body)
