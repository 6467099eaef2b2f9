"""Transformer Engine's ``general_gemm``, 2.0 to 2.20 and on: cuBLASLt with fp32 sums, biases in the epilogue.

Everything after the operands goes by keyword, since ``workspace`` was the third argument through 2.9 and is gone from
2.10 on. ``get_workspace`` came and went with it, so its presence decides. Not run on this project's machines, which
have no CUDA: tests run the function of several releases' wheels up to its C++ call."""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import Any

import torch

from megatron_frozen.gemm.foreign import dense_operands, dense_output, import_failure
from megatron_frozen.gemm.request import Product, Request

NAME = "transformer_engine"


def unsupported(request: Request) -> str | None:
    """Return why not: device type, dtypes, the import, no CUDA device."""
    if request.device_type != "cuda":
        return "Transformer Engine multiplies on CUDA only"
    if request.operand_dtype not in (torch.bfloat16, torch.float16):
        # fp32 would run in TF32, whatever torch's own switch for that says; fp64 is none of its types.
        return "it is used for bfloat16 and float16 operands only, as it rounds float32 ones to TF32"
    if request.output_dtype not in (request.operand_dtype, torch.float32):
        return "its output is float32 or of the operands' dtype"
    _, _, failure = _installed()
    if failure is not None:
        return failure
    return None if torch.cuda.is_available() else "torch finds no CUDA device"


@lru_cache(maxsize=1)
def _installed() -> tuple[Any, Any, str | None]:
    """Return ``general_gemm``, ``get_workspace`` where this release has it, and why there is neither; tried once."""
    try:
        general_gemm = importlib.import_module("transformer_engine.pytorch.cpp_extensions").general_gemm
    except Exception as error:  # its empty meta package raises RuntimeError, a missing CUDA library OSError
        return None, None, import_failure(error, library=NAME)
    try:
        return general_gemm, importlib.import_module("transformer_engine.pytorch.module.base").get_workspace, None
    except (ImportError, AttributeError):
        return general_gemm, None, None


def run(
    request: Request, left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor | None:
    """Write the product; copies operands with gaps, which the kernel would misread, and an output with gaps twice."""
    general_gemm, get_workspace, _ = _installed()
    left, right = dense_operands(request, left, right, out=out, library="Transformer Engine")
    # Its workspace, where the caller brings one, also says on which device to run.
    with torch.cuda.device_of(out), dense_output(request, out) as dense:
        workspace = {} if get_workspace is None else {"workspace": _on_device(get_workspace(), out.device)}
        _, bias_gradient, _, _ = general_gemm(
            right,
            left,
            layout=request.product.value,
            out=dense,
            accumulate=request.accumulate,
            grad=request.product is not Product.FORWARD,
            bias=_bias(request, out, bias),
            **workspace,
        )
    return bias_gradient


def _bias(request: Request, out: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor | None:
    """Return the epilogue's bias: read in the output's dtype, or in a weight gradient a sign that one is wanted."""
    if not request.with_bias or request.product is Product.DGRAD:
        return None
    if request.product is Product.WGRAD:
        return out.new_empty(out.shape[0])
    assert bias_O is not None
    assert tuple(bias_O.shape) == out.shape[1:], f"a bias {list(bias_O.shape)} for an output {list(out.shape)}"
    return bias_O.to(out).contiguous()


def _on_device(workspace: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return Transformer Engine's one workspace, or one like it where that lies on another device."""
    return workspace if workspace.device == device else torch.empty_like(workspace, device=device)
