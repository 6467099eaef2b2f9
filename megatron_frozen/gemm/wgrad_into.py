"""The weight gradient written straight into a buffer that may be wider than the operands.

Shape suffixes: T = tokens, I = in features, O = out features.
"""

from __future__ import annotations

import torch

from megatron_frozen.errors import LayoutError
from megatron_frozen.gemm.request import Product, Request
from megatron_frozen.gemm.select import multiply
from megatron_frozen.gemm.wgrad_operands import wgrad_operands


def wgrad_into(
    main_grad: torch.Tensor, grad_output: torch.Tensor, total_input: torch.Tensor, *, accumulate: bool
) -> None:
    """Write dY^T X into ``main_grad`` in place: added to what it holds if ``accumulate``, else over it.

    main_grad: [O, I], floating point, any strides; grad_output: [..., O]; total_input: [..., I], with the leading
    dims of grad_output and its dtype. Products and sums are made in main_grad's dtype, or wider, by the backend that
    ``select`` chooses, and rounded to it once per call; ``wgrad_operands`` says what is copied or summed before.
    Overwriting clears NaN and, with zero tokens, writes zeros.
    No collectives. The same as apex's ``wgrad_gemm_accum_fp32`` and as Transformer Engine's
    ``general_gemm(layout="NT", accumulate=)``.

    Raises LayoutError where a shape or dtype does not fit, before anything is written.
    """
    check_main_grad(main_grad, shape=(grad_output.shape[-1], total_input.shape[-1]))
    if grad_output.dtype != total_input.dtype:
        raise LayoutError(
            f"a weight gradient was asked of operands of dtypes {grad_output.dtype} and {total_input.dtype}; "
            f"cast them to one dtype"
        )
    request = Request(
        product=Product.WGRAD,
        device_type=main_grad.device.type,
        operand_dtype=grad_output.dtype,
        output_dtype=main_grad.dtype,
        accumulate=accumulate,
    )
    multiply(request, *wgrad_operands(grad_output, total_input, dtype=main_grad.dtype), out=main_grad)


def check_main_grad(main_grad: torch.Tensor, *, shape: tuple[int, int]) -> None:
    """Refuse a buffer that cannot take a weight gradient of ``shape`` [O, I]. Raises LayoutError."""
    if tuple(main_grad.shape) != shape:
        raise LayoutError(
            f"main_grad has shape {list(main_grad.shape)} for a weight gradient of shape {list(shape)}; "
            f"give a buffer of the weight's shape"
        )
    if not main_grad.is_floating_point():
        raise LayoutError(f"main_grad has dtype {main_grad.dtype}; give a floating-point buffer, float32 by preference")
