"""The portable backend: operands upcast to the output's dtype, then one product. The oracle of the others."""

from __future__ import annotations

import torch

from megatron_frozen.gemm.request import Request, add_bias_, bias_sum, oriented

NAME = "reference"


def unsupported(request: Request) -> str | None:
    """Return None for all floating-point requests."""
    if not (request.operand_dtype.is_floating_point and request.output_dtype.is_floating_point):
        return "it multiplies floating-point tensors only"
    return None


def run(
    request: Request, left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor | None:
    """Write the product; makes copies of both operands in the output's dtype where that is another."""
    A, B = oriented(request.product, left, right)
    A, B = A.to(out.dtype), B.to(out.dtype)
    if request.accumulate:
        out.addmm_(A, B)
    else:
        torch.mm(A, B, out=out)
    add_bias_(request, out, bias)
    return bias_sum(request, left)
