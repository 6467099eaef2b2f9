"""The loss over a frozen output layer, without ever holding all logits.

Tokens are worked on in chunks: the logits of a chunk are multiplied, turned into probabilities in place and multiplied
back into the input gradient, so that only one chunk of them is there at a time.

Shape suffixes: R = rows of a fold (tokens), C = rows of a chunk, I = in features, V = this rank's real columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from megatron_frozen import gemm
from megatron_frozen.autograd.cross_entropy import IGNORED_TARGET, local_ids, pieces
from megatron_frozen.autograd.once import once_differentiable
from megatron_frozen.comm import all_reduce_
from megatron_frozen.comm.groups import Group, group_rank
from megatron_frozen.kernels import passes
from megatron_frozen.layout import Fold, fold_leading

# Each chunk reads the whole weight twice. With few rows a product waits for memory: on a CPU, 49152 by 576, the two
# products of 64, 128 and 256 rows took 1.38, 1.15 and 1.00 times as long for each token as those of 512. A GPU has more
# arithmetic for each byte that it reads.
CPU_CHUNK_TOKENS = 256
GPU_CHUNK_TOKENS = 1024

Sweep: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadPlan:
    """How the loss over a frozen head is computed."""

    group: Group
    """The tensor-parallel group that the vocabulary is cut over; None for one rank."""
    num_real_columns: int
    """How many of this rank's rows of W stand for ids; the others are padding behind them."""
    with_dgrad: bool
    """Make dX in the forward sweep; a backward needs it."""
    dgrad_in_fp32: bool
    """Multiply bf16 and fp16 operands straight into an fp32 dX."""
    logits_dtype: torch.dtype | None
    """Dtype of the logits where it is wider than the operands'."""


class FrozenHeadCrossEntropy(torch.autograd.Function):
    """Loss per token, -log softmax(X W^T)[target], for a frozen W whose rows are cut over ranks.

    Shapes: X [..., I], W [V and padding, I], target [...] with global ids, loss [...] in fp32 (fp64 for fp64 logits).
    Forward: for each chunk of tokens logits l = X W^T, in the operands' dtype or a wider one, then in at least fp32 the
        shard's own m = max l, Z = sum exp(l - m) and softmax P. Over all ranks loss = log Z + m - l[target]. Padded
        columns are not multiplied, and on a CPU neither are tokens with a target of -100.
    Dgrad: made in the forward, for an upstream gradient of 1: P, rounded to the operands' dtype and without its
        target column, times W, each row scaled by what the other ranks add to Z; plus (p[target] - 1) W[target] in at
        least fp32. The backward scales its rows by dloss and rounds to X's dtype. It is this rank's part of a sum.
    Wgrad: none; W gets no gradient.
    Dbias: none.
    Collectives: forward, one all-reduce (max) and one (sum of Z and of l[target]) over all tokens; backward, none. The
        sum of dX over ranks is left to what entered the tensor-parallel region.
    Saved: dX in at least fp32 and the target ids, where X needs a gradient; else nothing.
    Why: logits and their gradient are the largest tensors of a step by far. A row of dX is linear in its dloss and in
        1 / Z, so that both may come after the product: no chunk waits for another rank or for the backward. The
        target's p - 1, which has no digits left in a rounded softmax of a confident row, is never rounded.

    W and the targets get no gradient, and dX none of its own: a second differentiation is refused.
    """

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, plan: HeadPlan
    ) -> torch.Tensor:
        """Return the loss; see the class."""
        X_RI, fold = fold_leading(input)
        if fold.repeats > 1:  # equal rows have targets of their own
            X_RI, fold = fold_leading(input.contiguous())
        target_R = _in_rows(target, fold)
        first_id = weight.shape[0] * group_rank(plan.group)
        local_R, is_here_R = local_ids(target_R, num_columns=plan.num_real_columns, first_id=first_id)
        sweep = _sweep_in_graph if torch.compiler.is_compiling() else _sweep
        real_VI = weight[: plan.num_real_columns]
        own_top, own_sum, at_target, dX_RI = sweep(
            X_RI, real_VI, target_R, local_R, is_here_R, plan.with_dgrad, plan.dgrad_in_fp32, plan.logits_dtype
        )
        top, _ = all_reduce_(own_top.clone(), group=plan.group, op="max")
        own_sum = own_sum * (own_top - top).exp_()
        picked = (at_target - top).masked_fill_(~is_here_R, 0)
        sums, _ = all_reduce_(torch.stack([own_sum, picked]), group=plan.group)
        ctx.fold, ctx.dtype = fold, input.dtype
        if plan.with_dgrad:
            below_one = torch.expm1(sums[1] - sums[0].log()).masked_fill_(~is_here_R, 0)
            dX_RI.mul_((own_sum / sums[0]).unsqueeze(-1))
            if plan.num_real_columns:
                dX_RI.addcmul_(real_VI.index_select(0, local_R).to(dX_RI.dtype), below_one.unsqueeze(-1))
            ctx.save_for_backward(dX_RI, target_R)
        loss_R = (sums[0].log() - sums[1]).masked_fill_(target_R == IGNORED_TARGET, 0)
        # A tensor of its own: nobody may write into a view that such a function returns.
        return fold.unfold(loss_R.unsqueeze(-1)).squeeze(-1).clone(memory_format=torch.contiguous_format)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """Return dX; see the class."""
        dX_RI, target_R = ctx.saved_tensors
        ignored_R1 = (target_R == IGNORED_TARGET).unsqueeze(-1)
        scaled_RI = (dX_RI * _in_rows(grad_loss, ctx.fold).unsqueeze(-1)).to(ctx.dtype)
        return ctx.fold.unfold(scaled_RI.masked_fill_(ignored_R1, 0)), None, None, None


def _in_rows(per_token: torch.Tensor, fold: Fold) -> torch.Tensor:
    """Return a tensor [...] of numbers per token as [R], in the order of the fold's rows."""
    single = [dim for dim in range(per_token.dim()) if dim not in fold.order]
    return per_token.permute((*fold.order, *single)).reshape(-1)


def _sweep(
    X_RI: torch.Tensor,
    weight_VI: torch.Tensor,
    target_R: torch.Tensor,
    local_R: torch.Tensor,
    is_here_R: torch.Tensor,
    with_dgrad: bool,  # noqa: FBT001 - operators take no keywords from a graph
    dgrad_in_fp32: bool,  # noqa: FBT001
    logits_dtype: torch.dtype | None,
) -> Sweep:
    """Return, of this rank's columns, the highest logit [R], the sum of exponentials below it [R], the target's logit
    [R] and softmax W without the target's column [R, I], all wide; lowest, 0, 0 and 0 in rows that are left out.
    """
    wide = torch.promote_types(logits_dtype or X_RI.dtype, torch.float32)
    top = X_RI.new_full(target_R.shape, torch.finfo(wide).min, dtype=wide)
    total, at_target = torch.zeros_like(top), torch.zeros_like(top)
    dX_RI = X_RI.new_zeros(X_RI.shape if with_dgrad else (0, X_RI.shape[1]), dtype=wide)
    if weight_VI.shape[0] == 0:  # padding alone
        return top, total, at_target, dX_RI
    size, chunks = _chunks(target_R)
    # One buffer for all chunks: the system clears new pages, which took a tenth of the time.
    buffer_CV = X_RI.new_empty(size, weight_VI.shape[0], dtype=logits_dtype)
    for rows in chunks:
        X_CI = X_RI[rows]
        logits_CV = gemm.forward(X_CI, weight_VI, dtype=logits_dtype, out=buffer_CV[: X_CI.shape[0]])
        cells = torch.arange(logits_CV.shape[0], device=logits_CV.device), local_R[rows]
        at_target[rows] = logits_CV[cells].to(wide)
        probs_CV, top[rows], total[rows] = _softmax(logits_CV, wide=wide, dtype=X_RI.dtype)
        if with_dgrad:
            probs_CV[cells] = probs_CV[cells].masked_fill_(is_here_R[rows], 0)  # a scatter_ would copy all the logits
            dX_RI[rows] = gemm.dgrad(probs_CV, weight_VI, in_fp32=dgrad_in_fp32).to(wide)
    return top, total, at_target, dX_RI


def _softmax(
    logits_CV: torch.Tensor, *, wide: torch.dtype, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the softmax in ``dtype``, in place of the logits if that is theirs, and, wide, each row's maximum and its
    sum of exponentials below that."""
    if passes.takes(logits_CV):
        return logits_CV, *passes.softmax_(logits_CV)
    probs_CV = logits_CV if logits_CV.dtype == dtype else torch.empty_like(logits_CV, dtype=dtype)
    tops, totals = [], []
    for piece in pieces(logits_CV):
        tops.append(logits_CV[piece].amax(-1).to(wide))
        probs = logits_CV[piece].softmax(-1, dtype=wide)
        totals.append(probs.amax(-1).reciprocal_())  # the highest is exp(0) / Z
        probs_CV[piece] = probs
    return probs_CV, torch.cat(tops), torch.cat(totals)


def _chunks(target_R: torch.Tensor) -> tuple[int, Sequence[slice | torch.Tensor]]:
    """Cut the tokens into chunks of nearly equal size, of those with a target only; return the largest size and each
    chunk's rows. On a GPU of all of them: looking which they are would stall it.
    """
    is_on_cpu = target_R.device.type == "cpu"
    labelled = (target_R != IGNORED_TARGET).nonzero().squeeze(-1) if is_on_cpu else None
    is_whole = labelled is None or labelled.shape[0] == target_R.shape[0]
    num_rows = target_R.shape[0] if labelled is None else labelled.shape[0]
    num_chunks = -(-num_rows // (CPU_CHUNK_TOKENS if is_on_cpu else GPU_CHUNK_TOKENS))
    size = -(-num_rows // max(1, num_chunks))
    rows = [slice(start, start + size) for start in range(0, num_rows, max(1, size))]
    return size, rows if is_whole or labelled is None else [labelled[piece] for piece in rows]


_sweep_in_graph = torch.library.custom_op("megatron_frozen::frozen_head_sweep", _sweep, mutates_args=())
"""The sweep as one node of a compiled graph, which so depends neither on the number of chunks nor on the labels."""


@_sweep_in_graph.register_fake
def _(
    X_RI: torch.Tensor,
    weight_VI: torch.Tensor,
    target_R: torch.Tensor,
    local_R: torch.Tensor,
    is_here_R: torch.Tensor,
    with_dgrad: bool,  # noqa: FBT001
    dgrad_in_fp32: bool,  # noqa: FBT001
    logits_dtype: torch.dtype | None,
) -> Sweep:
    """Return the shapes."""
    wide = torch.promote_types(logits_dtype or X_RI.dtype, torch.float32)
    top, total, at_target = (X_RI.new_empty(target_R.shape, dtype=wide) for _ in range(3))
    return top, total, at_target, X_RI.new_empty(X_RI.shape if with_dgrad else (0, X_RI.shape[1]), dtype=wide)
