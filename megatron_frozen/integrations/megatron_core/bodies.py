"""What the patched autograd classes of megatron-core run in place of their own forward and backward.

Each function here returns a pair (forward, backward) for one of upstream's classes; upstream's pair is an argument, and
what is not ours to do goes to it. The classes stay upstream's own objects, so whoever holds one runs the new pair.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from megatron_frozen import gemm
from megatron_frozen.autograd import LinearWithFrozenWeight, LinearWithGradAccumulationAndAsyncCommunication
from megatron_frozen.autograd.grad_dtype import kept_grad_dtype
from megatron_frozen.autograd.linear_products import plan_for
from megatron_frozen.layout import fold_leading
from megatron_frozen.main_grad import check_product, deliver_weight_gradient, graph_target

Body = Callable[..., Any]
Pair = tuple[Body, Body]


def _own_pair(function: type[torch.autograd.Function]) -> Pair:
    """Return forward and backward as plain functions: torch.compile does not enter one class by way of another."""
    return vars(function)["forward"].__func__, vars(function)["backward"].__func__


_FROZEN_FORWARD, _FROZEN_BACKWARD = _own_pair(LinearWithFrozenWeight)
_TRAINABLE_FORWARD, _TRAINABLE_BACKWARD = _own_pair(LinearWithGradAccumulationAndAsyncCommunication)


def names_of(forward: Body) -> tuple[str, ...]:
    """Return the names of what ``apply`` takes: the parameters of ``forward`` after the context."""
    return tuple(inspect.signature(forward).parameters)[1:]


def frozen_pair(forward: Body, backward: Body) -> Pair:
    """Return our frozen linear for a class whose products run as batched ones; upstream has gathered X already."""
    names = names_of(forward)

    def patched_forward(ctx: Any, *values: Any) -> torch.Tensor:
        given = dict(zip(names, values, strict=True))
        ctx.is_ours = True
        input_, weight, bias, late_bias = _operands(given["input"], given["weight"], given["bias"])
        plan = plan_for(given["tp_group"], allreduce=given["allreduce_dgrad"], sequence_parallel=False)
        output = _FROZEN_FORWARD(ctx, input_, weight, bias, plan.allreduce, plan.group, plan, _wider(given, input_))
        return output if late_bias is None else output + late_bias

    def patched_backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if not _is_ours(ctx):
            return backward(ctx, grad_output)
        return _FROZEN_BACKWARD(ctx, grad_output)[: len(names)]

    return patched_forward, patched_backward


def folded_forward(forward: Body) -> Body:
    """Return upstream's frozen forward over a folded X: it saves W alone, so its own backward fits."""

    def patched_forward(ctx: Any, input: torch.Tensor, *values: Any) -> torch.Tensor:
        input_RI, fold = fold_leading(input)
        return fold.unfold_output(forward(ctx, input_RI, *values))

    return patched_forward


def with_bias_gradient(backward: Body) -> Body:
    """Return upstream's frozen backward and, where a bias trains and it gave none, the bias gradient beside it."""

    def patched_backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_input, grad_weight, grad_bias, *others = backward(ctx, grad_output)
        if grad_bias is None and ctx.needs_input_grad[2]:
            grad_RO, fold = fold_leading(grad_output)
            grad_bias = gemm.bias_gradient(grad_RO, repeats=fold.repeats)
        return grad_input, grad_weight, grad_bias, *others

    return patched_backward


def trainable_pair(forward: Body, backward: Body) -> Pair:
    """Return our trainable linear: folded products, and the fused write into ``main_grad`` by our backends.

    A weight that generalised tensor parallelism cuts (``gtp_remat_size`` above 1) is gathered and reduced by upstream's
    own pair.
    """
    names = names_of(forward)

    def patched_forward(ctx: Any, *values: Any) -> torch.Tensor:
        given = dict(zip(names, values, strict=True))
        ctx.is_ours = given.get("gtp_remat_size", 1) == 1
        if not ctx.is_ours:
            return forward(ctx, *values)
        weight, is_fused = given["weight"], given["gradient_accumulation_fusion"]
        check_product(weight, is_put_off=given["grad_output_buffer"] is not None)
        input_, cast_weight, bias, late_bias = _operands(given["input"], weight, given["bias"])
        plan = plan_for(
            given["tp_group"], allreduce=given["allreduce_dgrad"], sequence_parallel=given["sequence_parallel"]
        )
        is_traced = torch.compiler.is_compiling() and is_fused and weight.requires_grad
        output = _TRAINABLE_FORWARD(
            ctx, input_, cast_weight, bias, is_fused, plan.allreduce, plan.sequence_parallel,
            given["grad_output_buffer"], given["wgrad_deferral_limit"], plan.group, plan,
            graph_target(weight) if is_traced else None, _wider(given, input_),
        )  # fmt: skip
        # Of the parameter itself where autocast made a copy of it.
        ctx.weight, ctx.weight_grad_dtype = weight if is_fused else None, kept_grad_dtype(weight)
        return output if late_bias is None else output + late_bias

    def patched_backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if not _is_ours(ctx):
            return backward(ctx, grad_output)
        grad_input, grad_weight, *others = _TRAINABLE_BACKWARD(ctx, grad_output)[: len(names)]
        if grad_weight is None and ctx.weight is not None and _is_put_off(ctx, grad_output):
            grad_weight = _no_gradient_yet(ctx.weight, grad_output)
        return grad_input, grad_weight, *others

    return patched_forward, patched_backward


def _is_ours(ctx: Any) -> bool:
    """Return whether our forward filled this context; upstream's did where the graph is older than the patch."""
    return getattr(ctx, "is_ours", False)


def _is_put_off(ctx: Any, grad_output: torch.Tensor) -> bool:
    """Return whether this backward has left its weight gradient to ``drain_embedding_wgrad_compute``."""
    return bool(ctx.grad_output_buffer) and ctx.grad_output_buffer[-1] is grad_output


def _no_gradient_yet(weight: torch.Tensor, grad_output: torch.Tensor) -> torch.Tensor | None:
    """Answer the wrapper of a fused weight as after a write, by one of no tokens: an absent gradient it may refuse."""
    num_out, num_in = weight.shape
    return deliver_weight_gradient(weight, grad_output.new_empty(0, num_out), grad_output.new_empty(0, num_in))


def _operands(
    input_: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Cast as autocast would; a bias of another dtype comes last, to be added to the product, which it may widen."""
    if gemm.autocast_is_on(input_) and input_.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(input_.device.type)
        input_, weight = input_.to(dtype), weight.to(dtype)
    if bias is None or bias.dtype == input_.dtype:
        return input_, weight, bias, None
    return input_, weight, None, bias


def _wider(given: dict[str, Any], input_: torch.Tensor) -> torch.dtype | None:
    """Return the ``output_dtype`` that newer releases pass, where it is not the operands' own."""
    wish = given.get("output_dtype")
    return None if wish == input_.dtype else wish
