"""MKL's products of bf16 or fp16 operands into fp32, from torch's own library on x86 CPUs.

``cblas_gemm_bf16bf16f32`` and ``cblas_gemm_f16f16f32`` (oneMKL C reference, "cblas_gemm_*"): alpha and beta,
transposes and leading dimensions, so strided operands and accumulation cost no copy."""

from __future__ import annotations

import ctypes

import torch

from megatron_frozen.errors import LayoutError
from megatron_frozen.gemm.request import INT32_MAX, Request, add_bias_, bias_sum, oriented
from megatron_frozen.kernels import symbol
from megatron_frozen.layout import is_gemm_operand

NAME = "mkl"
_SYMBOLS = {torch.bfloat16: "cblas_gemm_bf16bf16f32", torch.float16: "cblas_gemm_f16f16f32"}
_ROW_MAJOR, _PLAIN, _TRANSPOSED = 101, 111, 112  # CBLAS_LAYOUT and CBLAS_TRANSPOSE
_INT, _FLOAT, _POINTER = ctypes.c_int, ctypes.c_float, ctypes.c_void_p
# layout, transA, transB, M, N, K, alpha, A, lda, B, ldb, beta, C, ldc
_ARGUMENTS = (*[_INT] * 6, _FLOAT, _POINTER, _INT, _POINTER, _INT, _FLOAT, _POINTER, _INT)


def unsupported(request: Request) -> str | None:
    """Return why not: device, dtypes, a torch without the symbol."""
    if request.device_type != "cpu":
        return "MKL runs on the CPU"
    if request.operand_dtype not in _SYMBOLS or request.output_dtype != torch.float32:
        return "it multiplies bfloat16 or float16 operands into float32 only"
    name = _SYMBOLS[request.operand_dtype]
    if symbol(name, *_ARGUMENTS) is None:
        return f"this build of torch exports no {name}, as builds for other than x86 do not"
    return None


def run(
    request: Request, left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor | None:
    """Write the product; an operand that no leading dimension describes is copied, an output likewise and written
    back.
    """
    A, B = oriented(request.product, left, right)
    _gemm(request, A, B, out=out)
    add_bias_(request, out, bias)
    return bias_sum(request, left)


def _gemm(request: Request, A: torch.Tensor, B: torch.Tensor, *, out: torch.Tensor) -> None:
    if out.stride(1) != 1 and out.stride(0) == 1:  # a transposed buffer: C^T = B^T A^T
        A, B, out = B.t(), A.t(), out.t()
    if not _is_row_major(out):
        dense = out.contiguous()
        _gemm(request, A, B, out=dense)
        out.copy_(dense)
        return
    A, transA, lda = _described(A)
    B, transB, ldb = _described(B)
    (M, K), N, ldc = A.shape, B.shape[1], _leading(out)
    if max(M, N, K, lda, ldb, ldc) > INT32_MAX:
        raise LayoutError(
            f"MKL was given a product of [{M}, {K}] and [{K}, {N}] with a size or stride above {INT32_MAX}, "
            f"its integers' limit; cut the tokens into parts"
        )
    symbol(_SYMBOLS[request.operand_dtype], *_ARGUMENTS)(
        _ROW_MAJOR, transA, transB, M, N, K, 1.0, A.data_ptr(), lda, B.data_ptr(), ldb,
        float(request.accumulate), out.data_ptr(), ldc,
    )  # fmt: skip


def _is_row_major(matrix: torch.Tensor) -> bool:
    rows, columns = matrix.shape
    return (columns == 1 or matrix.stride(1) == 1) and (rows == 1 or matrix.stride(0) >= columns)


def _leading(matrix: torch.Tensor) -> int:
    rows, columns = matrix.shape
    return columns if rows == 1 else matrix.stride(0)


def _described(matrix: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """Return the matrix (a dense copy if need be), its CBLAS transpose flag and its leading dimension."""
    rows, columns = matrix.shape
    row_stride, column_stride = matrix.stride()
    if not is_gemm_operand(rows, columns, row_stride=row_stride, column_stride=column_stride):
        matrix = matrix.contiguous()
    if _is_row_major(matrix):
        return matrix, _PLAIN, _leading(matrix)
    return matrix, _TRANSPOSED, _leading(matrix.t())
