"""Adapters over tensor-parallel ranks against one rank: values, gradients, collectives (cases 17 and 19)."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megatron_frozen.comm import WORLD, gather_objects
from megatron_frozen.comm.groups import group_size
from megatron_frozen.diagnostics import Recorder
from megatron_frozen.lora import LoraConfig, adapters_disabled, apply_lora, lora_parameters, named_lora_layers
from megatron_frozen.params import shard_of, sum_partial_grads
from megatron_frozen.testing import assert_close_to, run_ranks
from tests.unit.lora_toys import Mlp, Stack, column, full_gradient, row, seeded, start_ranks, with_adapter

S, BATCH, H, OUT, R = 4, 1, 4, 4, 2
W, A, B = seeded(OUT, H, seed=1), seeded(R, H, seed=2), seeded(OUT, R, seed=3)
X, DY = seeded(S, BATCH, H, seed=4), seeded(S, BATCH, OUT, seed=5)


class Base(NamedTuple):
    """A base layer's mode, and along which dim its input and output are cut: None is whole, "sum" a partial sum."""

    make: Any
    input_cut: Any
    output_cut: Any
    input_grad_cut: Any
    sequence_parallel: bool = False
    options: tuple[tuple[str, Any], ...] = ()


BASES = {
    "column": Base(column, None, 2, None),
    "column, SP": Base(column, 0, 2, 0, sequence_parallel=True),
    "column, gathered": Base(column, None, None, None, options=(("gather_output", True),)),
    "column, SP, gathered": Base(column, 0, None, 0, sequence_parallel=True, options=(("gather_output", True),)),
    "column, no reduction": Base(column, None, 2, "sum", options=(("disable_grad_reduce", True),)),
    "column, expert": Base(column, None, 2, "sum", options=(("is_expert", True),)),
    "row": Base(row, 2, None, 2),
    "row, SP": Base(row, 2, 0, 2, sequence_parallel=True),
    "row, whole input": Base(row, None, None, None, options=(("input_is_parallel", False),)),
    "row, no reduction": Base(row, 2, "sum", 2, options=(("is_expert", True), ("skip_bias_add", True))),
}


def _cut(full: Tensor, cut: Any, *, group: Any) -> Tensor:
    return full if cut in (None, "sum") else shard_of(full, partition_dim=cut, group=group)


def _joined(parts: list[Tensor], cut: Any) -> Tensor:
    if cut is None:
        assert all(torch.equal(part, parts[0]) for part in parts)
        return parts[0]
    return torch.stack(parts).sum(0) if cut == "sum" else torch.cat(parts, dim=cut)


def _adapted_base(rank: int, world_size: int, name: str) -> dict[str, Any]:
    del rank
    group, base = start_ranks(world_size), BASES[name]
    layer = with_adapter(base.make(W, sequence_parallel=base.sequence_parallel, **dict(base.options)), A, B)
    input_ = _cut(X, base.input_cut, group=group).clone().requires_grad_()
    output, _ = layer(input_)
    with torch.no_grad():
        assert output.shape == layer.base_layer(input_)[0].shape
    output.backward(_cut(DY, base.output_cut, group=group))
    parameters = [layer.lora_A["default"], layer.lora_B["default"]]
    sum_partial_grads(parameters, group=group)
    assert input_.grad is not None
    return {
        "y": output.detach(),
        "dx": input_.grad,
        "dA": full_gradient(parameters[0], group=group),
        "dB": full_gradient(parameters[1], group=group),
    }


def _reference() -> dict[str, Tensor | None]:
    x, a, b = (tensor.double().requires_grad_() for tensor in (X, A, B))
    y = x @ (W.double() + 2 * b @ a).t()
    y.backward(DY.double())
    return {"y": y.detach(), "dx": x.grad, "dA": a.grad, "dB": b.grad}


@pytest.mark.parametrize("name", BASES)
@pytest.mark.filterwarnings("ignore:sequence_parallel is on with one")
def test_every_mode_of_a_base_gives_the_values_and_gradients_of_one_rank(name: str) -> None:
    ranks, base = run_ranks(2, _adapted_base, name), BASES[name]
    for key in ("dA", "dB"):
        assert torch.equal(ranks[0][key], ranks[1][key]), f"{key} differs between ranks"
    actual = {
        "y": _joined([result["y"] for result in ranks], base.output_cut),
        "dx": _joined([result["dx"] for result in ranks], base.input_grad_cut),
        "dA": ranks[0]["dA"],
        "dB": ranks[0]["dB"],
    }
    assert_close_to(actual, _reference(), tolerance=1e-6)
    (alone,) = run_ranks(1, _adapted_base, name)
    assert_close_to(actual, alone, tolerance=1e-6)


def _partial_sum_error(rank: int, world_size: int) -> float:
    """What case 17 is about: how far rank 0's own gradient of A is from the true one without the sum over ranks."""
    del rank
    start_ranks(world_size)
    layer = with_adapter(column(W), A, B)
    layer(X)[0].backward(shard_of(DY, partition_dim=2, group=layer.tp_group))
    expected = _reference()["dA"]
    assert expected is not None
    return (layer.lora_A["default"].grad - expected).abs().max().item()


def test_without_the_sum_over_ranks_the_replicated_factor_would_be_wrong() -> None:
    assert min(run_ranks(2, _partial_sum_error)) > 0.1


def _one_step(rank: int, world_size: int, tensor_parallel_size: int, mode: str) -> dict[str, Tensor]:
    """One SGD step from apply_lora's start; the losses differ between data-parallel ranks."""
    group = start_ranks(tensor_parallel_size)
    torch.manual_seed(10 + rank)
    model = Stack(sequence_parallel=mode == "SP")
    apply_lora(model, LoraConfig(r=R, alpha=4, target_modules=["up_proj", "down_proj"]), seed=rank)
    cut = 0 if mode == "SP" else None
    output = model(_cut(seeded(S, 2, 8, seed=7), cut, group=group))
    output.backward(_cut(seeded(S, 2, 8, seed=8), cut, group=group))
    parameters = lora_parameters(model)
    sum_partial_grads(parameters, group=group)
    torch.optim.SGD(parameters, lr=0.1).step()
    factors = {}
    for name, layer in named_lora_layers(model):
        factors[f"{name}.A"], factors[f"{name}.B"] = layer.full_factors("default")
    return factors


@pytest.mark.parametrize("mode", ["plain", "SP"])
def test_after_one_step_the_factors_are_those_of_one_rank_and_every_b_has_moved(mode: str) -> None:
    first, second = run_ranks(2, _one_step, 2, mode)
    (alone,) = run_ranks(1, _one_step, 1, "plain")
    for name, factor in first.items():
        assert torch.equal(factor, second[name]), f"{name} differs between ranks"
        if name.endswith(".B"):
            assert factor.abs().sum() > 0, f"{name} is still zero"
    assert_close_to(first, alone, tolerance=5e-6)


def _collectives(rank: int, world_size: int, mode: str) -> dict[str, Counter[str]]:
    """Collectives of forward and backward: bare, with adapters, with adapters off; then those of the step's own sum."""
    del rank
    group = start_ranks(world_size)
    model = Mlp(sequence_parallel=mode == "SP")
    cut = 0 if mode == "SP" else None
    hidden, grad = (_cut(seeded(S, 2, 8, seed=seed), cut, group=group) for seed in (7, 8))

    def count() -> Counter[str]:
        with Recorder() as seen:
            model(hidden.clone().requires_grad_()).backward(grad)
        return seen.collectives()

    counts = {"bare": count()}
    apply_lora(model, LoraConfig(r=R, dropout=0.1, target_modules=["up_proj", "down_proj"]))
    counts["adapted"] = count()
    with adapters_disabled(model):
        counts["switched off"] = count()
    with Recorder() as seen:
        sum_partial_grads(lora_parameters(model), group=group)
    counts["step"] = seen.collectives()
    return counts


@pytest.mark.parametrize("mode", ["plain", "SP"])
def test_adapters_add_no_activation_collective(mode: str) -> None:
    for counts in run_ranks(2, _collectives, mode):
        expected = {"all_gather": 2, "reduce_scatter": 2} if mode == "SP" else {"all_reduce": 2}
        assert counts["bare"] == counts["adapted"] == counts["switched off"] == expected
        assert counts["step"] == {"all_reduce": 1}


def _dropped(rank: int, world_size: int, kind: str, mode: str) -> Tensor:
    """The output of a layer with dropout 0.5 where the ranks are in one random state."""
    del rank
    group = start_ranks(world_size)
    is_column = kind == "column"
    make = column if is_column else row
    layer = with_adapter(make(torch.zeros(OUT, H), sequence_parallel=mode == "SP"), A, B, dropout=0.5)
    cut = (0 if mode == "SP" else None) if is_column else 2
    torch.manual_seed(5)
    output, _ = layer(_cut(seeded(S, 3, H, seed=4), cut, group=group))
    parts = gather_objects(output.detach(), group=WORLD)
    assert group_size(group) == world_size
    state = torch.get_rng_state()
    assert all(torch.equal(state, other) for other in gather_objects(state, group=WORLD))
    return torch.cat(parts, dim=2) if is_column else torch.cat(parts, dim=0) if mode == "SP" else parts[0]


@pytest.mark.parametrize("kind", ["column", "row"])
@pytest.mark.parametrize("mode", ["plain", "SP"])
def test_the_dropout_mask_is_that_of_one_rank(kind: str, mode: str) -> None:
    first, _ = run_ranks(2, _dropped, kind, mode)
    (alone,) = run_ranks(1, _dropped, kind, "plain")
    torch.testing.assert_close(first, alone, atol=1e-6, rtol=1e-6)
