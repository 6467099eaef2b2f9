"""How the kernels are called: with torch's own functions in a table, on tensors that have an address.

They are looped over one product of blocks: ``at::native::cpublas::brgemm`` of torch's CPU library, on which torch's own
attention runs. It uses AVX512-BF16 and AMX, where MKL's product of bf16 into fp32 has a fast path on AMX only. It wants
its right operand in pairs of rows, interleaved ("VNNI"); transposing is fbgemm's, in the same library. The mangled
names hold the types of the arguments, so that another torch finds them absent, not different. The work is spread over
torch's own threads by GNU OpenMP's entry, without the GIL.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from megatron_frozen.kernels.build import library
from megatron_frozen.kernels.torch_library import address

NEEDED = (
    "_ZN2at6native7cpublas6brgemmEllllllbPKN3c108BFloat16ES5_Pfb",
    "_ZN2at6native7cpublas14brgemm_releaseEb",
    "_ZN6fbgemm14transpose_simdItEEvllPKT_lPS1_l",
    "_ZN6fbgemm14transpose_simdIfEEvllPKT_lPS1_l",
)
_PARALLEL = "GOMP_parallel"
_FAKE = torch._C._TorchDispatchModeKey.FAKE
_DISPATCH = "__torch_dispatch__"  # no name that pyright knows
LONG, POINTER = ctypes.c_long, ctypes.c_void_p


def run(name: str, *arguments: Any) -> None:
    """Call a kernel; the tensors behind its pointers must outlive the call."""
    getattr(library(), name)(_torch(), ctypes.c_uint(torch.get_num_threads()), *arguments)


@lru_cache(maxsize=1)
def _torch() -> Any:
    """Return the table of torch's functions, as ``struct Torch`` has it."""
    return (POINTER * 5)(*map(address, (*NEEDED, _PARALLEL)))


def has_operators(kind: type) -> bool:
    """Return whether a class of tensors has operators of its own, as DTensor and fake tensors do."""
    return getattr(kind, _DISPATCH) is not getattr(torch.Tensor, _DISPATCH)


def is_recording() -> bool:
    """Return whether a graph of what is called is recorded, by torch.fx (make_fx, torch.export) or torch.jit.trace."""
    return get_proxy_mode() is not None or torch._C._get_tracing_state() is not None


def in_memory(*tensors: torch.Tensor) -> bool:
    """Return whether kernels find these tensors, and what is made from them, at an address: none is of a class with
    operators of its own (DTensor, fake tensors), wrapped by a transform such as vmap, zero without memory or negated
    in name only, no such transform is at work, which wraps what is made, no fake tensors are made and no graph is
    recorded."""
    return (
        not torch._C._are_functorch_transforms_active()
        and all(
            not has_operators(type(tensor))
            and torch._C._has_storage(tensor)
            and not tensor._is_zerotensor()
            and not tensor.is_neg()
            for tensor in tensors
        )
        and torch._C._get_dispatch_mode(_FAKE) is None
        and not is_recording()
    )
