"""The products of a linear layer, each one 2-D GEMM, outside autocast and outside autograd.

Shape suffixes: T = tokens, R = rows, maybe fewer than tokens, I = in features, O = out features.
"""

from __future__ import annotations

import torch

from megatron_frozen.gemm.autocast import autocast_is_on, without_autocast
from megatron_frozen.gemm.request import Product, Request, result_shape
from megatron_frozen.gemm.select import multiply
from megatron_frozen.gemm.wgrad_operands import wgrad_operands

LOW_PRECISION = (torch.bfloat16, torch.float16)


def _mm(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    if autocast_is_on(left):
        with without_autocast(left):
            return torch.mm(left, right, out=out)
    return torch.mm(left, right) if out is None else torch.mm(left, right, out=out)


def _widened(
    product: Product,
    left: torch.Tensor,
    right: torch.Tensor,
    *,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the product in a wider ``dtype`` than its operands', by the chosen backend, with no copy in that dtype.

    A compiled graph can hold no call by address, so there it calls the operator below.
    """
    if torch.compiler.is_compiling():
        return widened_product(left, right, bias, product.value, dtype)
    return _multiplied(product, left, right, dtype=dtype, bias=bias, out=out)


def _multiplied(
    product: Product,
    left: torch.Tensor,
    right: torch.Tensor,
    *,
    dtype: torch.dtype,
    bias: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    request = Request(
        product=product,
        device_type=left.device.type,
        operand_dtype=left.dtype,
        output_dtype=dtype,
        with_bias=bias is not None,
    )
    return multiply(request, left, right, bias=bias, out=out)[0]


@torch.library.custom_op("megatron_frozen::widened_product", mutates_args=())
def widened_product(
    left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None, layout: str, dtype: torch.dtype
) -> torch.Tensor:
    """Return the product that the ``Product`` of value ``layout`` names, in ``dtype``: what eager code computes, hidden
    from a graph, which would upcast the operands. Not differentiable. No collectives."""
    return _multiplied(Product(layout), left, right, dtype=dtype, bias=bias)


@widened_product.register_fake
def _(
    left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None, layout: str, dtype: torch.dtype
) -> torch.Tensor:
    del bias
    return left.new_empty(result_shape(Product(layout), left, right), dtype=dtype)


def forward(
    input_TI: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return X W^T + b as [T, O], in the operands' dtype or a wider ``dtype``.

    The bias is added before the one rounding, as in F.linear. ``out`` is as in ``dgrad``.
    """
    if dtype not in (None, input_TI.dtype):
        return _widened(Product.FORWARD, input_TI, weight_OI, dtype=dtype, bias=bias_O, out=out)
    if bias_O is None:
        return _mm(input_TI, weight_OI.t(), out=out)
    with without_autocast(input_TI):
        return torch.addmm(bias_O, input_TI, weight_OI.t(), out=out)


def forward_in_order(input_: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    """Return X W^T [s, b, O] of an X [s, b, I] whose leading dims collapse as they stand: one product, as torch folds
    such an X by itself. Autocast must be off."""
    return torch.nn.functional.linear(input_, weight_OI)


def dgrad(
    grad_output_TO: torch.Tensor, weight_OI: torch.Tensor, *, in_fp32: bool = False, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return dX = dY W as [T, I], in the operands' dtype or, ``in_fp32``, straight into fp32.

    ``out``, of that shape and dtype, is what it is written into; for eager code outside autograd, as a backward is."""
    if in_fp32 and grad_output_TO.dtype in LOW_PRECISION:
        return _widened(Product.DGRAD, grad_output_TO, weight_OI, dtype=torch.float32, out=out)
    return _mm(grad_output_TO, weight_OI, out=out)


def dgrad_in_order(grad_output: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    """Return dX = dY W [s, b, I] of a dY [s, b, O], as ``forward_in_order`` returns Y of such an X."""
    return torch.matmul(grad_output, weight_OI)


def wgrad(grad_output: torch.Tensor, total_input: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return dW = dY^T X as [O, I] of [..., O] and [..., I], with equal leading dims, which it sums over.

    In the operands' dtype or a wider ``dtype``, with one rounding to it. What is copied: see ``wgrad_operands``.

    Raises LayoutError where the leading dims differ."""
    dtype = dtype or total_input.dtype
    grad_RO, input_RI = wgrad_operands(grad_output, total_input, dtype=dtype)
    if dtype is not input_RI.dtype:
        return _widened(Product.WGRAD, grad_RO, input_RI, dtype=dtype)
    return _mm(grad_RO.t(), input_RI)


def add_product_(total_TN: torch.Tensor, left_TK: torch.Tensor, right_KN: torch.Tensor) -> None:
    """Add left right to ``total_TN`` in place, in the operands' dtype: no pass over the total but the product's own."""
    with without_autocast(total_TN):
        total_TN.addmm_(left_TK, right_KN)


def bias_gradient(grad_output_RO: torch.Tensor, *, repeats: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return db [O]: the sum over rows, each counted ``repeats`` times, summed in at least fp32 and rounded once, to
    the operand's dtype or to ``dtype``."""
    dtype = dtype or grad_output_RO.dtype
    if repeats == 1:
        return grad_output_RO.sum(0, dtype=dtype)
    total = grad_output_RO.sum(0, dtype=torch.promote_types(dtype, torch.float32))
    return total.mul_(repeats).to(dtype)
