"""bf16 operands into fp32 by the oneDNN block kernel inside torch's CPU library, at the speed of the bf16 product.

``at::native::cpublas::brgemm`` multiplies one block: C[M, N] (+)= A[M, K] B[K, N], fp32 C, bf16 A row-major and B
with pairs of rows interleaved ("VNNI"). torch's CPU attention runs on it. It uses AVX512-BF16 and AMX, where MKL's
product has a fast path on AMX only. Here it is looped over blocks: along K in chunks, each packed once, along M or N
on torch's number of threads. Its mangled name holds the types of its arguments, and one product is checked before the
first use, so that another torch finds it absent or wrong, not different."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import torch

from megatron_frozen.gemm.native import symbol
from megatron_frozen.gemm.request import Request, add_bias_, bias_sum, oriented

NAME = "brgemm"
_BLOCK_NAME = "_ZN2at6native7cpublas6brgemmEllllllbPKN3c108BFloat16ES5_Pfb"
_RELEASE_NAME = "_ZN2at6native7cpublas14brgemm_releaseEb"
_LONG, _BOOL, _POINTER = ctypes.c_long, ctypes.c_bool, ctypes.c_void_p
# M, N, K, lda, ldb, ldc, add to C, A, B, C, B is packed
_ARGUMENTS = (*[_LONG] * 6, _BOOL, _POINTER, _POINTER, _POINTER, _BOOL)
CHUNK_K, BLOCK_M, BLOCK_N = 512, 512, 64  # measured: within 10% of the best of 256..1024, 32..1024, 32..128
_A_BYTES, _B_BYTES, _C_BYTES = 2, 4, 4  # per column of A, of packed B (a pair of rows), of C


def unsupported(request: Request) -> str | None:
    """Return why not: device, dtypes, CPU, a torch without the kernel or with another one."""
    if request.device_type != "cpu":
        return "the kernel runs on the CPU"
    if request.operand_dtype != torch.bfloat16 or request.output_dtype != torch.float32:
        return "it multiplies bfloat16 operands into float32 only"
    return _absent()


@lru_cache(maxsize=1)
def _absent() -> str | None:
    if not (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()):
        return "this CPU has neither AVX512-BF16 nor AMX"
    if symbol(_BLOCK_NAME, *_ARGUMENTS) is None or symbol(_RELEASE_NAME, _BOOL) is None:
        return f"torch {torch.__version__} exports no such kernel"
    A, B = (torch.arange(12.0) - 5).view(3, 4).bfloat16(), (torch.arange(20.0) - 9).view(4, 5).bfloat16()
    out = torch.ones(3, 5)
    _gemm(A, B, out=out, accumulate=True)
    if not torch.equal(out, (A.float().unsqueeze(2) * B.float()).sum(1) + 1):
        return f"the kernel of torch {torch.__version__} gave a wrong product when it was tried"
    return None


def run(
    request: Request, left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor | None:
    """Write the product; packs chunks of the operands in bf16, and nothing as large as an operand in fp32."""
    A, B = oriented(request.product, left, right)
    if out.stride(1) == 1 or out.shape[1] == 1:
        _gemm(A, B, out=out, accumulate=request.accumulate)
    elif out.stride(0) == 1:  # a transposed buffer: C^T = B^T A^T
        _gemm(B.t(), A.t(), out=out.t(), accumulate=request.accumulate)
    else:
        dense = out.contiguous()
        _gemm(A, B, out=dense, accumulate=request.accumulate)
        out.copy_(dense)
    add_bias_(request, out, bias)
    return bias_sum(request, left)


def _gemm(A: torch.Tensor, B: torch.Tensor, *, out: torch.Tensor, accumulate: bool) -> None:
    """Add A[M, K] B[K, N] to ``out``, row-major with any row stride, or write it over."""
    (M, K), N = A.shape, B.shape[1]
    for start in range(0, K, CHUNK_K):
        stop = min(start + CHUNK_K, K)
        A_MK, B_packed = _row_major(A[:, start:stop]), _packed(B[start:stop])
        adds = accumulate or start > 0
        parts = _parts(M, N)
        if len(parts) == 1:
            _blocks(A_MK, B_packed, out, part=parts[0], adds=adds)
        else:
            done = [_threads().submit(_blocks, A_MK, B_packed, out, part=part, adds=adds) for part in parts]
            for part in done:
                part.result()


def _row_major(A: torch.Tensor) -> torch.Tensor:
    """Return A[M, K] with unit stride along K, rows apart and an even K, a copy only if it is not so."""
    M, K = A.shape
    if K % 2:
        return torch.nn.functional.pad(A, (0, 1))
    return A if A.stride(1) == 1 and (M == 1 or A.stride(0) >= K) else A.contiguous()


def _packed(B: torch.Tensor) -> torch.Tensor:
    """Return B[K, N] as [K / 2, N, 2]: pairs of rows interleaved, an odd K padded by a row of zeros."""
    if B.shape[0] % 2:
        B = torch.nn.functional.pad(B, (0, 0, 0, 1))
    return B.unflatten(0, (-1, 2)).transpose(1, 2).contiguous()


def _parts(M: int, N: int) -> list[tuple[range, range]]:
    """Cut rows or columns of the output, whichever has more blocks, into one part per thread."""
    num_threads = torch.get_num_threads()
    along_M = M >= N
    size, block = (M, 32) if along_M else (N, BLOCK_N)
    share = -(-size // (num_threads * block)) * block
    cuts = [range(start, min(start + share, size)) for start in range(0, size, share)]
    return [(cut, range(N)) if along_M else (range(M), cut) for cut in cuts]


def _blocks(
    A: torch.Tensor, B_packed: torch.Tensor, out: torch.Tensor, *, part: tuple[range, range], adds: bool
) -> None:
    """Multiply one thread's part block by block, and give the thread's tile registers back."""
    block, release = symbol(_BLOCK_NAME, *_ARGUMENTS), symbol(_RELEASE_NAME, _BOOL)
    rows, columns = part
    K, N = A.shape[1], B_packed.shape[1]
    lda, ldc = A.stride(0) if A.shape[0] > 1 else K, out.stride(0) if out.shape[0] > 1 else N
    A_at, B_at, out_at = A.data_ptr(), B_packed.data_ptr(), out.data_ptr()
    for n in range(columns.start, columns.stop, BLOCK_N):
        width = min(BLOCK_N, columns.stop - n)
        for m in range(rows.start, rows.stop, BLOCK_M):
            height = min(BLOCK_M, rows.stop - m)
            block(
                height, width, K, lda, N, ldc, adds,
                A_at + _A_BYTES * m * lda, B_at + _B_BYTES * n, out_at + _C_BYTES * (m * ldc + n), True,  # noqa: FBT003
            )  # fmt: skip
    release(True)  # noqa: FBT003 - C has no names


@lru_cache(maxsize=1)
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="brgemm")
