"""Cross-entropy over logits whose vocabulary is cut over tensor-parallel ranks.

Shape suffixes: N = tokens (any leading dims), V = vocabulary of this rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megatron_frozen.comm import all_reduce_
from megatron_frozen.comm.groups import Group, group_rank, group_size

IGNORED_TARGET = -100


class VocabParallelCrossEntropy(torch.autograd.Function):
    """Loss per token, -log softmax(logits)[target], of logits [..., V] with global target ids [...].

    Shapes: logits_shard [..., V], target [...], loss [...] in fp32 (fp64 for fp64 logits).
    Forward: in at least fp32; m = max, Z = sum exp(l - m) and l[target] over all ranks; loss = log Z + m - l[target],
        and with label smoothing a, (1 - b) loss + b mean(log Z + m - l), b = a V / (V - 1) for V of all ranks, as
        Megatron does.
    Dgrad: (softmax - onehot(target)) dloss in the logits' dtype; with smoothing, onehot is (1 - b) onehot + b / V.
    Wgrad: none.
    Dbias: none.
    Collectives: forward, one all-reduce (max) and one (sum of Z, of l[target] and, smoothed, of l); backward, none.
    Saved: the softmax in the logits' dtype, the local target ids.
    Why: no rank ever holds a row of all logits. A target of -100 gives loss 0 and no gradient, so that a masked label
        can never turn a loss into NaN. The logits stay untouched; Megatron's version writes into them.

    Source: Shoeybi et al., 2019, section 3; ``megatron.core.tensor_parallel.cross_entropy``.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, label_smoothing: float, group: Group
    ) -> torch.Tensor:
        """Return the loss; see the class."""
        num_local = logits.shape[-1]
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        top = wide.amax(-1) if num_local else wide.new_full(target.shape, -torch.inf)
        top, _ = all_reduce_(top, group=group, op="max")
        exp = (wide - top.unsqueeze(-1)).exp_()
        local = target - group_rank(group) * num_local
        is_here = (local >= 0) & (local < num_local)
        local = local.masked_fill(~is_here, 0).unsqueeze(-1)
        picked = (wide.gather(-1, local).squeeze(-1) - top).masked_fill(~is_here, 0)
        parts = [exp.sum(-1), picked]
        if label_smoothing > 0:
            parts.append(wide.sum(-1) - top * num_local)
        sums, _ = all_reduce_(torch.stack(parts), group=group)
        loss = sums[0].log() - sums[1]
        num_vocab = num_local * group_size(group)
        ctx.smoothing = label_smoothing * num_vocab / (num_vocab - 1) if label_smoothing > 0 else 0.0
        ctx.num_vocab = num_vocab
        if ctx.smoothing:
            loss = (1 - ctx.smoothing) * loss + ctx.smoothing * (sums[0].log() - sums[2] / num_vocab)
        ignored = target == IGNORED_TARGET
        softmax = exp.div_(sums[0].unsqueeze(-1)).to(logits.dtype)
        ctx.save_for_backward(softmax, local, is_here, ignored)
        return loss.masked_fill(ignored, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """Return the logits' gradient; see the class."""
        softmax, local, is_here, ignored = ctx.saved_tensors
        scale = grad_loss.masked_fill(ignored, 0).unsqueeze(-1)
        grad = softmax - ctx.smoothing / ctx.num_vocab if ctx.smoothing else softmax.clone()
        grad.scatter_add_(-1, local, -(1 - ctx.smoothing) * is_here.to(grad.dtype).unsqueeze(-1))
        return grad.mul_(scale.to(grad.dtype)), None, None, None
