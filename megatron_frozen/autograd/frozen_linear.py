"""The linear product whose weight is frozen.

Shape suffixes: R = rows of a fold.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_frozen import gemm
from megatron_frozen.autograd.linear_products import ProductPlan, dgrad_in_order, forward_product, start_dgrad
from megatron_frozen.autograd.once import once_differentiable
from megatron_frozen.comm.groups import Group
from megatron_frozen.layout import fold_leading


class LinearWithFrozenWeight(torch.autograd.Function):
    """Y = X W^T + b with a frozen W, each product one 2-D GEMM whatever the layout of X and dY.

    Shapes: X [..., I] (its sequence shard [S/ranks, ..., I] under sequence parallelism), W [O, I], b [O], Y [..., O].
    Forward: X folded to [R, I]; Y = X W^T + b, in ``output_dtype`` straight from the operands if that is wider.
    Dgrad: dY folded to [R, O] and cast to W's dtype; dX = dY W.
    Wgrad: none; W gets no gradient.
    Dbias: sum of dY over all leading dims, if b requires grad.
    Collectives: those of ``plan``: forward, an all-gather of X under sequence parallelism; backward, an all-reduce of
        the 2-D dX, in pieces of rows that travel while the next is multiplied, or its reduce-scatter.
    Saved: W alone.
    Why: a matmul over dims that do not collapse by stride runs one tiny product per token, and under LoRA this
        product is nearly the whole backward. dX is rounded to dY's dtype once, after the sum over ranks.

    The first five arguments of ``apply`` are those of
    ``megatron.core.tensor_parallel.layers.LinearWithFrozenWeight``; the others are ours: a ``plan`` stands in the place
    of ``allreduce_dgrad`` and ``tp_group``. Operands share one dtype of bf16, fp16, fp32, fp64."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        allreduce_dgrad: bool,  # noqa: FBT001 - Megatron's signature
        tp_group: Group,
        plan: ProductPlan | None = None,
        output_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Return Y; see the class."""
        ctx.save_for_backward(weight)
        ctx.plan = plan or ProductPlan(group=tp_group, allreduce=allreduce_dgrad)
        return forward_product(input, weight, bias, plan=ctx.plan, output_dtype=output_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return dX and db; see the class."""
        (weight,) = ctx.saved_tensors
        needs_input, _, needs_bias = ctx.needs_input_grad[:3]
        if needs_input and not needs_bias:
            dX = dgrad_in_order(grad_output, weight, plan=ctx.plan)
            if dX is not None:
                return dX, *(None,) * 6
        wide_RO, fold = fold_leading(grad_output)
        grad_RO = wide_RO if wide_RO.dtype is weight.dtype else wide_RO.to(weight.dtype)
        finish = start_dgrad(grad_RO, weight, fold=fold, plan=ctx.plan) if needs_input else None
        grad_bias = None
        if needs_bias:
            grad_bias = gemm.bias_gradient(wide_RO, repeats=fold.repeats, dtype=weight.dtype)
        return finish() if finish else None, None, grad_bias, *(None,) * 4
