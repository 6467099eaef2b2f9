"""A second differentiation is refused, also where the gradient that comes in is a constant."""

from __future__ import annotations

import pytest
import torch

from megatron_frozen import linear_with_frozen_weight, linear_with_grad_accumulation_and_async_allreduce


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
