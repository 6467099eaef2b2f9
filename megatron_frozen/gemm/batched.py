"""Products of a batch of small matrices, as attention has them: in bf16, and from bf16 operands into fp32.

The fp32 product runs on the block kernel of ``brgemm``, which is exact and takes the time of the bf16 one; torch's own
batched products have no wider output on a CPU.

Shape suffixes: B = matrices of a batch; M, N, K = sizes of a product.
"""

from __future__ import annotations

import torch

from megatron_frozen.gemm import brgemm


def batched(left_BMK: torch.Tensor, right_BKN: torch.Tensor) -> torch.Tensor:
    """Return the products [B, M, N] in the operands' dtype."""
    return torch.bmm(left_BMK, right_BKN)


def wide_unsupported() -> str | None:
    """Return why ``batched_wide`` cannot run on this machine's CPU, as the end of a sentence; None if it can."""
    return brgemm.absent()


def packed(right_BNK: torch.Tensor) -> torch.Tensor:
    """Return bf16 matrices [B, N, K] as ``batched_wide`` wants its right operand; the first rows are packed first, so
    that the operand of a product with rows up to a multiple of ``brgemm.PANEL`` is a part of it."""
    panels = torch.empty(right_BNK.shape, dtype=torch.bfloat16, device="cpu")

    def pack(one: slice) -> None:
        brgemm.pack_columns(right_BNK[one.start].t(), panels[one.start])

    brgemm.on_threads(pack, _each(right_BNK))
    return panels


def batched_wide(left_BMK: torch.Tensor, panels_BNK: torch.Tensor, *, num_columns: int) -> torch.Tensor:
    """Return left right^T as fp32 [B, M, num_columns] of dense bf16 [B, M, K] and the first rows of a packed right.

    K is even, and num_columns N or a multiple of ``brgemm.PANEL``.
    """
    out_BMN = torch.empty(*left_BMK.shape[:2], num_columns, dtype=torch.float32, device="cpu")

    def multiply(one: slice) -> None:
        i = one.start
        brgemm.multiply_panels(left_BMK[i], panels_BNK[i].view(-1)[: num_columns * K].view(num_columns, K), out_BMN[i])

    K = left_BMK.shape[2]
    brgemm.on_threads(multiply, _each(left_BMK))
    return out_BMN


def _each(batch: torch.Tensor) -> list[slice]:
    return [slice(i, i + 1) for i in range(batch.shape[0])]
