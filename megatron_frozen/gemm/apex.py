"""apex's ``fused_weight_gradient_mlp_cuda``: weight gradients added to an fp32 or 16-bit buffer.

NVIDIA's apex builds the extension from source; the project of that name on the package index is another one, so
nothing here can be installed by name. The kernel checks nothing at all, not even the device. Not run on this
project's machines, which have no CUDA."""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import Any

import torch

from megatron_frozen.gemm.foreign import dense_operands, dense_output, import_failure
from megatron_frozen.gemm.request import Product, Request, bias_sum

NAME = "apex"
_LOW = (torch.bfloat16, torch.float16)


def unsupported(request: Request) -> str | None:
    """Return why not: device type, product, dtypes, the import, no CUDA device."""
    if request.device_type != "cuda":
        return "apex multiplies on CUDA only"
    if request.product is not Product.WGRAD or not request.accumulate:
        return "apex only adds a weight gradient to what its buffer holds"
    into_fp32 = request.output_dtype == torch.float32 and request.operand_dtype in (*_LOW, torch.float32)
    into_low = request.output_dtype == request.operand_dtype and request.operand_dtype in _LOW
    if not (into_fp32 or into_low):
        return "apex adds bfloat16, float16 and float32 operands to float32, and the first two to their own dtype"
    _, _, failure = _installed()
    if failure is not None:
        return f"{failure}; it is built from the source of NVIDIA's apex"
    return None if torch.cuda.is_available() else "torch finds no CUDA device"


@lru_cache(maxsize=1)
def _installed() -> tuple[Any, Any, str | None]:
    """Return the kernels into fp32 and into 16 bits, and why there are none; tried once."""
    try:
        kernels = importlib.import_module("fused_weight_gradient_mlp_cuda")
        return kernels.wgrad_gemm_accum_fp32, kernels.wgrad_gemm_accum_fp16, None
    except Exception as error:  # an extension built for another torch or CUDA raises ImportError or OSError
        return None, None, import_failure(error, library="fused_weight_gradient_mlp_cuda")


def run(
    request: Request, left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor | None:
    """Add the weight gradient; copies operands with gaps, which the kernel would misread, and an output with gaps
    twice.

    The kernel's "fp16" form serves bfloat16 as well. fp32 operands follow torch's switch for TF32, by torch's cuBLAS
    handle."""
    into_fp32, into_low, _ = _installed()
    add = into_fp32 if out.dtype == torch.float32 else into_low
    grad_output_TO, input_TI = dense_operands(request, left, right, out=out, library="apex")
    with torch.cuda.device_of(out), dense_output(request, out) as dense:
        add(input_TI, grad_output_TO, dense)
    return bias_sum(request, left)
