"""FSDP2 with fp32 gradients: error against fp64 in every mode, what must be refused, and torch.compile's rounding."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from megatron_frozen.errors import ConfigError
from megatron_frozen.integrations import fsdp
from megatron_frozen.layers import ModelParallelConfig, VocabParallelEmbedding
from megatron_frozen.layers.norm import RMSNorm
from megatron_frozen.testing import relative_error, run_ranks
from tests.unit import fsdp_ranks
from tests.unit.test_autograd_trainable_linear import trainable

# A weight gradient rounded to bf16 errs by some 1e-3; one that never was, by the rounding of fp32.
EXACT, ROUNDED = 1e-6, 2e-4

MODES: dict[str, dict[str, Any]] = {
    "2 batches": {"num_batches": 2, "sync_each": True},
    "2 batches, one reduction": {"num_batches": 2, "sync_each": False},
    "8 batches": {"num_batches": 8, "sync_each": True},
    "8 batches, one reduction": {"num_batches": 8, "sync_each": False},
    "bias": {"num_batches": 8, "sync_each": False, "bias": True},
    "kept gathered": {"num_batches": 8, "sync_each": False, "reshard": False},
}


@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_never_rounded_to_bf16(mode: str) -> None:
    for found in run_ranks(2, partial(fsdp_ranks.precision, fp32=True, **MODES[mode])):
        assert len(found) == 4 if "bias" in mode else 2
        assert all(error < EXACT for error in found.values()), found


@pytest.mark.parametrize(("fp32", "ours"), [(False, True), (False, False), (True, False)])
def test_either_half_alone_rounds(*, fp32: bool, ours: bool) -> None:
    """Control: without the switch, or with a product that returns bf16, the same measure finds the rounding."""
    for found in run_ranks(2, partial(fsdp_ranks.precision, fp32=fp32, ours=ours, **MODES["8 batches"])):
        assert all(error > ROUNDED for error in found.values()), found


def test_second_call_adds_nothing_and_the_handle_undoes_it() -> None:
    for with_handle, without in run_ranks(2, fsdp_ranks.undone):
        assert all(error < EXACT for error in with_handle.values()), with_handle
        assert all(error > ROUNDED for error in without.values()), without


def test_parameter_that_trains_later_is_covered() -> None:
    for found in run_ranks(2, fsdp_ranks.frozen_then_trained):
        assert all(error < EXACT for error in found.values()), found


def test_group_of_two_gradient_dtypes_is_what_torch_refuses() -> None:
    """Why every parameter of a group is set, not the weights alone."""
    for said in run_ranks(2, fsdp_ranks.foreign_bias):
        assert "FSDP reduce-scatter expects uniform gradient dtype" in said


def test_what_it_cannot_do_is_refused() -> None:
    for said in run_ranks(2, fsdp_ranks.refusals):
        assert "fp32_grads was given a MLP of which no part is sharded" in said["not sharded"]
        assert "trainable torch.bfloat16 parameter (FSDPLinear.weight)" in said["bf16"]
        assert "gradient FSDP2 rounds to that dtype in the end" in said["bf16"]
        assert "fp32_grads was given a compiled FSDPLinear" in said["compiled"]
        assert "fp32_grads was given a compiled OptimizedModule" in said["wrapped"]
        assert "fp32_grads was given a compiled FSDPLinear" in said["compiled later"]
        assert all(text.startswith("ConfigError") for text in said.values())


def test_old_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsdp, "_NEEDS", "an_attribute_that_no_tensor_has")
    with pytest.raises(ConfigError, match=r"fp32_grads cannot widen gradients: torch .* lacks Tensor\.grad_dtype"):
        fsdp.fp32_grads(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("repeats", [1, 3])
def test_linear_returns_gradients_in_the_dtype_that_the_leaf_keeps(repeats: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(40, 16).bfloat16()
    weight, bias = torch.randn(8, 16).bfloat16().requires_grad_(), torch.randn(8).bfloat16().requires_grad_()
    grad = torch.randn(40, 8).bfloat16().unsqueeze(1).expand(40, repeats, 8)
    x_repeated = x.unsqueeze(1).expand(40, repeats, 16)
    exact = repeats * grad[:, 0].double().t() @ x.double(), repeats * grad[:, 0].double().sum(0)
    for dtype, low, high in ((torch.bfloat16, ROUNDED, 1e-2), (torch.float32, 0.0, EXACT)):
        weight.grad = bias.grad = None
        weight.grad_dtype = bias.grad_dtype = dtype
        trainable(x_repeated, weight, bias).backward(grad)
        for param, true in zip((weight, bias), exact, strict=True):
            assert param.grad is not None
            assert param.grad.dtype == dtype
            assert low <= relative_error(param.grad, true) < high


def test_embedding_and_norm_do_too() -> None:
    torch.manual_seed(0)
    config = ModelParallelConfig(params_dtype=torch.bfloat16)
    ids = torch.randint(0, 3, (64, 32))
    embedding = VocabParallelEmbedding(8, 16, init_method=torch.nn.init.normal_, config=config)
    norm = RMSNorm(16, eps=1e-6, parallel=config)
    grad = torch.randn(64, 32, 16).bfloat16()
    rows = embedding.weight.detach().double()[ids]
    normalised = (rows / (rows.square().mean(-1, keepdim=True) + 1e-6).sqrt()).bfloat16()
    one_hot = torch.nn.functional.one_hot(ids, 8).double()
    exact = torch.einsum("sbv,sbh->vh", one_hot, grad.double()), (grad.double() * normalised.double()).sum((0, 1))
    for dtype, low, high in ((torch.bfloat16, ROUNDED, 0.1), (torch.float32, 0.0, EXACT)):
        for module, given, true in ((embedding, ids, exact[0]), (norm, rows.bfloat16(), exact[1])):
            module.weight.grad, module.weight.grad_dtype = None, dtype
            module(given).backward(grad)
            assert module.weight.grad is not None
            assert module.weight.grad.dtype == dtype
            assert low <= relative_error(module.weight.grad, true) < high


@pytest.mark.parametrize(("backend", "rounds"), [("eager", False), ("aot_eager", True)])
def test_compiled_code_rounds_what_the_leaf_would_keep(backend: str, *, rounds: bool) -> None:
    """Why compiled modules are refused. If this fails, torch was mended: let fp32_grads take them."""

    class Fp32Gradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
            return weight.sum()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            return torch.full((4, 4), 1.0 + 2**-12)

    torch.compiler.reset()
    weight = torch.zeros(4, 4, dtype=torch.bfloat16, requires_grad=True)
    weight.grad_dtype = torch.float32
    torch.compile(Fp32Gradient.apply, backend=backend)(weight).backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
    assert bool((weight.grad == 1.0).all()) == rounds
