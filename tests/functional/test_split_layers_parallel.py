"""Linear and LayerNormLinear, split and whole, at 1 to 4 ranks against the whole layer in fp64: y, dx and each
parameter's gradient apart, with all, some and no weights frozen; replicas are the same to the bit on all ranks.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from megatron_frozen import LayerNormLinear, Linear, initialize_model_parallel, sum_partial_grads
from megatron_frozen.comm import get_tensor_model_parallel_group
from megatron_frozen.testing import assert_close_to, rank_device, run_ranks
from tests.functional.replicas import assert_equal_on_all_ranks
from tests.unit.core_ranks import seeded

S, B, IN, EPS = 12, 2, 24, 1e-5
PARTS = {"a": 12, "b": 24}
OUT = sum(PARTS.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A layer and how it is used."""

    norm: str | None
    mode: Any
    is_split: bool
    sequence_parallel: bool
    frozen: str  # none, some (the first weight), all

    def weight_names(self) -> list[str]:
        return [f"{part}_weight" for part in PARTS] if self.is_split else ["weight"]

    def bias_names(self) -> list[str]:
        return [f"{part}_bias" for part in PARTS] if self.is_split else ["bias"]

    def frozen_names(self) -> list[str]:
        return {"none": [], "some": self.weight_names()[:1], "all": self.weight_names()}[self.frozen]


def cases() -> list[Case]:
    """Every legal mode; a weight that is alone is frozen or not, so "some" needs parts."""
    kinds = [(None, "column"), (None, "row"), (None, None), ("LayerNorm", "column"), ("RMSNorm", None)]
    choices = itertools.product(kinds, (False, True), (False, True), ("none", "some", "all"))
    return [
        Case(norm=norm, mode=mode, is_split=is_split, sequence_parallel=sequence_parallel, frozen=frozen)
        for (norm, mode), is_split, sequence_parallel, frozen in choices
        if is_split or frozen != "some"
    ]


def full_parameters(case: Case) -> dict[str, torch.Tensor]:
    """The whole parameters by name, fp64."""
    sizes = list(PARTS.values()) if case.is_split else [OUT]
    weights = seeded(OUT, IN, seed=1).split(sizes)
    biases = seeded(OUT, seed=2).split(sizes)
    named = dict(zip(case.weight_names(), weights, strict=True)) | dict(zip(case.bias_names(), biases, strict=True))
    if case.norm:
        named["layer_norm_weight"] = 1 + 0.3 * seeded(IN, seed=3)
    if case.norm == "LayerNorm":
        named["layer_norm_bias"] = seeded(IN, seed=4)
    return {name: tensor.clone().requires_grad_() for name, tensor in named.items()}


def whole_results(case: Case) -> dict[str, torch.Tensor | None]:
    """Y, dX and the gradients of the whole layer, fp64, by torch alone."""
    named, x = full_parameters(case), seeded(S, B, IN, seed=5).requires_grad_()
    hidden = x
    if case.norm == "LayerNorm":
        hidden = F.layer_norm(x, (IN,), named["layer_norm_weight"], named["layer_norm_bias"], EPS)
    elif case.norm:
        hidden = F.rms_norm(x, (IN,), named["layer_norm_weight"], EPS)
    weight, bias = (torch.cat([named[name] for name in names]) for names in (case.weight_names(), case.bias_names()))
    y = F.linear(hidden, weight, bias)
    y.backward(seeded(S, B, OUT, seed=6))
    grads = {name: None if name in case.frozen_names() else tensor.grad for name, tensor in named.items()}
    return {"y": y.detach(), "dx": x.grad, **grads}


def layer_of(case: Case, *, rank: int, world_size: int) -> Linear | LayerNormLinear:
    options: dict[str, Any] = {
        "sequence_parallel": case.sequence_parallel,
        "parallel_mode": case.mode,
        "parameters_split": PARTS if case.is_split else None,
        "params_dtype": torch.float32,
        "device": rank_device(),
    }
    if case.norm:
        options |= {"normalization": case.norm, "eps": EPS}
    layer = LayerNormLinear(IN, OUT, **options) if case.norm else Linear(IN, OUT, **options)
    full = full_parameters(case)
    parameters = dict(layer.named_parameters())
    assert parameters.keys() == full.keys()
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(cut(case, name, full[name], rank=rank, world_size=world_size))
            parameter.requires_grad = name not in case.frozen_names()
    return layer


def cut(case: Case, name: str, full: torch.Tensor, *, rank: int, world_size: int) -> torch.Tensor:
    """This rank's part of a whole parameter, its gradient, y, dx or dy."""
    is_layers = name in case.weight_names() or name in case.bias_names()
    if case.mode == "column" and is_layers:
        return full.chunk(world_size)[rank]
    if case.mode == "row" and name in case.weight_names():
        return full.chunk(world_size, dim=1)[rank]
    if name == "dx" and case.mode == "row":
        return full.chunk(world_size, dim=-1)[rank]
    if name == "y" and case.mode == "column":
        sizes = list(PARTS.values()) if case.is_split else [OUT]
        return torch.cat([part.chunk(world_size, dim=-1)[rank] for part in full.split(sizes, dim=-1)], dim=-1)
    if name in {"y", "dx"} and case.sequence_parallel:
        return full.chunk(world_size)[rank]
    return full


def parity_body(rank: int, world_size: int, chosen: list[Case]) -> int:
    initialize_model_parallel(world_size)
    for case in chosen:
        place = {"rank": rank, "world_size": world_size}
        layer = layer_of(case, **place)
        x = cut(case, "dx", seeded(S, B, IN, seed=5), **place).to(rank_device(), torch.float32).requires_grad_()
        y: Any = layer(x)
        y.backward(cut(case, "y", seeded(S, B, OUT, seed=6), **place).to(rank_device(), torch.float32))
        sum_partial_grads(layer.parameters(), group=get_tensor_model_parallel_group())
        grads = {name: parameter.grad for name, parameter in layer.named_parameters()}
        results: dict[str, torch.Tensor | None] = {"y": y.detach(), "dx": x.grad, **grads}
        whole = whole_results(case)
        reference = {
            name: None if tensor is None else cut(case, name, tensor, **place) for name, tensor in whole.items()
        }
        on_cpu = {name: None if tensor is None else tensor.cpu() for name, tensor in results.items()}
        try:
            assert_close_to(on_cpu, reference, tolerance=2e-6)
            assert_equal_on_all_ranks({name: results[name] for name in whole if reference[name] is whole[name]})
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error
    return len(chosen)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_mode_against_the_whole_layer(world_size: int) -> None:
    chosen = cases()
    assert len(chosen) == 50
    assert run_ranks(world_size, parity_body, chosen) == [len(chosen)] * world_size
