"""The input gradient of a linear layer: fold, multiply, communicate, unfold. Frozen and trainable layers share it.

Shape suffixes: R = distinct rows of dY, I = in features, O = out features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_frozen import gemm
from megatron_frozen.comm import all_reduce_, reduce_scatter
from megatron_frozen.comm.groups import Group
from megatron_frozen.layout import Fold


@dataclass(frozen=True, kw_only=True, slots=True)
class DgradPlan:
    """How an input gradient is computed and summed over tensor-parallel ranks."""

    group: Group
    """The tensor-parallel group; None for one rank."""
    allreduce: bool
    """Sum over the group by an all-reduce of the 2-D product."""
    sequence_parallel: bool
    """Sum over the group by a reduce-scatter along dim 0."""
    dgrad_in_fp32: bool
    """Multiply fp32 copies of bf16 and fp16 operands."""
    allreduce_in_fp32: bool
    """Sum over the group in fp32."""


def start_dgrad(
    grad_RO: torch.Tensor, weight_OI: torch.Tensor, *, fold: Fold, plan: DgradPlan
) -> Callable[[], torch.Tensor]:
    """Multiply, launch the collective of ``plan``, and return the function that waits and gives dX [..., I].

    The collective runs in the product's dtype, widened to fp32 by either fp32 option; dX is rounded to dY's dtype
    once, at the end. An all-reduce travels on the dense [R, I] product, so every rank of the group must bring a dY of
    one shape and stride order, as ranks that run one program do. A reduce-scatter needs the sequence first, so it
    unfolds before."""
    product_RI = gemm.dgrad(grad_RO, weight_OI, in_fp32=plan.dgrad_in_fp32)
    if plan.allreduce_in_fp32 and (plan.allreduce or plan.sequence_parallel):
        product_RI = product_RI.to(torch.promote_types(product_RI.dtype, torch.float32))
    if plan.sequence_parallel:
        dX, work = reduce_scatter(fold.unfold(product_RI), group=plan.group, async_op=True)
    elif plan.allreduce:
        dX, work = all_reduce_(product_RI, group=plan.group, async_op=True)
    else:
        dX, work = product_RI, None

    def finish() -> torch.Tensor:
        if work is not None:
            work.wait()
        rounded = dX.to(grad_RO.dtype)
        return rounded if plan.sequence_parallel else fold.unfold(rounded)

    return finish
