"""A second differentiation is refused, also where the gradient that comes in is a constant."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megatron_frozen import linear_with_frozen_weight, linear_with_grad_accumulation_and_async_allreduce
from megatron_frozen.autograd import AdaptedParts, FrozenSplitWithAdapters
from megatron_frozen.functional import linear_with_split_parameters


@pytest.mark.parametrize("frozen", [False, True])
def test_a_gradient_penalty_is_refused_and_not_left_out(*, frozen: bool) -> None:
    """dX = dY W depends on W where dY is constant; torch's own ``once_differentiable`` would drop that in silence."""
    x, weight = torch.randn(5, 4, requires_grad=True), torch.randn(3, 4, requires_grad=not frozen)
    linear = linear_with_frozen_weight if frozen else linear_with_grad_accumulation_and_async_allreduce
    output = linear(x, weight, None, False, False, False)  # noqa: FBT003
    (grad,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    torch.testing.assert_close(grad, weight.detach().sum(0).expand(5, 4))
    with pytest.raises(RuntimeError, match="once_differentiable"):
        (grad.square().sum() + output.sum()).backward()


def _split_with_adapters(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    factors = [torch.ones(2, 4).bfloat16().requires_grad_(), torch.ones(2, 4).bfloat16().requires_grad_()]
    factors += [torch.ones(3, 2).bfloat16().requires_grad_(), torch.ones(3, 2).bfloat16().requires_grad_()]
    parts = AdaptedParts(2, False, (0, 1), (1.0, 1.0), keeps_concatenation=True)  # noqa: FBT003
    return FrozenSplitWithAdapters.apply(x, parts, *weights, *factors)


def _fused_of_which_one_freezes(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    for weight in weights:
        setattr(weight.requires_grad_(), "main_grad", torch.zeros(3, 4))  # noqa: B010 - no name that pyright knows
    output = linear_with_split_parameters(x, weights, gradient_accumulation_fusion=True)
    weights[1].requires_grad = False
    return output


@pytest.mark.parametrize("make", [_split_with_adapters, _fused_of_which_one_freezes])
def test_a_backward_in_the_autocast_of_another_dtype(
    make: Callable[[torch.Tensor, list[torch.Tensor]], torch.Tensor],
) -> None:
    """Under an autocast to fp16, CUDA's default, torch would not put the bf16 parts beside each other."""
    x = torch.randn(5, 4).bfloat16().requires_grad_()
    weights = [torch.randn(3, 4).bfloat16() for _ in range(2)]
    output = make(x, weights)
    (expected,) = torch.autograd.grad(output.sum(), x, retain_graph=True)
    with torch.autocast("cpu", torch.float16):
        (grad,) = torch.autograd.grad(output.sum(), x)
    assert torch.equal(grad, expected)


def _in_autocast(linear: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def output(*operands: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return linear(*operands)

    return output


@pytest.mark.parametrize(
    "linear",
    [
        lambda x, weight: linear_with_frozen_weight(x, weight.detach(), None, False, False, False),  # noqa: FBT003
        lambda x, weight: linear_with_grad_accumulation_and_async_allreduce(x, weight, None, False, False, False),  # noqa: FBT003
        lambda x, weight: linear_with_split_parameters(x, [weight, weight]),
    ],
    ids=["frozen", "trainable", "split"],
)
def test_a_compiled_linear_enters_autocast_itself(linear: Callable[..., torch.Tensor]) -> None:
    """Dynamo, which traces the backward inside it too, lets no backward leave it."""
    x, weight = torch.randn(6, 2, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    found = []
    for function in (_in_autocast(linear), torch.compile(_in_autocast(linear), fullgraph=True, backend="aot_eager")):
        output = function(x, weight)
        assert output.dtype == torch.bfloat16
        found.append(torch.autograd.grad(output.float().square().sum(), (x, weight), allow_unused=True))
    for eager, compiled in zip(*found, strict=True):
        assert eager is compiled is None or torch.equal(eager, compiled)
