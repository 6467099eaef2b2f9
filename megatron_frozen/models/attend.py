"""Attention within each document of a batch: by our own kernel one call for all of them, by torch's one for each.

Shape suffixes: [s] sequence, [b] batch, [n] query heads and [k] key and value heads of this rank, [d] head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_frozen import kernels
from megatron_frozen.autograd.causal_attention import CausalAttention, added_to_scores, causal_attention_unsupported
from megatron_frozen.models.documents import AttentionPlan, first_keys_of


def attend(query: Tensor, key: Tensor, value: Tensor, *, plan: AttentionPlan, window: int | None) -> Tensor:
    """Return the context [s, b, n d] of query [s, b, n, d] over key and value [s, b, k, d].

    In eager code no score between documents is computed. The result lies in memory as [b, s, n d], which the output
    projection folds as it is.
    """
    seq_length, num_rows = query.shape[:2]
    heads = [part.transpose(0, 1) for part in (query, key, value)]
    if torch.compiler.is_compiling():
        rows = _attend_in_graph(heads, plan=plan, window=window)
    elif _takes_our_kernel(*heads):
        rows = CausalAttention.apply(*_heads_first(*heads), plan.first_key(window)).transpose(1, 2)
    elif plan.lengths is None:
        rows = _attend_one(*heads, mask=plan.mask(window=window, length=seq_length))
    else:  # splitting and joining are one copy each way at most
        documents = (part.flatten(0, 1).unsqueeze(0).split_with_sizes(list(plan.lengths), dim=1) for part in heads)
        masks = (plan.mask(window=window, length=length) for length in plan.lengths)
        rows = torch.cat(
            [_attend_one(*parts, mask=mask) for *parts, mask in zip(*documents, masks, strict=True)], dim=1
        )
    return rows.reshape(num_rows, seq_length, -1).transpose(0, 1)


def _heads_first(*parts: Tensor) -> list[Tensor]:
    """Return [b, s, n or k, d] as [b, n or k, s, d]."""
    return [part.transpose(1, 2) for part in parts]


def _takes_our_kernel(query: Tensor, key: Tensor, value: Tensor) -> bool:
    return causal_attention_unsupported(*_heads_first(query, key, value)) is None


def _attend_in_graph(heads: list[Tensor], *, plan: AttentionPlan, window: int | None) -> Tensor:
    """Do it for heads [b, s, n or k, d] so that the number and the lengths of documents are data, not code.

    On a CPU that is one operator for all documents, with eager code's kernels. Elsewhere, where they keep other things
    for their backward, packed rows are attended to whole under a mask, which computes the scores between documents too.
    """
    if heads[0].device.type == "cpu":
        return attend_documents(*heads, plan.bounds, plan.longest_mask(window), window or 0)[0]
    return _attend_under_mask(heads, plan=plan, window=window)


def _attend_under_mask(heads: list[Tensor], *, plan: AttentionPlan, window: int | None) -> Tensor:
    num_rows, seq_length = heads[0].shape[:2]
    if plan.lengths is None:
        return _attend_one(*heads, mask=plan.mask(window=window, length=seq_length))
    tokens = torch.arange(num_rows * seq_length, device=heads[0].device)
    document = torch.bucketize(tokens, plan.bounds.to(tokens.device), right=True).view(num_rows, 1, seq_length)
    distance = tokens[:seq_length, None] - tokens[:seq_length]
    sees = (document.unsqueeze(-1) == document.unsqueeze(-2)) & (distance >= 0)
    return _attend_one(*heads, mask=sees if window is None else sees & (distance < window))


def _attend_one(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None) -> Tensor:
    """Return the context [b, s, n, d] of one document per row: query [b, s, n, d], key and value [b, s, k, d]."""
    query, key, value = _heads_first(query, key, value)
    num_groups = query.shape[1] // key.shape[1]
    if mask is not None and num_groups > 1:  # a mask and shared keys together leave a GPU without a fused kernel
        key, value = (part.repeat_interleave(num_groups, dim=1) for part in (key, value))
    context = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=query.shape[1] != key.shape[1]
    )
    return context.transpose(1, 2)


@torch.library.custom_op("megatron_frozen::attend_documents", mutates_args=())
def attend_documents(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, mask: Tensor | None, window: int
) -> tuple[Tensor, Tensor]:
    """Return the context [b, s, n, d] of query [b, s, n, d] over key and value [b, s, k, d], and what its backward
    needs.

    bounds: where documents begin and the last one ends among the tokens of all rows, int64 on the CPU; mask: which keys
    a query of the longest document sees, for documents longer than ``window``; else it sees all before it; window: 0
    for none. CPU only. No collectives.
    """
    if _takes_our_kernel(query, key, value):
        q, k, v = _heads_first(query, key, value)
        first_keys = first_keys_of(bounds, window=window or None, seq_length=query.shape[1])
        context, logsumexp = kernels.attend(q, k, v, first_keys)
        return context.transpose(1, 2), logsumexp.transpose(1, 2).contiguous()
    context, logsumexp = _empty(query), query.new_empty(query.shape[:3], dtype=_wide(query))
    for group in _groups(bounds, mask, window=window):
        heads = _heads_first(*map(group.of, (query, key, value)))
        found, roots = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *heads, 0.0, group.mask is None, attn_mask=_added(group.mask, query)
        )
        group.of(context).copy_(found.transpose(1, 2))
        group.of(logsumexp).copy_(roots.transpose(1, 2))
    return context, logsumexp


@attend_documents.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _empty(query), query.new_empty(query.shape[:3], dtype=_wide(query))


@torch.library.custom_op("megatron_frozen::attend_documents_backward", mutates_args=())
def attend_documents_backward(
    grad: Tensor,
    heads: list[Tensor],
    context: Tensor,
    logsumexp: Tensor,
    bounds: Tensor,
    mask: Tensor | None,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, the ``heads``, from that of the context [b, s, n, d]."""
    if _takes_our_kernel(*heads):
        own = _heads_first(grad, *heads, context, logsumexp)
        first_keys = first_keys_of(bounds, window=window or None, seq_length=grad.shape[1])
        query, key, value = _heads_first(*kernels.attend_backward(*own, first_keys=first_keys))
        return query, key, value
    grads = _like(heads)
    for group in _groups(bounds, mask, window=window):
        own = _heads_first(*map(group.of, (grad, *heads, context, logsumexp)))
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *own, 0.0, group.mask is None, attn_mask=_added(group.mask, grad)
        )
        for whole, part in zip(grads, found, strict=True):
            group.of(whole).copy_(part.transpose(1, 2))
    return grads


@attend_documents_backward.register_fake
def _(grad: Tensor, heads: list[Tensor], *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _like(heads)


def _like(heads: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = heads
    return _empty(query), _empty(key), _empty(value)


def _empty(like: Tensor) -> Tensor:
    return like.new_empty(like.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, bounds, mask, ctx.window = inputs
    ctx.save_for_backward(query, key, value, *output, bounds, mask)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, *others = ctx.saved_tensors
    found = attend_documents_backward(grad.contiguous(), [query, key, value], *others, ctx.window)
    return *found, None, None, None


attend_documents.register_autograd(_differentiate, setup_context=_keep)


class _Group(NamedTuple):
    """Documents of one length that stand one after the other."""

    tokens: slice
    num_documents: int
    mask: Tensor | None

    def of(self, rows: Tensor) -> Tensor:
        """Return these documents' part of [b, s, ...] as [documents, length, ...]: of a dense tensor a view."""
        return rows.flatten(0, 1)[self.tokens].unflatten(0, (self.num_documents, -1))


def _groups(bounds: Tensor, mask: Tensor | None, *, window: int) -> Iterator[_Group]:
    start = 0
    for length, documents in groupby(bounds.diff().tolist()):
        num_documents = len(list(documents))
        stop = start + num_documents * length
        own = None if mask is None or length <= window else mask[:length, :length]
        yield _Group(slice(start, stop), num_documents, own)
        start = stop


def _added(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """Return what a boolean mask adds to the scores."""
    return None if mask is None else added_to_scores(mask, dtype=query.dtype)


def _wide(query: Tensor) -> torch.dtype:
    return torch.promote_types(query.dtype, torch.float32)
