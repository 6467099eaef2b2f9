"""bf16 operands into fp32 by the oneDNN block kernel inside torch's CPU library, at the speed of the bf16 product.

The loop over blocks, its packing and its threads are C++; see ``kernels``."""

from __future__ import annotations

import torch

from megatron_frozen import kernels
from megatron_frozen.gemm import reference
from megatron_frozen.gemm.request import Request, add_bias_, bias_sum, oriented

NAME = "brgemm"
_FAR = 2**22  # elements; the kernel's own code ends the process where rows of C lie 2**24 apart


def unsupported(request: Request) -> str | None:
    """Return why not: device, dtypes, CPU, no C++ compiler, a torch without the kernel or with another one."""
    if request.device_type != "cpu":
        return "the kernel runs on the CPU"
    if request.operand_dtype != torch.bfloat16 or request.output_dtype != torch.float32:
        return "it multiplies bfloat16 operands into float32 only"
    return kernels.absent()


def run(
    request: Request, left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor | None:
    """Write the product; packs chunks of the operands in bf16, and nothing as large as an operand in fp32."""
    if max(out.stride()) >= _FAR:
        return reference.run(request, left, right, out=out, bias=bias)
    A, B = oriented(request.product, left, right)
    if out.stride(1) == 1 or out.shape[1] == 1:
        kernels.multiply_into(out, A, B, accumulate=request.accumulate)
    elif out.stride(0) == 1:  # a transposed buffer: C^T = B^T A^T
        kernels.multiply_into(out.t(), B.t(), A.t(), accumulate=request.accumulate)
    else:
        dense = out.contiguous()
        kernels.multiply_into(dense, A, B, accumulate=request.accumulate)
        out.copy_(dense)
    add_bias_(request, out, bias)
    return bias_sum(request, left)
