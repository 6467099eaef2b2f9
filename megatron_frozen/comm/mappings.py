"""Differentiable mappings between tensor-parallel regions, with Megatron's names and meanings.

| function | forward | backward |
|---|---|---|
| copy_to_tensor_model_parallel_region | as it is | all-reduce |
| reduce_from_tensor_model_parallel_region | all-reduce | as it is |
| scatter_to_tensor_model_parallel_region | slice of the last dim | all-gather |
| gather_from_tensor_model_parallel_region | all-gather of the last dim | slice |
| scatter_to_sequence_parallel_region | slice of dim 0 | all-gather |
| gather_from_sequence_parallel_region | all-gather of dim 0 | reduce-scatter, or slice |
| reduce_scatter_to_sequence_parallel_region | reduce-scatter of dim 0 | all-gather |

``group=None`` is the group of ``initialize_model_parallel``, one rank where nothing was set up. Inputs and incoming
gradients stay bitwise untouched. All-reduces run in the memory order that a tensor has, so every rank must bring one
of the same shape and stride order, as ranks that run one program do.

Source: ``megatron.core.tensor_parallel.mappings`` (Korthikanti et al., 2022).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megatron_frozen.comm import collectives
from megatron_frozen.comm.groups import Group, chosen_group, group_size
from megatron_frozen.layout import fold_leading

FIRST, LAST = 0, -1
NO_REDUCTION = (False, False)  # reduce, in_fp32


def _widened(grad: torch.Tensor, *, in_fp32: bool) -> torch.Tensor:
    return grad.to(torch.promote_types(grad.dtype, torch.float32)) if in_fp32 else grad


def reduce_gradient(grad: torch.Tensor, *, group: Group, in_fp32: bool = False) -> torch.Tensor:
    """Return the sum of ``grad`` [..., H] over ``group``: one all-reduce of its distinct rows, in fp32 if asked."""
    if group_size(group) == 1:
        return grad
    if grad.dim() == 0:
        return reduce_gradient(grad.reshape(1), group=group, in_fp32=in_fp32).reshape(())
    matrix, fold = fold_leading(grad)
    summed, _ = collectives.all_reduce(_widened(matrix, in_fp32=in_fp32), group=group)
    return fold.unfold(summed.to(grad.dtype))


class _CopyToRegion(torch.autograd.Function):
    """Shapes: X [..., H]. Forward: X. Dgrad: sum of dY over ranks. Wgrad: none. Dbias: none.

    Collectives: backward, one all-reduce. Saved: nothing. Why: each rank uses all of X for its part of the output.
    """

    @staticmethod
    def forward(ctx: Any, input_: torch.Tensor, group: Group, in_fp32: bool) -> torch.Tensor:  # noqa: FBT001
        ctx.group, ctx.in_fp32 = group, in_fp32
        return input_.view_as(input_)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return reduce_gradient(grad_output, group=ctx.group, in_fp32=ctx.in_fp32), None, None


class _ReduceFromRegion(torch.autograd.Function):
    """Shapes: X [..., H]. Forward: sum of X over ranks. Dgrad: dY. Wgrad: none. Dbias: none.

    Collectives: forward, one all-reduce. Saved: nothing. Why: each rank holds a partial sum.
    """

    @staticmethod
    def forward(ctx: Any, input_: torch.Tensor, group: Group) -> torch.Tensor:
        if input_.dim() == 0:
            return collectives.all_reduce(input_, group=group)[0]
        matrix, fold = fold_leading(input_)  # summed in the memory order it has, with no transposing copy
        return fold.unfold_output(collectives.all_reduce(matrix, group=group)[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad_output, None


class _ScatterToRegion(torch.autograd.Function):
    """Shapes: X [..., H] or [S, ...] to its slice. Forward: slice of dim. Dgrad: dY joined. Wgrad: none. Dbias: none.

    Collectives: backward, one all-gather. Saved: nothing. Why: all ranks hold the same X.
    """

    @staticmethod
    def forward(ctx: Any, input_: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return collectives.local_slice(input_, group=group, dim=dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return collectives.all_gather(grad_output, group=ctx.group, dim=ctx.dim)[0], None, None


class _GatherFromRegion(torch.autograd.Function):
    """Shapes: slice of X to X. Forward: slices joined along dim. Dgrad: sum or slice of dY. Wgrad: none. Dbias: none.

    Collectives: forward, one all-gather; backward, one reduce-scatter if ``reduce``. Saved: nothing. Why: after a
    gather the ranks either all compute the same (slice) or each its own part of the gradient (reduce-scatter)."""

    @staticmethod
    def forward(ctx: Any, input_: torch.Tensor, group: Group, dim: int, reduce: bool, in_fp32: bool) -> torch.Tensor:  # noqa: FBT001
        ctx.group, ctx.dim, ctx.reduce, ctx.in_fp32 = group, dim, reduce, in_fp32
        return collectives.all_gather(input_, group=group, dim=dim)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        if not ctx.reduce:
            grad = collectives.local_slice(grad_output, group=ctx.group, dim=ctx.dim)
            return grad, None, None, None, None
        wide = _widened(grad_output, in_fp32=ctx.in_fp32)
        grad = collectives.reduce_scatter(wide, group=ctx.group, dim=ctx.dim)[0]
        return grad.to(grad_output.dtype), None, None, None, None


class _ReduceScatterToRegion(torch.autograd.Function):
    """Shapes: X [S, ...] to [S/ranks, ...]. Forward: slice of the sum of X. Dgrad: dY joined. Wgrad: none. Dbias:
    none.

    Collectives: forward, one reduce-scatter; backward, one all-gather. Saved: nothing. Why: partial sums, of which
    each rank goes on with its part of the sequence."""

    @staticmethod
    def forward(ctx: Any, input_: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return collectives.reduce_scatter(input_, group=group, dim=FIRST)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, None]:
        return collectives.all_gather(grad_output, group=ctx.group, dim=FIRST)[0], None


def _chosen(group: Group) -> Group:
    group = chosen_group(group)
    return group if group_size(group) > 1 else None


def copy_to_tensor_model_parallel_region(
    input_: torch.Tensor, group: Group = None, *, reduce_in_fp32: bool = False
) -> torch.Tensor:
    """Return ``input_`` [..., H]; its gradient is summed over the group (one all-reduce, in fp32 if asked)."""
    group = _chosen(group)
    return input_ if group is None else _CopyToRegion.apply(input_, group, reduce_in_fp32)


def reduce_from_tensor_model_parallel_region(input_: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Return the sum of ``input_`` over the group (one all-reduce); its gradient passes as it is."""
    group = _chosen(group)
    return input_ if group is None else _ReduceFromRegion.apply(input_, group)


def scatter_to_tensor_model_parallel_region(input_: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Return this rank's slice of the last dim; the gradient is joined (one all-gather).

    Raises LayoutError where the last dim does not divide by the ranks.
    """
    group = _chosen(group)
    return input_ if group is None else _ScatterToRegion.apply(input_, group, LAST)


def gather_from_tensor_model_parallel_region(input_: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Return all ranks' slices joined along the last dim (one all-gather); the gradient is this rank's slice."""
    group = _chosen(group)
    return input_ if group is None else _GatherFromRegion.apply(input_, group, LAST, *NO_REDUCTION)


def scatter_to_sequence_parallel_region(input_: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Return this rank's slice of dim 0; the gradient is joined (one all-gather).

    Raises LayoutError where dim 0 does not divide by the ranks.
    """
    group = _chosen(group)
    return input_ if group is None else _ScatterToRegion.apply(input_, group, FIRST)


def gather_from_sequence_parallel_region(
    input_: torch.Tensor,
    tensor_parallel_output_grad: bool = True,  # noqa: FBT001, FBT002 - Megatron's signature
    group: Group = None,
    *,
    reduce_in_fp32: bool = False,
) -> torch.Tensor:
    """Return all ranks' slices joined along dim 0 (one all-gather).

    The gradient is reduce-scattered if what follows is tensor-parallel, so that each rank holds a partial gradient;
    else it is this rank's slice."""
    group = _chosen(group)
    if group is None:
        return input_
    return _GatherFromRegion.apply(input_, group, FIRST, tensor_parallel_output_grad, reduce_in_fp32)


def reduce_scatter_to_sequence_parallel_region(input_: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Return this rank's slice along dim 0 of the sum over the group (one reduce-scatter); the gradient is joined (one
    all-gather).

    Raises LayoutError where dim 0 does not divide by the ranks.
    """
    group = _chosen(group)
    return input_ if group is None else _ReduceScatterToRegion.apply(input_, group)
