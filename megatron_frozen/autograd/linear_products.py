"""The forward product and the input gradient, which frozen and trainable linears share: fold, multiply, unfold.

Shape suffixes: R = distinct rows of dY, I = in features, O = out features.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch

from megatron_frozen import environment, gemm
from megatron_frozen.comm import all_gather, all_reduce_, reduce_scatter
from megatron_frozen.comm.groups import Group, group_size
from megatron_frozen.errors import ConfigError
from megatron_frozen.layout import Fold, fold_leading


@dataclass(frozen=True, kw_only=True, slots=True)
class ProductPlan:
    """How tensor-parallel ranks share a product: the input is gathered, its gradient multiplied and summed."""

    group: Group = None
    """The tensor-parallel group; None for one rank."""
    allreduce: bool = False
    """Sum over the group by an all-reduce of the 2-D product."""
    sequence_parallel: bool = False
    """Gather the input along dim 0, and sum its gradient by a reduce-scatter along it."""
    dgrad_in_fp32: bool = False
    """Multiply bf16 and fp16 operands straight into fp32."""
    allreduce_in_fp32: bool = False
    """Sum over the group in fp32."""
    pieces: int = 1
    """Blocks of rows in which an all-reduced product is made, each travelling while the next is multiplied."""

    def num_pieces(self, num_rows: int) -> int:
        """Return in how many all-reduces a product of ``num_rows`` travels: equal on all ranks, whose rows are.

        A row at least each. One in a compiled graph, whose compiler places products and waiting itself."""
        if self.pieces == 1 or not self.allreduce or self.group is None or torch.compiler.is_compiling():
            return 1
        return max(1, min(self.pieces, num_rows))


# Made once, as making one is a fortieth of what a small linear costs.
_ALONE, _ALONE_IN_FP32 = ProductPlan(), ProductPlan(dgrad_in_fp32=True)


def plan_for(
    group: Group,
    *,
    allreduce: bool,
    sequence_parallel: bool,
    dgrad_in_fp32: bool = False,
    allreduce_in_fp32: bool = False,
    pieces: int = 1,
) -> ProductPlan:
    """Return how the ranks of ``group`` share a product, with the environment's fp32 switches; one rank shares nothing.

    A switch is read where it has a say, as reading one is a fortieth of what a small linear costs.

    Raises ConfigError for options, named as callers of the public functions know them, that do not fit together."""
    if allreduce and sequence_parallel:
        raise ConfigError(
            "allreduce_dgrad and sequence_parallel are both on, but a reduce-scatter already sums the input gradient; "
            "turn one of them off"
        )
    if pieces < 1:
        raise ConfigError(
            f"allreduce_dgrad_pieces is {pieces}; give the number of pieces that dX travels in, 1 for whole"
        )
    dgrad_in_fp32 = dgrad_in_fp32 or environment.switch(environment.LINEAR_DGRAD_FP32)
    if group is None or group_size(group) == 1:
        return _ALONE_IN_FP32 if dgrad_in_fp32 else _ALONE
    return ProductPlan(
        group=group,
        allreduce=allreduce,
        sequence_parallel=sequence_parallel,
        dgrad_in_fp32=dgrad_in_fp32,
        allreduce_in_fp32=allreduce_in_fp32 or environment.switch(environment.DGRAD_ALLREDUCE_FP32),
        pieces=pieces,
    )


def forward_product(
    input_: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
    *,
    plan: ProductPlan,
    output_dtype: torch.dtype | None,
) -> torch.Tensor:
    """Return Y [..., O] of X [..., I], under sequence parallelism of its shard, which is gathered first."""
    if plan.sequence_parallel:
        input_, _ = all_gather(input_, group=plan.group)
    if bias_O is None and output_dtype is None and _stands_in_order(input_):
        return gemm.forward_in_order(input_, weight_OI)
    input_RI, fold = fold_leading(input_)
    return fold.unfold_output(gemm.forward(input_RI, weight_OI, bias_O, dtype=output_dtype))


def _stands_in_order(tensor: torch.Tensor) -> bool:
    """Return whether torch's own products fold a tensor [s, b, H] as we do, in C++, which is faster where it is small.

    Strides are compared for dims of size 1 too, as torch does. With a bias torch's result would be a view, which its
    user could not write into."""
    if tensor.dim() != 3 or torch.compiler.is_compiling():
        return False
    _, num_inner, width = tensor.shape
    return tensor.stride() == (num_inner * width, width, 1) and not gemm.autocast_is_on(tensor)


def dgrad_in_order(grad_output: torch.Tensor, weight_OI: torch.Tensor, *, plan: ProductPlan) -> torch.Tensor | None:
    """Return dX [s, b, I] of a dY [s, b, O] that needs no fold, no cast and no collective: the most frequent one.

    None for any other, which ``fold_leading`` and ``start_dgrad`` multiply."""
    is_plain = plan.group is None and not plan.dgrad_in_fp32 and grad_output.dtype is weight_OI.dtype
    return gemm.dgrad_in_order(grad_output, weight_OI) if is_plain and _stands_in_order(grad_output) else None


def start_dgrad(
    grad_RO: torch.Tensor, weight_OI: torch.Tensor, *, fold: Fold, plan: ProductPlan
) -> Callable[[], torch.Tensor]:
    """Multiply dX = dY W and return ``start_reduction`` of it, in dY's dtype, or in the pieces that ``plan`` wants."""
    num_pieces = plan.num_pieces(grad_RO.shape[0])
    if num_pieces > 1:
        return _start_in_pieces(grad_RO, weight_OI, fold=fold, plan=plan, num_pieces=num_pieces)
    product_RI = gemm.dgrad(grad_RO, weight_OI, in_fp32=plan.dgrad_in_fp32)
    return start_reduction(product_RI, fold=fold, plan=plan, dtype=grad_RO.dtype)


def _start_in_pieces(
    grad_RO: torch.Tensor, weight_OI: torch.Tensor, *, fold: Fold, plan: ProductPlan, num_pieces: int
) -> Callable[[], torch.Tensor]:
    """Do what `start_dgrad` does by blocks of rows of one buffer: as many all-reduces, of as many bytes in all.

    Dtypes and roundings are those of ``start_reduction``. What travels is waited for where a later block fails, too."""
    wide = torch.promote_types(grad_RO.dtype, torch.float32)
    dtype = wide if plan.dgrad_in_fp32 else grad_RO.dtype
    dX_RI = grad_RO.new_empty(grad_RO.shape[0], weight_OI.shape[1], dtype=wide if plan.allreduce_in_fp32 else dtype)
    with ExitStack() as waits:
        for rows, part in zip(grad_RO.tensor_split(num_pieces), dX_RI.tensor_split(num_pieces), strict=True):
            if part.dtype is dtype:
                gemm.dgrad(rows, weight_OI, in_fp32=plan.dgrad_in_fp32, out=part)
            else:
                part.copy_(gemm.dgrad(rows, weight_OI))
            _, work = all_reduce_(part, group=plan.group, async_op=True)
            if work is not None:
                waits.callback(work.wait)
        pending = waits.pop_all()

    def finish() -> torch.Tensor:
        pending.close()  # every wait, also where one raises
        return fold.unfold(dX_RI.to(grad_RO.dtype))

    return finish


def start_reduction(
    product_RI: torch.Tensor, *, fold: Fold, plan: ProductPlan, dtype: torch.dtype
) -> Callable[[], torch.Tensor]:
    """Launch the collective of ``plan`` on a dX, and return the function that waits and gives dX [..., I].

    The collective runs in the product's dtype, widened to fp32 by either fp32 option; dX is rounded to ``dtype``
    once, at the end. An all-reduce travels on the dense [R, I] product, so every rank of the group must bring a dY of
    one shape and stride order, as ranks that run one program do. A reduce-scatter needs the sequence first, so it
    unfolds before."""
    if plan.group is None:
        return partial(fold.unfold, product_RI if product_RI.dtype is dtype else product_RI.to(dtype))
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
        rounded = dX.to(dtype)
        return rounded if plan.sequence_parallel else fold.unfold(rounded)

    return finish
