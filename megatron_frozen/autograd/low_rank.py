"""The adapter's thin products, added to the base's: Y = X W^T + scale * (X A^T) B^T.

Shape suffixes: T = tokens, I = in features (of this rank), O = out features (of this rank), R = rank of the adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron_frozen import gemm
from megatron_frozen.autograd.grad_dtype import kept_grad_dtype
from megatron_frozen.autograd.once import once_differentiable
from megatron_frozen.layout import Fold, fold_leading

Gradients = tuple[torch.Tensor | None, ...]


class FrozenLinearWithAdapter(torch.autograd.Function):
    """Y = X W^T + scale * (X A^T) B^T with a frozen W, where base and adapter see the same X.

    Shapes: X [..., I], W [O, I], A [R, I], B [O, R], scale a number; Y [..., O]. X and W share one dtype.
    Forward: X folded to [T, I]; Y = X W^T; h = scale * X A^T; Y += h B^T. A and B are cast to X's dtype.
    Dgrad: dY folded to [T, O]; dh = scale * dY B; dX = dY W; dX += dh A.
    Wgrad: dB = dY^T h, dA = dh^T X, straight into the dtype of the factors' gradients; W gets none.
    Dbias: none, the base adds its bias later.
    Collectives: none, in either direction; the base's own reduction of Y and dX covers the adapter.
    Saved: W, A, B; X if A trains; h (thin) if B trains.
    Why: adapter and base meet inside the products, so no tensor of the size of Y or dX is made or passed over twice,
        and every product is 2-D whatever the layout of the leading dims.
    """

    @staticmethod
    def forward(
        ctx: Any, input_: torch.Tensor, weight: torch.Tensor, A: torch.Tensor, B: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Return Y; see the class."""
        input_TI, fold = fold_leading(input_)
        output_TO = gemm.forward(input_TI, weight)
        h_TR = gemm.forward(input_TI, A.to(input_.dtype)).mul_(scale)
        gemm.add_product_(output_TO, h_TR, B.to(input_.dtype).t())
        _, _, A_trains, B_trains, _ = ctx.needs_input_grad
        ctx.save_for_backward(weight, A, B, input_ if A_trains else None, fold.unfold(h_TR) if B_trains else None)
        ctx.scale = scale
        return fold.unfold_output(output_TO)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> Gradients:
        """Return dX, dA and dB; see the class."""
        weight, A, B, input_, h = ctx.saved_tensors
        grad_TO, fold = fold_leading(grad_output)
        grad_h_TR = gemm.dgrad(grad_TO, B.to(grad_TO.dtype)).mul_(ctx.scale)
        grad_input = None
        if ctx.needs_input_grad[0]:
            grad_TI = gemm.dgrad(grad_TO, weight)
            gemm.add_product_(grad_TI, grad_h_TR, A.to(grad_TI.dtype))
            grad_input = fold.unfold(grad_TI)
        grad_A = None if input_ is None else factor_gradient(fold.unfold(grad_h_TR), input_, factors=[A])
        grad_B = None if h is None else factor_gradient(fold.unfold(grad_TO), h, factors=[B])
        return grad_input, None, grad_A, grad_B, None


class AddLowRank(torch.autograd.Function):
    """Y + scale * (X A^T) B^T, for a base output Y that was made apart.

    Shapes: Y [..., O], X [..., I], A [R, I], B [O, R], scale a number. The sum is [..., O] in Y's dtype.
    Forward: h = scale * X A^T in the narrower of X's and Y's dtypes; Y + h B^T in Y's, in one product that
        accumulates. A and B are cast to these dtypes.
    Dgrad: dh = scale * dY B; dX = dh A, folded; Y's gradient is dY itself.
    Wgrad: dB = dY^T h, dA = dh^T X, straight into the dtype of the factors' gradients.
    Dbias: none.
    Collectives: none, in either direction; the base's own reduction of Y and dX covers the adapter.
    Saved: A, B; X if A trains; h (thin) if B trains.
    Why: dropout gives the adapter an X of its own, autocast other dtypes, and a trainable base keeps its own backward.
    """

    @staticmethod
    def forward(
        ctx: Any, base_output: torch.Tensor, input_: torch.Tensor, A: torch.Tensor, B: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Return the sum; see the class."""
        dtype = min(input_.dtype, base_output.dtype, key=lambda dtype: dtype.itemsize)
        input_TI, fold = fold_leading(input_)
        h_TR = gemm.forward(input_TI.to(dtype), A.to(dtype)).mul_(scale).to(base_output.dtype)
        base_TO, base_fold = fold_leading(base_output)
        if _same_rows(fold, base_fold):
            output = fold.unfold_output(gemm.forward(h_TR, B.to(h_TR.dtype), base_TO))
        else:  # the base wrote out rows that the input repeats
            output = base_output + fold.unfold(gemm.forward(h_TR, B.to(h_TR.dtype)))
        _, _, A_trains, B_trains, _ = ctx.needs_input_grad
        ctx.save_for_backward(A, B, input_ if A_trains else None, fold.unfold(h_TR) if B_trains else None)
        ctx.scale, ctx.input_dtype, ctx.dtype = scale, input_.dtype, dtype
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> Gradients:
        """Return the gradients of Y, X, A and B; see the class."""
        A, B, input_, h = ctx.saved_tensors
        grad_TO, fold = fold_leading(grad_output)
        grad_h_TR = gemm.dgrad(grad_TO, B.to(grad_TO.dtype)).mul_(ctx.scale).to(ctx.dtype)
        grad_input = None
        if ctx.needs_input_grad[1]:
            grad_input = fold.unfold(gemm.dgrad(grad_h_TR, A.to(ctx.dtype)).to(ctx.input_dtype))
        grad_A = None if input_ is None else factor_gradient(fold.unfold(grad_h_TR), input_.to(ctx.dtype), factors=[A])
        grad_B = None if h is None else factor_gradient(fold.unfold(grad_TO), h, factors=[B])
        return grad_output, grad_input, grad_A, grad_B, None


def _same_rows(first: Fold, second: Fold) -> bool:
    return (first.order, first.num_rows) == (second.order, second.num_rows)


def factor_gradient(grad: torch.Tensor, operand: torch.Tensor, *, factors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return grad^T operand of [..., M] and [..., N] as [M, N], in the widest dtype of the gradients of ``factors``."""
    dtype = kept_grad_dtype(factors[0])
    for factor in factors[1:]:
        dtype = torch.promote_types(dtype, kept_grad_dtype(factor))
    return gemm.wgrad(grad, operand, dtype=torch.promote_types(operand.dtype, dtype)).to(dtype)
