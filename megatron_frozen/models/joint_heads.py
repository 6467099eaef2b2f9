"""Query, key and value heads out of the one product that made them, and their gradients back into its place.

Shape suffixes: [s] sequence, [b] batch, [n] query heads and [k] key and value heads of this rank, [d] head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_frozen.autograd.once import once_differentiable
from megatron_frozen.models.rope import RotaryTables, rotated


def rotate_joint(joint: Tensor, tables: RotaryTables, *, head_dim: int, num_kv_heads: int) -> tuple[Tensor, ...]:
    """Return query [s, b, n, d] and key [s, b, k, d], rotated, and value [s, b, k, d] of ``joint`` [s, b, (n+2k) d]."""
    return _RotateJoint.apply(joint, tables.cos, tables.sin, head_dim, num_kv_heads)


class _RotateJoint(torch.autograd.Function):
    """Rotate the query and key heads that stand beside each other, and take the value heads out.

    Shapes: joint [s, b, (n + 2k) d], query heads first, then key and value; cos [s, b or 1, 1, d]; sin [s, b or 1, 1,
        d/2]; results [s, b, n, d], [s, b, k, d], [s, b, k, d].
    Forward: query and key heads rotated as one tensor (see ``rope``); value heads copied.
    Dgrad: the rotation turned back, written into the columns of one gradient of joint's shape and memory order, and the
        value's gradient copied beside it.
    Wgrad: none, the tables are constants.
    Dbias: none.
    Collectives: none.
    Saved: cos and sin, which all layers share; not the heads.
    Why: the gradient of the joint product is read by one product, and concatenating its parts would copy them all. The
        value is copied, as attention keeps it, and a view would keep the query and key of before the rotation too.
    """

    @staticmethod
    def forward(
        ctx: Any, joint: Tensor, cos: Tensor, sin: Tensor, head_dim: int, num_kv_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.shape, ctx.stride, ctx.head_dim = joint.shape, joint.stride(), head_dim
        heads = joint.unflatten(-1, (-1, head_dim))
        num_heads = heads.shape[2] - 2 * num_kv_heads
        query, key = rotated(heads[:, :, :-num_kv_heads], cos, sin).split([num_heads, num_kv_heads], dim=2)
        return query, key, heads[:, :, -num_kv_heads:].clone()

    @staticmethod
    @once_differentiable  # it writes by out=, which autograd refuses where a graph is asked for
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        grad = grads[0].new_empty_strided(ctx.shape, ctx.stride)
        parts = grad.unflatten(-1, (-1, ctx.head_dim)).split([heads.shape[2] for heads in grads], dim=2)
        for out, heads in zip(parts[:2], grads[:2], strict=True):
            rotated(heads, cos, sin, sign=-1, out=out)
        parts[2].copy_(grads[2])
        return grad, None, None, None, None
