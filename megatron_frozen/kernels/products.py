"""Products of bf16 into fp32; see ``csrc/products.cpp``."""

from __future__ import annotations

import ctypes

import torch

from megatron_frozen.kernels.call import LONG, POINTER, run


class _Matrix(ctypes.Structure):
    _fields_ = (("at", POINTER), ("row_stride", LONG), ("column_stride", LONG))


def multiply_into(out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, *, accumulate: bool) -> None:
    """Write A[M, K] B[K, N] of bf16 over fp32 ``out`` [M, N] with dense rows, or add it.

    An operand of which neither dim is dense is copied.
    """
    (M, K), N = A.shape, B.shape[1]
    assert B.shape[0] == K and out.shape == (M, N), f"{A.shape} by {B.shape} got an output {out.shape}"  # noqa: PT018
    A, B = (matrix if 1 in matrix.stride() else matrix.contiguous() for matrix in (A, B))
    if K == 0 and not accumulate:
        out.zero_()
    if out.numel() > 0:
        matrices = [ctypes.byref(_Matrix(matrix.data_ptr(), *matrix.stride())) for matrix in (A, B)]
        sizes, ldc = map(LONG, (M, N, K)), LONG(max(out.stride(0), N))  # of one row the stride may be anything
        run("mf_multiply", *sizes, *matrices, POINTER(out.data_ptr()), ldc, ctypes.c_bool(accumulate))
