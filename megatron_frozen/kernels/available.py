"""Whether this machine has the kernels: its CPU, its compiler and its torch, and that they multiply right."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch.utils._python_dispatch import _disable_current_modes

from megatron_frozen import environment
from megatron_frozen.kernels.build import library
from megatron_frozen.kernels.call import NEEDED
from megatron_frozen.kernels.products import multiply_into
from megatron_frozen.kernels.torch_library import address

_TOO_OLD = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI")  # oneDNN's names


@lru_cache(maxsize=1)
def absent() -> str | None:
    """Return why this machine's CPU, its compiler or this torch gives no kernels, as the end of a sentence; else None.

    The first call may compile them (2 s) and tries a few products.
    """
    if not torch.cpu._is_avx512_bf16_supported():
        return "this CPU has no AVX512-BF16"
    isa = next(filter(None, map(environment.text, environment.ONEDNN_ISA)), "")
    if isa.upper() in _TOO_OLD:  # the block product would end the process
        return f"the environment holds oneDNN to {isa}, which has no AVX512-BF16"
    if None in map(address, NEEDED):
        return f"torch {torch.__version__} exports no such kernel"
    if isinstance(kernels := library(), str):
        return kernels
    # Neither the caller's fake tensors, nor its default dtype or device, nor a transform such as torch.func.grad.
    with _disable_current_modes(), torch._C._DisableFuncTorch():
        is_right = all(_gives_a_right_product(*sizes) for sizes in ((3, 4, 5), (70, 66, 35), (35, 65, 70)))
    return None if is_right else f"the kernel of torch {torch.__version__} gave a wrong product when it was tried"


def _gives_a_right_product(M: int, K: int, N: int) -> bool:
    """Try a product of whole and part blocks, by rows or columns."""
    A = (torch.arange(K * M, device="cpu") % 7 - 3).view(K, M).t().bfloat16()
    B = (torch.arange(K * N, device="cpu") % 5 - 2).view(K, N).bfloat16()
    out = torch.ones(M, N, dtype=torch.float32, device="cpu")
    multiply_into(out, A, B, accumulate=True)
    return torch.equal(out, (A.float().unsqueeze(2) * B.float()).sum(1) + 1)
