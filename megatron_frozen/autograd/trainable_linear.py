"""The linear product whose weight trains.

Shape suffixes: R = rows of a fold.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_frozen import gemm
from megatron_frozen.autograd.grad_dtype import kept_grad_dtype
from megatron_frozen.autograd.linear_products import ProductPlan, dgrad_in_order, forward_product, start_dgrad
from megatron_frozen.autograd.once import once_differentiable
from megatron_frozen.comm import all_gather
from megatron_frozen.comm.groups import Group
from megatron_frozen.layout import Fold, fold_leading
from megatron_frozen.main_grad import GraphTarget, deliver_in_graph, deliver_weight_gradient


class LinearWithGradAccumulationAndAsyncCommunication(torch.autograd.Function):
    """Y = X W^T + b with a trainable W, each of the three products one 2-D GEMM whatever the layout of X and dY.

    Shapes: X [..., I] (its sequence shard [S/ranks, ..., I] under sequence parallelism), W [O, I], b [O], Y [..., O].
    Forward: X folded to [R, I]; Y = X W^T + b, in ``output_dtype`` straight from the operands if that is wider.
    Dgrad: dY folded to [R, O] and cast to W's dtype; dX = dY W.
    Wgrad: dY and X folded to one order of tokens; where one repeats its rows, the other's are summed
        (``gemm.wgrad_operands``); dW = dY^T X, returned, or accumulated into ``weight.main_grad`` under
        ``gradient_accumulation_fusion`` (see ``main_grad``), or put off into ``grad_output_buffer``. It is returned in
        ``weight.grad_dtype``, straight from the operands, where that is wider than W's dtype.
    Dbias: sum of dY over all leading dims, if b requires grad, in ``bias.grad_dtype``.
    Collectives: those of ``plan``: forward, an all-gather of X under sequence parallelism; backward, that gather again
        while dX is multiplied, and an all-reduce of the 2-D dX, whole or in pieces of rows, or its reduce-scatter
        while dW is multiplied.
    Saved: X (the shard) and W; the Parameter object beside them, since a saved copy carries no main_grad.
    Why: upstream folds the operands of dW alone. X is saved as a shard because activations outnumber weights.

    The first nine arguments of ``apply`` are those of Megatron-core 0.16.1's class of this name; the others are ours:
    a ``plan`` stands in the place of ``allreduce_dgrad``, ``sequence_parallel`` and ``tp_group``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        gradient_accumulation_fusion: bool,  # noqa: FBT001 - Megatron's signature
        allreduce_dgrad: bool,  # noqa: FBT001
        sequence_parallel: bool,  # noqa: FBT001
        grad_output_buffer: list[torch.Tensor] | None,
        wgrad_deferral_limit: int | None,
        tp_group: Group,
        plan: ProductPlan | None = None,
        graph_target: GraphTarget | None = None,
        output_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Return Y; see the class."""
        ctx.save_for_backward(input, weight)
        ctx.graph_target = graph_target  # not saved: a second use of the weight may write before this one's backward
        ctx.weight = weight if gradient_accumulation_fusion else None
        ctx.weight_grad_dtype = kept_grad_dtype(weight)
        ctx.bias_grad_dtype = None if bias is None else kept_grad_dtype(bias)
        ctx.grad_output_buffer, ctx.wgrad_deferral_limit = grad_output_buffer, wgrad_deferral_limit
        ctx.plan = plan or ProductPlan(group=tp_group, allreduce=allreduce_dgrad, sequence_parallel=sequence_parallel)
        return forward_product(input, weight, bias, plan=ctx.plan, output_dtype=output_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return dX, dW and db; see the class."""
        input, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        computes_weight = needs_weight and (ctx.grad_output_buffer is None or not _put_off(ctx, grad_output))
        if needs_input and not needs_bias:
            dX = dgrad_in_order(grad_output, weight, plan=ctx.plan)
            if dX is not None:
                return dX, _weight_gradient(ctx, grad_output, input) if computes_weight else None, *(None,) * 10
        gathering = None
        if ctx.plan.sequence_parallel and computes_weight:
            input, gathering = all_gather(input, group=ctx.plan.group, async_op=True)
        wide_RO, fold = fold_leading(grad_output)
        grad_RO = wide_RO if wide_RO.dtype is weight.dtype else wide_RO.to(weight.dtype)
        finish = start_dgrad(grad_RO, weight, fold=fold, plan=ctx.plan) if needs_input else None
        if gathering is not None:
            gathering.wait()
        # Unfolding the folded matrix, not dY itself, so that what the fold had to copy is not copied again.
        grad_weight = _weight_gradient(ctx, fold.unfold(grad_RO), input) if computes_weight else None
        grad_bias = _bias_gradient(ctx, wide_RO, fold) if needs_bias else None
        return finish() if finish else None, grad_weight, grad_bias, *(None,) * 9


def _put_off(ctx: Any, grad_output: torch.Tensor) -> bool:
    """Keep dY for a later weight gradient if the buffer, which there is, has room (a limit of 0 is no limit)."""
    buffer, limit = ctx.grad_output_buffer, ctx.wgrad_deferral_limit
    if limit and len(buffer) >= limit:
        return False
    buffer.append(grad_output)
    return True


def _weight_gradient(ctx: Any, grad_output: torch.Tensor, total_input: torch.Tensor) -> torch.Tensor | None:
    if ctx.graph_target is not None:
        return deliver_in_graph(ctx.graph_target, grad_output, total_input)
    return deliver_weight_gradient(ctx.weight, grad_output, total_input, grad_dtype=ctx.weight_grad_dtype)


def _bias_gradient(ctx: Any, grad_RO: torch.Tensor, fold: Fold) -> torch.Tensor:
    return gemm.bias_gradient(grad_RO, repeats=fold.repeats, dtype=ctx.bias_grad_dtype)
