"""The adapter's two thin products, added to the base output: y + scale * (x A^T) B^T.

Shape suffixes: T = tokens, I = in features (of this rank), O = out features (of this rank), R = rank of the adapter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megatron_frozen import gemm
from megatron_frozen.layout import fold_leading, fold_pair


class AddLowRank(torch.autograd.Function):
    """Adds the low-rank branch to a base output.

    Shapes: base_output [..., O]; input [..., I]; A [R, I]; B [O, R]; scale a number. Output [..., O] like base_output.
    Forward: h = scale * X A^T in the narrower of input's and base_output's dtypes; base_output + h B^T in
        base_output's dtype, in one product that accumulates. Factors are cast to these dtypes.
    Dgrad: dh = scale * dY B; dX = dh A, folded; base_output's gradient is dY itself.
    Wgrad: dB = dY^T h, dA = dh^T X, returned in the factors' own dtype.
    Dbias: none, an adapter has no bias.
    Collectives: none, in either direction; the base's own reduction of Y and dX covers the branch.
    Saved: A, B; input if A trains; h (thin) if B trains.
    Why: base output and branch meet before the layer's one collective, the output is passed over once, and every
        product is 2-D whatever the layout of the leading dims.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, base_output: torch.Tensor, input_: torch.Tensor, A: torch.Tensor, B: torch.Tensor, scale: float
    ) -> torch.Tensor:
        dtype = min(input_.dtype, base_output.dtype, key=lambda dtype: dtype.itemsize)
        input_TI, fold = fold_leading(input_)
        h_TR = gemm.forward(input_TI.to(dtype), A.to(dtype)).mul_(scale).to(base_output.dtype)
        base_TO, base_fold = fold_leading(base_output)
        if (fold.order, fold.num_rows) == (base_fold.order, base_fold.num_rows):
            output = fold.unfold(gemm.forward(h_TR, B.to(h_TR.dtype), base_TO))
        else:  # the base's tokens stand in another order than the input's
            output = base_output + fold.unfold(gemm.forward(h_TR, B.to(h_TR.dtype)))
        _, _, A_trains, B_trains, _ = ctx.needs_input_grad
        ctx.save_for_backward(A, B, input_ if A_trains else None, fold.unfold(h_TR) if B_trains else None)
        ctx.scale, ctx.input_dtype, ctx.dtype = scale, input_.dtype, dtype
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        A, B, input_, h = ctx.saved_tensors
        base_needs, input_needs, A_needs, B_needs, _ = ctx.needs_input_grad
        grad_input = grad_A = grad_B = None
        if input_needs or A_needs:
            grad_TO, fold = fold_leading(grad_output)
            grad_h_TR = gemm.dgrad(grad_TO, B.to(grad_TO.dtype)).mul_(ctx.scale).to(ctx.dtype)
            if input_needs:
                grad_input = fold.unfold(gemm.dgrad(grad_h_TR, A.to(ctx.dtype)).to(ctx.input_dtype))
            if A_needs:
                grad_A = gemm.wgrad(*fold_pair(fold.unfold(grad_h_TR), input_.to(ctx.dtype))).to(A.dtype)
        if B_needs:
            grad_B = gemm.wgrad(*fold_pair(grad_output, h)).to(B.dtype)
        return grad_output if base_needs else None, grad_input, grad_A, grad_B, None
