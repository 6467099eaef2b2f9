"""The look-up in a table whose gradient is kept wider than the table.

Shape suffixes: V = rows of the table, H = hidden.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_frozen.autograd.grad_dtype import kept_grad_dtype
from megatron_frozen.autograd.once import once_differentiable


class EmbeddingWithWideGradient(torch.autograd.Function):
    """Rows W[ids], with the gradient of W summed in ``W.grad_dtype``.

    Shapes: W [V, H], ids [...] (int64), rows [..., H].
    Forward: the rows.
    Dgrad: none, ids are no numbers.
    Wgrad: dY upcast to W's ``grad_dtype`` and added up row by row in it; the row ``padding_idx`` stays zero.
    Dbias: none.
    Collectives: none.
    Saved: ids.
    Why: torch adds up a frequent token's gradients in the table's dtype, where bf16 loses what is small.
    """

    @staticmethod
    def forward(ctx: Any, weight_VH: torch.Tensor, ids: torch.Tensor, padding_idx: int | None) -> torch.Tensor:
        """Return the rows; see the class."""
        ctx.save_for_backward(ids)
        ctx.num_rows, ctx.padding_idx = weight_VH.shape[0], -1 if padding_idx is None else padding_idx
        ctx.grad_dtype = kept_grad_dtype(weight_VH)
        return torch.nn.functional.embedding(ids, weight_VH)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Return the gradient of W [V, H]; see the class."""
        (ids,) = ctx.saved_tensors
        wide = grad_rows.to(ctx.grad_dtype)
        return torch.ops.aten.embedding_dense_backward(wide, ids, ctx.num_rows, ctx.padding_idx, False), None, None  # noqa: FBT003
