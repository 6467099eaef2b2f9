"""torch's ``once_differentiable`` without what an ordinary backward does not need of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import function

from megatron_frozen import gemm


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``backward``, which refuses to be differentiated itself, as torch's decorator of this name makes it.

    Without ``create_graph`` a backward runs with gradients off and has nothing to refuse. torch's turns them off again
    and looks at its results, which is a twentieth of what a small linear costs. With it torch's refuses only where an
    incoming gradient requires one, and else gives results that pass for constants; but they depend on the saved tensors
    too, as dX = dY W does on W, and what a gradient penalty owes to these would be missing in silence.

    A backward that is called inside the user's autocast runs outside it: what it is made of has its dtypes already, and
    torch refuses to put bf16 tensors beside each other under an autocast to fp16. A traced one stays inside, as Dynamo
    lets no backward change that.
    """
    checked = function.once_differentiable(backward)

    @functools.wraps(backward)
    def once(ctx: Any, *grads: torch.Tensor) -> Any:
        if not torch.compiler.is_compiling() and gemm.autocast_is_on(grads[0]):
            with gemm.without_autocast(grads[0]):
                return once(ctx, *grads)
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        return checked(ctx, *(grads if torch.compiler.is_compiling() else map(_requiring_grad, grads)))

    return once


def _requiring_grad(grad: torch.Tensor | None) -> torch.Tensor | None:
    return grad if grad is None or grad.requires_grad else grad.detach().requires_grad_()
