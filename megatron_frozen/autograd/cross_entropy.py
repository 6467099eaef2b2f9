"""Cross-entropy over logits whose vocabulary is cut over tensor-parallel ranks.

Rows are worked on in pieces that a cache holds, so that no other tensor of the logits' size is made than their
gradient, and the wide arithmetic in between stays in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import torch

from megatron_frozen.autograd.once import once_differentiable
from megatron_frozen.comm import all_reduce_
from megatron_frozen.comm.groups import Group, group_rank, group_size
from megatron_frozen.kernels import passes

IGNORED_TARGET = -100
CPU_PIECE_ELEMENTS = 2**20
GPU_PIECE_ELEMENTS = 2**26  # a launch costs more than a cache saves there; this bounds the memory of a piece

Index: TypeAlias = tuple[Any, ...]


class VocabParallelCrossEntropy(torch.autograd.Function):
    """Loss per token, -log softmax(logits)[target], of logits [..., V] with global target ids [...].

    Shapes: logits_shard [..., V], target [...], loss [...] in fp32 (fp64 for fp64 logits).
    Forward: in at least fp32; m = max, Z = sum exp(l - m) and l[target] over all ranks; loss = log Z + m - l[target],
        and with label smoothing a, (1 - b) loss + b mean(log Z + m - l), b = a V / (V - 1) for V of all ranks, as
        Megatron does.
    Dgrad: (softmax - onehot(target)) dloss, rounded to the logits' dtype once; with smoothing, onehot is
        (1 - b) onehot + b / V. In the logits' memory layout.
    Wgrad: none.
    Dbias: none.
    Collectives: forward, one all-reduce (max) and one (sum of Z, of l[target] and, smoothed, of l); backward, none.
    Saved: the logits, the target ids, m and Z. The logits must not be written into before the backward.
    Why: no rank ever holds a row of all logits. A softmax saved in bf16 would have lost 1 - p of a confident row, so
        it is computed again. A target of -100 gives loss 0 and no gradient whatever the row holds, so that a masked
        label can never turn a loss into NaN. The logits stay untouched; Megatron's version writes into them.

    Source: Shoeybi et al., 2019, section 3; ``megatron.core.tensor_parallel.cross_entropy``.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, label_smoothing: float, group: Group
    ) -> torch.Tensor:
        """Return the loss; see the class."""
        num_vocab = logits.shape[-1] * group_size(group)
        ctx.smoothing = label_smoothing * num_vocab / (num_vocab - 1) if label_smoothing > 0 else 0.0
        ctx.num_vocab, ctx.first_id = num_vocab, logits.shape[-1] * group_rank(group)
        own_top, own_exp, own_sum = _statistics(logits, with_sum=ctx.smoothing > 0)
        top, _ = all_reduce_(own_top.clone(), group=group, op="max")
        local, is_here = local_ids(target, num_columns=logits.shape[-1], first_id=ctx.first_id)
        picked = (logits.gather(-1, local.unsqueeze(-1)).squeeze(-1) - top).masked_fill_(~is_here, 0)
        parts = [own_exp.mul_((own_top - top).exp_()), picked]
        if own_sum is not None:
            parts.append(own_sum - top * logits.shape[-1])
        sums, _ = all_reduce_(torch.stack(parts), group=group)
        loss = sums[0].log() - sums[1]
        if ctx.smoothing:
            loss = (1 - ctx.smoothing) * loss + ctx.smoothing * (sums[0].log() - sums[2] / num_vocab)
        ctx.save_for_backward(logits, target, top, sums[0])
        return loss.masked_fill(target == IGNORED_TARGET, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """Return the logits' gradient; see the class."""
        logits, target, top, total = ctx.saved_tensors
        local, is_here = local_ids(target, num_columns=logits.shape[-1], first_id=ctx.first_id)
        ignored = (target == IGNORED_TARGET).unsqueeze(-1)
        scale = grad_loss.unsqueeze(-1)
        at_target = is_here.unsqueeze(-1) * scale * -(1 - ctx.smoothing)
        softmax_scale = scale / total.unsqueeze(-1)
        if not ctx.smoothing and passes.takes(logits):
            probs = (logits.gather(-1, local.unsqueeze(-1)) - top.unsqueeze(-1)).exp_() * softmax_scale
            factor, at_target = (part.masked_fill(ignored, 0) for part in (softmax_scale, probs + at_target))
            return passes.softmax_gradient(logits, top, factor, local, at_target), None, None, None
        grad = torch.empty_like(logits)
        for where in pieces(logits):
            piece = (logits[where] - top[where].unsqueeze(-1)).exp_().mul_(softmax_scale[where])
            if ctx.smoothing:
                piece.sub_(scale[where] * (ctx.smoothing / ctx.num_vocab))
            piece.scatter_add_(-1, local[where].unsqueeze(-1), at_target[where])
            grad[where] = piece.masked_fill_(ignored[where], 0)
        return grad, None, None, None


def _statistics(logits: torch.Tensor, *, with_sum: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return of each row of this rank's logits the maximum, the sum of exponentials below it and the sum, in fp32."""
    if not with_sum and passes.takes(logits):
        return *passes.logsumexp(logits), None
    wide = torch.promote_types(logits.dtype, torch.float32)
    top, total, plain = (logits.new_empty(logits.shape[:-1], dtype=wide) for _ in range(3))
    for where in pieces(logits):
        # Not below the lowest number, so that a rank that holds padding of -inf alone makes no NaN.
        top[where] = logits[where].amax(-1).to(wide).clamp_(min=torch.finfo(wide).min)
        total[where] = (logits[where] - top[where].unsqueeze(-1)).exp_().sum(-1)
        if with_sum:
            plain[where] = logits[where].sum(-1, dtype=wide)
    return top, total, plain if with_sum else None


def local_ids(target: torch.Tensor, *, num_columns: int, first_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's column of each target [...], 0 where another rank holds it, and where this one does."""
    local = target - first_id
    is_here = (local >= 0) & (local < num_columns)
    return local.masked_fill(~is_here, 0), is_here


def pieces(logits: torch.Tensor) -> Iterator[Index]:
    """Cut the leading dims into pieces of a bounded number of logits, at least one row; all at once in a compiled
    graph, which fuses.
    """
    if torch.compiler.is_compiling():
        return iter([(...,)])
    limit = CPU_PIECE_ELEMENTS if logits.device.type == "cpu" else GPU_PIECE_ELEMENTS
    return _cuts(logits.shape[:-1], max(1, limit // max(1, logits.shape[-1])))


def _cuts(lead: torch.Size, num_rows: int) -> Iterator[Index]:
    if not lead:
        yield ()
        return
    inner = lead[1:].numel()
    if inner > num_rows:
        yield from ((index, *rest) for index in range(lead[0]) for rest in _cuts(lead[1:], num_rows))
    else:
        step = num_rows // max(1, inner)
        yield from ((slice(start, start + step),) for start in range(0, lead[0], step))
