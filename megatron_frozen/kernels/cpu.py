"""The kernels as functions of torch tensors on the CPU.

They are looped over one product of blocks: ``at::native::cpublas::brgemm`` of torch's CPU library, on which torch's own
attention runs. It uses AVX512-BF16 and AMX, where MKL's product of bf16 into fp32 has a fast path on AMX only. It wants
its right operand in pairs of rows, interleaved ("VNNI"); transposing is fbgemm's, in the same library. The mangled
names hold the types of the arguments, and some products are checked before the first use, so that another torch finds
them absent or wrong, not different. The work is spread over torch's own threads by GNU OpenMP's entry, without
the GIL.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from megatron_frozen.kernels.build import library
from megatron_frozen.kernels.torch_library import address

_NEEDED = (
    "_ZN2at6native7cpublas6brgemmEllllllbPKN3c108BFloat16ES5_Pfb",
    "_ZN2at6native7cpublas14brgemm_releaseEb",
    "_ZN6fbgemm14transpose_simdItEEvllPKT_lPS1_l",
    "_ZN6fbgemm14transpose_simdIfEEvllPKT_lPS1_l",
)
_PARALLEL = "GOMP_parallel"
_UNREAL_MODES = (torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY)
LONG, POINTER = ctypes.c_long, ctypes.c_void_p


_DISPATCH = "__torch_dispatch__"  # no name that pyright knows


class _Matrix(ctypes.Structure):
    _fields_ = (("at", POINTER), ("row_stride", LONG), ("column_stride", LONG))


class _Heads(ctypes.Structure):
    _fields_ = (("at", POINTER), ("batch_stride", LONG), ("head_stride", LONG), ("row_stride", LONG))


@lru_cache(maxsize=1)
def absent() -> str | None:
    """Return why this machine's CPU, its compiler or this torch gives no kernels, as the end of a sentence; else None.

    The first call may compile them (2 s) and tries a few products.
    """
    if not torch.cpu._is_avx512_bf16_supported():
        return "this CPU has no AVX512-BF16"
    if None in map(address, _NEEDED):
        return f"torch {torch.__version__} exports no such kernel"
    if isinstance(kernels := library(), str):
        return kernels
    with _disable_current_modes():  # neither the caller's fake tensors nor its default dtype or device
        is_right = all(_gives_a_right_product(*sizes) for sizes in ((3, 4, 5), (70, 66, 35), (35, 65, 70)))
    return None if is_right else f"the kernel of torch {torch.__version__} gave a wrong product when it was tried"


def _gives_a_right_product(M: int, K: int, N: int) -> bool:
    """Try a product of whole and part blocks, by rows or columns."""
    A = (torch.arange(K * M, device="cpu") % 7 - 3).view(K, M).t().bfloat16()
    B = (torch.arange(K * N, device="cpu") % 5 - 2).view(K, N).bfloat16()
    out = torch.ones(M, N, dtype=torch.float32, device="cpu")
    multiply_into(out, A, B, accumulate=True)
    return torch.equal(out, (A.float().unsqueeze(2) * B.float()).sum(1) + 1)


@lru_cache(maxsize=1)
def _torch() -> Any:
    """Return the table of torch's functions, as ``struct Torch`` has it."""
    return (POINTER * 5)(*map(address, (*_NEEDED, _PARALLEL)))


def in_memory(*tensors: torch.Tensor) -> bool:
    """Return whether kernels find these tensors, and what is made from them, at an address: none is of a class with
    operators of its own (DTensor, fake tensors), wrapped by a transform such as vmap or zero without memory, and no
    fake tensors are made nor a graph recorded."""
    return all(
        getattr(type(tensor), _DISPATCH) is getattr(torch.Tensor, _DISPATCH)
        and torch._C._has_storage(tensor)
        and not tensor._is_zerotensor()
        for tensor in tensors
    ) and not any(map(torch._C._get_dispatch_mode, _UNREAL_MODES))


def run(name: str, *arguments: Any) -> None:
    """Call a kernel; the tensors behind its pointers must outlive the call."""
    getattr(library(), name)(_torch(), ctypes.c_uint(torch.get_num_threads()), *arguments)


def multiply_into(out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, *, accumulate: bool) -> None:
    """Write A[M, K] B[K, N] of bf16 over fp32 ``out`` [M, N] with dense rows, or add it.

    An operand of which neither dim is dense is copied.
    """
    (M, K), N = A.shape, B.shape[1]
    A, B = (matrix if 1 in matrix.stride() else matrix.contiguous() for matrix in (A, B))
    if K == 0 and not accumulate:
        out.zero_()
    if out.numel() > 0:
        matrices = [ctypes.byref(_Matrix(matrix.data_ptr(), *matrix.stride())) for matrix in (A, B)]
        sizes, ldc = map(LONG, (M, N, K)), LONG(max(out.stride(0), N))  # of one row the stride may be anything
        run("mf_multiply", *sizes, *matrices, POINTER(out.data_ptr()), ldc, ctypes.c_bool(accumulate))


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return causal attention's context [b, n, s, d], of which [b, s, n, d] is dense, and the fp32 logarithm [b, n, s]
    of each query's sum of exponentials, of bf16 query [b, n, s, d], key and value [b, k, s, d]; d is even."""
    context, logsumexp = _empty_heads(query), query.new_empty(query.shape[:3], dtype=torch.float32)
    heads = [_dense_rows(part) for part in (query, key, value)]
    if query.numel() > 0:
        run("mf_attention_forward", _sizes(query, key), _heads(*heads, context), POINTER(logsumexp.data_ptr()))
    return context, logsumexp


def attend_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    context: torch.Tensor,
    logsumexp: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query, key and value, of which [b, s, n or k, d] is dense, from the context's."""
    grads = _empty_heads(query), _empty_heads(key), _empty_heads(value)
    if query.numel() == 0:
        return grads
    given = [_dense_rows(part) for part in (query, key, value, context, grad)]
    logsumexp = logsumexp.contiguous()
    run("mf_attention_backward", _sizes(query, key), _heads(*given, *grads), POINTER(logsumexp.data_ptr()))
    return grads


def _empty_heads(like: torch.Tensor) -> torch.Tensor:
    b, n, s, d = like.shape
    return like.new_empty(b, s, n, d).transpose(1, 2)


def _sizes(query: torch.Tensor, key: torch.Tensor) -> Any:
    b, n, s, d = query.shape
    return (LONG * 5)(b, n, key.shape[1], s, d)


def _heads(*parts: torch.Tensor) -> Any:
    return (_Heads * len(parts))(*(_Heads(part.data_ptr(), *part.stride()[:3]) for part in parts))


def _dense_rows(heads: torch.Tensor) -> torch.Tensor:
    return heads if heads.stride(3) == 1 else heads.contiguous()
