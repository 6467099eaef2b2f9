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
    return torch.mm(_rows(left), right).view(*left.shape[:-1], right.shape[-1])


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def bare_gradients(
    grad_TO: torch.Tensor, weight_OI: torch.Tensor, wgrad_operands: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dX and dW as plain products of matrices, dW from the [R, O] and [R, I] that it is given: the floor."""
    grad_RO, input_RI = wgrad_operands
    return torch.mm(grad_TO, weight_OI), torch.mm(grad_RO.t(), input_RI)


def batched_gradients(
    grad_output: torch.Tensor, weight_OI: torch.Tensor, input_: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dX of [..., O] as ``batched`` does it, and dW of it and [..., I] by ``reshape(-1, ...)`` of both."""
    return batched(grad_output, weight_OI), torch.mm(_rows(grad_output).t(), _rows(input_))


def flattened_gradients(
    grad_output: torch.Tensor, weight_OI: torch.Tensor, input_: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dX and dW of [..., O] and [..., I] by ``reshape(-1, ...)``, once for both products."""
    grad_TO, input_TI = _rows(grad_output), _rows(input_)
    return torch.mm(grad_TO, weight_OI).view(input_.shape), torch.mm(grad_TO.t(), input_TI)


def linear_step(input_: torch.Tensor, weight_OI: torch.Tensor, grad_output: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the gradients of what requires them after torch's own linear, forward and backward."""
    needed = [tensor for tensor in (input_, weight_OI) if tensor.requires_grad]
    return torch.autograd.grad(torch.nn.functional.linear(input_, weight_OI), needed, grad_output)


def wgrad_and_add(main_grad_OI: torch.Tensor, grad_output_TO: torch.Tensor, input_TI: torch.Tensor) -> None:
    """Add dY^T X to a wider ``main_grad`` by a product rounded to the operands' dtype and a second pass."""
    main_grad_OI.add_(torch.mm(grad_output_TO.t(), input_TI))
