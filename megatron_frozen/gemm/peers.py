"""How others multiply, for measurements to compare with; no layer calls these.

Shape suffixes: T = tokens, I = in features, O = out features.
"""

from __future__ import annotations

import torch


def bare(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the plain product of two matrices in their dtype: the floor."""
    return torch.mm(left, right)


def batched(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return [..., K] times [K, N] as ``matmul`` does it: one small product per token where dims do not collapse."""
    return torch.matmul(left, right)


def flattened(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return [..., K] times [K, N] by ``reshape(-1, K)``, which copies what does not collapse in its own order."""
    return torch.mm(left.reshape(-1, left.shape[-1]), right).view(*left.shape[:-1], right.shape[-1])


def wgrad_and_add(main_grad_OI: torch.Tensor, grad_output_TO: torch.Tensor, input_TI: torch.Tensor) -> None:
    """Add dY^T X to a wider ``main_grad`` by a product rounded to the operands' dtype and a second pass."""
    main_grad_OI.add_(torch.mm(grad_output_TO.t(), input_TI))
