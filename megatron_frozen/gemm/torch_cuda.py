"""Native torch products with a wider output: ``mm`` and ``addmm`` with ``out_dtype=`` on CUDA.

Overwriting came in torch 2.8, accumulating into the wider dtype in 2.10 (pytorch PR 167931). Strided operands are
read in place. Not run on this project's CPU-only machines."""

from __future__ import annotations

import torch

from megatron_frozen.gemm.request import Request, add_bias_, bias_sum, oriented

NAME = "torch_cuda"
_OVERWRITES, _ACCUMULATES = (2, 8), (2, 10)


def _version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def unsupported(request: Request) -> str | None:
    """Return why not: device, torch version, dtypes."""
    if request.device_type != "cuda":
        return "torch has products with out_dtype on CUDA only"
    needed = _ACCUMULATES if request.accumulate else _OVERWRITES
    if _version() < needed:
        return f"torch {torch.__version__} lacks it; {needed[0]}.{needed[1]} has it"
    low = request.operand_dtype in (torch.bfloat16, torch.float16)
    if request.output_dtype != request.operand_dtype and not (low and request.output_dtype == torch.float32):
        return "torch widens bfloat16 and float16 operands to float32 only"
    return None if torch.cuda.is_available() else "torch finds no CUDA device"


def run(
    request: Request, left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor | None:
    """Write the product; ``out`` is passed as its own addend, since torch copies any other tensor first."""
    A, B = oriented(request.product, left, right)
    if request.accumulate:
        torch.addmm(out, A, B, out_dtype=out.dtype, out=out)
    else:
        torch.mm(A, B, out_dtype=out.dtype, out=out)
    add_bias_(request, out, bias)
    return bias_sum(request, left)
