"""The linear product whose weight is given in parts, each frozen or trainable on its own.

Shape suffixes: R = rows of a fold, O = out features of all parts, P = those of the parts that train.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_frozen import gemm
from megatron_frozen.autograd.grad_dtype import kept_grad_dtype
from megatron_frozen.autograd.linear_products import ProductPlan, start_dgrad, start_reduction
from megatron_frozen.autograd.once import once_differentiable
from megatron_frozen.comm import all_gather
from megatron_frozen.layout import Fold, fold_leading
from megatron_frozen.main_grad import GraphTarget, deliver_all_in_graph, deliver_weight_gradients
from megatron_frozen.storage import join

Gradients = list[torch.Tensor | None]


class SplitLinear(torch.autograd.Function):
    """Y = X [W_1; ...; W_n]^T + [b_1; ...; b_n] in one product, with a gradient for each part that trains.

    Shapes: X [..., I] (its sequence shard [S/ranks, ..., I] under sequence parallelism), W_i [O_i, I], b_i [O_i] for
        every part or none, Y [..., O]. The parts' dtypes are promoted to one, which is X's.
    Forward: X folded to [R, I]; Y = X W^T + b over the parts where they adjoin in memory, else over their one
        concatenation; in ``output_dtype`` straight from the operands if that is wider.
    Dgrad: dY folded to [R, O] and cast to X's dtype; dX = dY W, from the same memory as the forward.
    Wgrad: the columns of dY whose parts train, and X, folded to one order of tokens; where one repeats its
        rows, the other's are summed (``gemm.wgrad_operands``); one product, whose rows are returned in each part's
        ``grad_dtype``. Columns that do not adjoin are copied beside each other first. Under
        ``gradient_accumulation_fusion`` each part goes into its own ``main_grad`` (see ``main_grad``): one product
        where those adjoin too, else one for each.
    Dbias: sum of dY over all leading dims, cut into the parts that require it, in their ``grad_dtype``.
    Collectives: forward, an all-gather of X under sequence parallelism; backward, that gather again if a part trains,
        and an all-reduce of the 2-D dX (``allreduce_dgrad``), whole or in pieces of rows, or its reduce-scatter while
        dW is multiplied.
    Saved: the parts, their concatenation if there was one, and X (the shard) if a part trains.
    Why: Hugging Face, PEFT and optimizers know q, k and v; the hardware wants one product. ``apply`` takes the parts
        one by one, as autograd does not see into a list. Source: Transformer Engine's ``parameters_split``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        gradient_accumulation_fusion: bool,  # noqa: FBT001 - apply takes no keywords
        plan: ProductPlan,
        graph_targets: Sequence[GraphTarget] | None,
        output_dtype: torch.dtype | None,
        num_parts: int,
        *parts: torch.Tensor,
    ) -> torch.Tensor:
        """Return Y; ``parts`` are the weights, then the biases."""
        weights, biases = list(parts[:num_parts]), list(parts[num_parts:])
        ctx.plan = plan
        ctx.num_parts, ctx.graph_targets = num_parts, graph_targets
        ctx.sizes = [weight.shape[0] for weight in weights]
        ctx.owners = weights if gradient_accumulation_fusion else None  # a saved copy carries no main_grad
        ctx.grad_dtypes = [kept_grad_dtype(part) for part in parts]
        trains = any(ctx.needs_input_grad[6 : 6 + num_parts])
        total_input = input
        if plan.sequence_parallel:
            total_input, _ = all_gather(input, group=plan.group)
        input_RI, fold = fold_leading(total_input)
        output_RO, kept = gemm.joined_forward(input_RI, weights, biases, dtype=output_dtype)
        ctx.save_for_backward(input if trains else None, kept, *weights)
        ctx.dtype = input.dtype
        return fold.unfold_output(output_RO)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return dX and the gradients of the parts; see the class."""
        input, kept, *weights = ctx.saved_tensors
        needs_input, needs_parts = ctx.needs_input_grad[0], ctx.needs_input_grad[6:]
        trained = [i for i in range(ctx.num_parts) if needs_parts[i]]
        gathering = None
        if ctx.plan.sequence_parallel and trained:
            input, gathering = all_gather(input, group=ctx.plan.group, async_op=True)
        wide_RO, fold = fold_leading(grad_output)
        grad_RO = wide_RO.to(ctx.dtype)
        finish = _start_dgrad(grad_RO, weights, kept, fold=fold, plan=ctx.plan) if needs_input else None
        if gathering is not None:
            gathering.wait()
        grads: Gradients = [None] * len(needs_parts)
        if trained:
            grad_RP = _columns(grad_RO, ctx.sizes, chosen=trained)
            for i, grad in zip(trained, _weight_gradients(ctx, grad_RP, fold, input, trained=trained), strict=True):
                grads[i] = grad
        if any(needs_parts[ctx.num_parts :]):
            grads[ctx.num_parts :] = _bias_gradients(ctx, wide_RO, repeats=fold.repeats)
        return finish() if finish else None, *[None] * 5, *grads


def _start_dgrad(
    grad_RO: torch.Tensor, weights: list[torch.Tensor], kept: torch.Tensor | None, *, fold: Fold, plan: ProductPlan
) -> Callable[[], torch.Tensor]:
    if torch.compiler.is_compiling():  # where the parts lie is seen when the graph runs
        product_RI = gemm.joined_dgrad(grad_RO, weights, kept, in_fp32=plan.dgrad_in_fp32)
        return start_reduction(product_RI, fold=fold, plan=plan, dtype=grad_RO.dtype)
    return start_dgrad(grad_RO, join(weights) if kept is None else kept, fold=fold, plan=plan)


def _columns(grad_RO: torch.Tensor, sizes: Sequence[int], *, chosen: Sequence[int]) -> torch.Tensor:
    """Return the columns of the chosen parts beside each other: a view if they are neighbours, else a copy of them."""
    parts = grad_RO.split(list(sizes), dim=1)
    if list(chosen) == list(range(chosen[0], chosen[-1] + 1)):
        start = sum(sizes[: chosen[0]])
        return grad_RO.narrow(1, start, sum(sizes[i] for i in chosen))
    grad_RP = grad_RO.new_empty(grad_RO.shape[0], sum(sizes[i] for i in chosen))
    for columns, i in zip(grad_RP.split([sizes[i] for i in chosen], dim=1), chosen, strict=True):
        columns.copy_(parts[i])
    return grad_RP


def _weight_gradients(
    ctx: Any, grad_RP: torch.Tensor, fold: Fold, total_input: torch.Tensor, *, trained: Sequence[int]
) -> Sequence[torch.Tensor | None]:
    grad_output = fold.unfold(grad_RP)
    if ctx.graph_targets is not None:
        return deliver_all_in_graph(ctx.graph_targets, grad_output, total_input)
    if ctx.owners is not None:
        return deliver_weight_gradients([ctx.owners[i] for i in trained], grad_output, total_input)
    dtype = ctx.dtype
    for i in trained:
        dtype = torch.promote_types(dtype, ctx.grad_dtypes[i])
    full = gemm.wgrad(grad_output, total_input, dtype=dtype)
    rows = full.split([ctx.sizes[i] for i in trained])
    return [part.to(ctx.grad_dtypes[i]) for i, part in zip(trained, rows, strict=True)]


def _bias_gradients(ctx: Any, grad_RO: torch.Tensor, *, repeats: int) -> Gradients:
    needs, dtypes = ctx.needs_input_grad[6 + ctx.num_parts :], ctx.grad_dtypes[ctx.num_parts :]
    dtype = dtypes[0]
    for other in dtypes:
        dtype = torch.promote_types(dtype, other)
    parts = gemm.bias_gradient(grad_RO, repeats=repeats, dtype=dtype).split(ctx.sizes)
    return [part.to(dtypes[i]) if needs[i] else None for i, part in enumerate(parts)]
