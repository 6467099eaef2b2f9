"""torch's ``once_differentiable`` without what an ordinary backward does not need of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import function


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``backward``, which refuses to be differentiated itself, as torch's decorator of this name makes it.

    Without ``create_graph`` a backward runs with gradients off and has nothing to refuse. torch's turns them off again
    and looks at its results, which is a twentieth of what a small linear costs.
    """
    checked = function.once_differentiable(backward)

    @functools.wraps(backward)
    def once(ctx: Any, *grads: torch.Tensor) -> Any:
        return checked(ctx, *grads) if torch.is_grad_enabled() else backward(ctx, *grads)

    return once
