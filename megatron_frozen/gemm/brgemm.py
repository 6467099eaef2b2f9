"""bf16 operands into fp32 by the oneDNN block kernel inside torch's CPU library, at the speed of the bf16 product.

``at::native::cpublas::brgemm`` multiplies one block: C[M, N] (+)= A[M, K] B[K, N], fp32 C, bf16 A row-major and B
with pairs of rows interleaved ("VNNI"). torch's CPU attention runs on it. It uses AVX512-BF16 and AMX, where MKL's
product has a fast path on AMX only. Here it is looped over blocks: along K in chunks, along M or N on torch's number of
threads, which pack what they multiply while it is in their caches. Interleaving is transposing, by fbgemm's
``transpose_simd`` in the same library: 16 bits at a time, then pairs as 32. The mangled names hold the types of the
arguments, and a few products are checked before the first use, so that another torch finds them absent or wrong, not
different."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import lru_cache

import torch
from torch.utils._python_dispatch import _disable_current_modes

from megatron_frozen.gemm.native import symbol
from megatron_frozen.gemm.request import Request, add_bias_, bias_sum, oriented

NAME = "brgemm"
_BLOCK_NAME = "_ZN2at6native7cpublas6brgemmEllllllbPKN3c108BFloat16ES5_Pfb"
_RELEASE_NAME = "_ZN2at6native7cpublas14brgemm_releaseEb"
_TRANSPOSE_NAMES = "_ZN6fbgemm14transpose_simdItEEvllPKT_lPS1_l", "_ZN6fbgemm14transpose_simdIfEEvllPKT_lPS1_l"
_LONG, _BOOL, _POINTER = ctypes.c_long, ctypes.c_bool, ctypes.c_void_p
# M, N, K, lda, ldb, ldc, add to C, A, B, C, B is packed
_ARGUMENTS = (*[_LONG] * 6, _BOOL, _POINTER, _POINTER, _POINTER, _BOOL)
_REGION = ctypes.CFUNCTYPE(None, _POINTER)
# rows, columns, from, its row stride, into [columns, rows], its row stride
_TRANSPOSE_ARGUMENTS = (_LONG, _LONG, _POINTER, _LONG, _POINTER, _LONG)
# Measured on AVX512-BF16: within 5% of the best of 256..2048, 64..512, 256 and 32..128.
CHUNK_K, BLOCK_M, BLOCK_N, PANEL = 2048, 256, 256, 128
_APART = 32  # elements
_LOW_BYTES, _OUT_BYTES = 2, 4


def unsupported(request: Request) -> str | None:
    """Return why not: device, dtypes, CPU, a torch without the kernel or with another one."""
    if request.device_type != "cpu":
        return "the kernel runs on the CPU"
    if request.operand_dtype != torch.bfloat16 or request.output_dtype != torch.float32:
        return "it multiplies bfloat16 operands into float32 only"
    return absent()


@lru_cache(maxsize=1)
def absent() -> str | None:
    """Return why this machine's CPU, or this torch, has no such kernel; None if it has one that multiplies right."""
    if not (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()):
        return "this CPU has neither AVX512-BF16 nor AMX"
    functions = [symbol(_BLOCK_NAME, *_ARGUMENTS), symbol(_RELEASE_NAME, _BOOL)]
    functions += [symbol(name, *_TRANSPOSE_ARGUMENTS) for name in _TRANSPOSE_NAMES]
    if None in functions:
        return f"torch {torch.__version__} exports no such kernel"
    with _disable_current_modes():  # neither the caller's fake tensors nor its default dtype or device
        is_right = all(_gives_a_right_product(*sizes) for sizes in ((3, 4, 5), (70, 66, 35), (35, 66, 70)))
    return None if is_right else f"the kernel of torch {torch.__version__} gave a wrong product when it was tried"


def _gives_a_right_product(M: int, K: int, N: int) -> bool:
    """Try a product of whole and part blocks, by rows or columns."""
    A = (torch.arange(K * M, device="cpu") % 7 - 3).view(K, M).t().bfloat16()
    B = (torch.arange(K * N, device="cpu") % 5 - 2).view(K, N).bfloat16()
    out = torch.ones(M, N, dtype=torch.float32, device="cpu")
    _gemm(A, B, out=out, accumulate=True)
    return torch.equal(out, (A.float().unsqueeze(2) * B.float()).sum(1) + 1)


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
    """Add A[M, K] B[K, N] to ``out``, row-major with any row stride, or write it over.

    A chunk along K is so long that what is packed of the operand with the smaller side fills half of ``out``."""
    (M, K), N = A.shape, B.shape[1]
    chunk = min(max(M, N, 512), CHUNK_K, K + 1) // 2 * 2
    room = A.new_empty(min(M, N) * (chunk + _APART))
    for start in range(0, K, chunk):
        A_chunk, B_chunk = A[:, start : start + chunk], B[start : start + chunk]
        if A_chunk.shape[1] % 2:
            A_chunk, B_chunk = torch.nn.functional.pad(A_chunk, (0, 1)), torch.nn.functional.pad(B_chunk, (0, 0, 0, 1))
        if not (_is_row_major(A_chunk) or A_chunk.stride(0) == 1):
            A_chunk = A_chunk.contiguous()
        if not (B_chunk.stride(1) == 1 or _has_pairs(B_chunk)):
            B_chunk = B_chunk.contiguous()
        (_by_rows if M >= N else _by_columns)(A_chunk, B_chunk, out, room=room, adds=accumulate or start > 0)


def _is_row_major(A: torch.Tensor) -> bool:
    """Return whether the kernel reads A[M, K] as it is."""
    return A.stride(1) == 1 and (A.shape[0] == 1 or A.stride(0) >= A.shape[1])


def _has_pairs(B: torch.Tensor) -> bool:
    """Return whether the pairs of rows of B[K, N] stand side by side, as 32-bit words a whole number of them apart."""
    return B.stride(0) == 1 and B.stride(1) % 2 == 0


def _by_rows(A: torch.Tensor, B: torch.Tensor, out: torch.Tensor, *, room: torch.Tensor, adds: bool) -> None:
    """Pack all of B, then multiply blocks of rows, each packed by its thread."""

    def multiply(rows: slice) -> None:
        own = A[rows] if _is_row_major(A) else _pack_rows(A[rows], _apart(A[rows]))
        multiply_panels(own, panels, out[rows], adds=adds)

    panels = room[: B.numel()].view(B.shape[1], B.shape[0])
    on_threads(lambda columns: pack_columns(B[:, columns], panels[columns]), _cuts(B.shape[1], limit=BLOCK_N))
    on_threads(multiply, _cuts(A.shape[0], limit=BLOCK_M))


def _by_columns(A: torch.Tensor, B: torch.Tensor, out: torch.Tensor, *, room: torch.Tensor, adds: bool) -> None:
    """Pack all of A if need be, then multiply blocks of columns, each packed by its thread."""

    def multiply(columns: slice) -> None:
        own = pack_columns(B[:, columns], B.new_empty(B[:, columns].t().shape))
        multiply_panels(rows_MK, own, out[:, columns], adds=adds)

    rows_MK = A
    if not _is_row_major(A):
        rows_MK = _apart(A, room)
        on_threads(lambda rows: _pack_rows(A[rows], rows_MK[rows]), _cuts(A.shape[0], limit=BLOCK_M))
    on_threads(multiply, _cuts(B.shape[1], limit=BLOCK_N))


def _apart(matrix: torch.Tensor, room: torch.Tensor | None = None) -> torch.Tensor:
    """Return room for a matrix of the same shape, rows a little apart: transposing into rows at powers of two took
    twice the time.
    """
    rows, columns = matrix.shape
    size = rows * (columns + _APART)
    room = matrix.new_empty(size) if room is None else room[:size]
    return room.view(rows, columns + _APART)[:, :columns]


def _pack_rows(A: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """Write A[M, K], of which columns are dense, into rows [M, K]."""
    M, K = A.shape
    A_at, into_at, ld = A.data_ptr(), into.data_ptr(), into.stride(0)
    transpose = symbol(_TRANSPOSE_NAMES[0], *_TRANSPOSE_ARGUMENTS)
    for m in range(0, M, PANEL):
        transpose(K, min(PANEL, M - m), A_at + _LOW_BYTES * m, A.stride(1), into_at + _LOW_BYTES * m * ld, ld)
    return into


def pack_columns(B: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """Write B[K, N] into a dense [N, K] as panels [K / 2, PANEL, 2], the last one maybe narrower."""
    K, N = B.shape
    transpose, transpose_pairs = (symbol(name, *_TRANSPOSE_ARGUMENTS) for name in _TRANSPOSE_NAMES)
    rows = _apart(B[:, :PANEL].t())
    B_at, into_at, rows_at, rows_ld = B.data_ptr(), into.data_ptr(), rows.data_ptr(), rows.stride(0)
    for n in range(0, N, PANEL):
        width, panel_at = min(PANEL, N - n), into_at + _LOW_BYTES * n * K
        if _has_pairs(B):
            transpose_pairs(width, K // 2, B_at + _LOW_BYTES * n * B.stride(1), B.stride(1) // 2, panel_at, width)
        else:
            transpose(K, width, B_at + _LOW_BYTES * n, B.stride(0), rows_at, rows_ld)
            transpose_pairs(width, K // 2, rows_at, rows_ld // 2, panel_at, width)
    return into


def multiply_panels(A: torch.Tensor, panels: torch.Tensor, out: torch.Tensor, *, adds: bool = False) -> None:
    """Multiply A[M, K] by packed panels [N, K] block by block, and give the thread's tile registers back."""
    block, release = symbol(_BLOCK_NAME, *_ARGUMENTS), symbol(_RELEASE_NAME, _BOOL)
    (M, K), N = A.shape, panels.shape[0]
    lda, ldc = max(A.stride(0), K), max(out.stride(0), N)
    A_at, panels_at, out_at = A.data_ptr(), panels.data_ptr(), out.data_ptr()
    for m in range(0, M, BLOCK_M):
        for n in range(0, N, PANEL):
            width = min(PANEL, N - n)
            block(
                min(BLOCK_M, M - m), width, K, lda, width, ldc, adds, A_at + _LOW_BYTES * m * lda,
                panels_at + _LOW_BYTES * n * K, out_at + _OUT_BYTES * (m * ldc + n), True,  # noqa: FBT003
            )  # fmt: skip
    release(True)  # noqa: FBT003 - C has no names


def _cuts(size: int, *, limit: int) -> list[slice]:
    """Cut a side into blocks of up to ``limit``, as many as keep all of torch's threads busy."""
    num_threads = torch.get_num_threads()
    num_blocks = -(-size // (limit * num_threads)) * num_threads
    block = -(-size // (num_blocks * PANEL)) * PANEL
    return [slice(start, min(start + block, size)) for start in range(0, size, block)]


def on_threads(work: Callable[[slice], object], cuts: list[slice]) -> None:
    """Do the work for each cut on torch's own threads, which may still be spinning after their last operation and would
    take the processors from any others; on this one where they are not GNU OpenMP's, or compatible."""
    rest, errors, finished = iter(cuts), [], set()

    def region(_: object) -> None:
        try:
            for cut in rest:
                work(cut)
            finished.add(threading.get_ident())
        except BaseException as error:  # no exception may pass through the C frames
            errors.append(error)

    parallel = symbol("GOMP_parallel", _REGION, _POINTER, ctypes.c_uint, ctypes.c_uint)
    num_threads = min(torch.get_num_threads(), len(cuts))
    if parallel is None or num_threads == 1:
        region(None)
    else:
        parallel(_REGION(region), None, num_threads, 0)
    if errors:
        raise errors[0]
    if threading.get_ident() not in finished:  # a signal's exception came before the try, where ctypes drops it
        raise KeyboardInterrupt
