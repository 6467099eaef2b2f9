"""The trainable linear on one rank: three folded products, one order of tokens, copies, fusion, putting off."""

from __future__ import annotations

import pytest
import torch

from megatron_frozen import linear_with_grad_accumulation_and_async_allreduce
from megatron_frozen.diagnostics import Recorder
from megatron_frozen.errors import ConfigError
from megatron_frozen.testing import relative_error
from tests.unit.test_autograd_frozen_linear import COPIED, LAYOUTS, NUM_IN, NUM_OUT


def trainable(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, fusion: bool = False, **options: object
) -> torch.Tensor:
    """Call the public function on one rank."""
    return linear_with_grad_accumulation_and_async_allreduce(
        x,
        weight,
        bias,
        gradient_accumulation_fusion=fusion,
        allreduce_dgrad=False,
        sequence_parallel=False,
        **options,  # pyright: ignore[reportArgumentType]
    )


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("with_bias", [False, True])
def test_three_products_against_fp64(name: str, dtype: torch.dtype, *, with_bias: bool) -> None:
    torch.manual_seed(0)
    grad = LAYOUTS[name]().to(dtype)
    x = torch.randn(*grad.shape[:-1], NUM_IN).to(dtype).requires_grad_()
    weight = torch.randn(NUM_OUT, NUM_IN).to(dtype).requires_grad_()
    bias = torch.randn(NUM_OUT).to(dtype).requires_grad_()
    trained = (x, weight, bias) if with_bias else (x, weight)
    y = trainable(*trained)
    with Recorder() as seen:
        grads = torch.autograd.grad(y, trained, grad)
    assert (seen.count("aten.mm"), seen.count("aten.bmm")) == (2, 0)
    plain_grads = torch.autograd.grad(torch.nn.functional.linear(*trained), trained, grad)
    wide, wide_x = grad.double(), x.detach().double()
    exact = (
        torch.einsum("...o,oi->...i", wide, weight.detach().double()),
        wide.reshape(-1, NUM_OUT).t() @ wide_x.reshape(-1, NUM_IN),
        wide.reshape(-1, NUM_OUT).sum(0),
    )
    tiny = 4 * torch.finfo(dtype).eps
    for what, ours, theirs, true in zip(("dx", "dw", "db"), grads, plain_grads, exact, strict=False):  # db or not
        assert ours.dtype == dtype
        assert relative_error(ours, true) <= 2 * relative_error(theirs, true) + tiny, what


@pytest.mark.parametrize("name", LAYOUTS)
def test_copies_once_at_most(name: str) -> None:
    """The gradient is copied at most once for both of its products, and not where both tensors share a layout."""
    grad = LAYOUTS[name]()
    x = LAYOUTS[name]().detach().requires_grad_()
    weight = torch.randn(NUM_OUT, NUM_OUT, requires_grad=True)
    y = trainable(x, weight)
    with Recorder() as seen:
        torch.autograd.grad(y, (x, weight), grad)
    grad_bytes = grad.numel() * grad.element_size()
    allowed = 2 * grad_bytes + NUM_OUT * 4 if name in COPIED or "expanded" in name else 0
    assert seen.copied_bytes() <= allowed


def test_a_gradient_in_another_order_than_its_input() -> None:
    """Tokens of dW stand in one order for both operands: a batch-major gradient with a sequence-major input."""
    grad = torch.randn(3, 6, NUM_OUT).transpose(0, 1)
    x = torch.randn(6, 3, NUM_IN)
    weight = torch.randn(NUM_OUT, NUM_IN, requires_grad=True)
    (dw,) = torch.autograd.grad(trainable(x, weight), weight, grad)
    torch.testing.assert_close(dw, torch.einsum("sbo,sbi->oi", grad, x))


def test_only_what_is_asked_is_computed() -> None:
    x, weight = torch.randn(6, 3, NUM_IN), torch.randn(NUM_OUT, NUM_IN, requires_grad=True)
    y = trainable(x, weight)
    with Recorder() as seen:
        y.backward(torch.ones_like(y))
    assert seen.count("aten.mm") == 1
    assert x.grad is None


def test_fusion_accumulates_in_fp32_and_returns_nothing() -> None:
    """256 then 1 in bf16 gives 257 in an fp32 buffer (bf16 alone stays at 256)."""
    weight = torch.nn.Parameter(torch.zeros(1, 1, dtype=torch.bfloat16))
    main_grad = weight.main_grad = torch.zeros(1, 1)  # pyright: ignore[reportAttributeAccessIssue]
    for value in (256.0, 1.0):
        x = torch.full((1, 1, 1), value, dtype=torch.bfloat16)
        trainable(x, weight, fusion=True).backward(torch.ones(1, 1, 1, dtype=torch.bfloat16))
    assert weight.grad is None
    assert main_grad.item() == 257.0


def test_fusion_without_a_buffer_is_refused() -> None:
    weight = torch.nn.Parameter(torch.zeros(NUM_OUT, NUM_IN))
    y = trainable(torch.randn(2, NUM_IN), weight, fusion=True)
    with pytest.raises(ConfigError, match=r"a weight of shape \[5, 7\] trains and has neither a main_grad"):
        y.sum().backward()


def test_fusion_under_autocast_of_a_wider_weight_is_refused() -> None:
    weight = torch.nn.Parameter(torch.zeros(NUM_OUT, NUM_IN))
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(ConfigError, match="the cast copy has no main_grad"),
    ):
        trainable(torch.randn(2, NUM_IN), weight, fusion=True)


@pytest.mark.parametrize(("limit", "kept"), [(0, 3), (2, 2)])
def test_a_weight_gradient_may_be_put_off(limit: int, kept: int) -> None:
    buffer: list[torch.Tensor] = []
    weight = torch.randn(NUM_OUT, NUM_IN, requires_grad=True)
    for _ in range(3):
        x = torch.randn(2, 3, NUM_IN, requires_grad=True)
        trainable(x, weight, grad_output_buffer=buffer, wgrad_deferral_limit=limit).sum().backward()
        assert x.grad is not None
    assert len(buffer) == kept
    assert (weight.grad is None) == (kept == 3)
