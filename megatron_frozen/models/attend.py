"""Attention within each document of a batch: in eager one call per document, in a compiled graph one operator for all.

Shape suffixes: [s] sequence, [b] batch, [T] tokens of all rows, [n] query heads and [k] key and value heads of this
rank, [d] head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_frozen import kernels
from megatron_frozen.autograd.causal_attention import CausalAttention, causal_attention_unsupported
from megatron_frozen.models.documents import AttentionPlan


def attend(query: Tensor, key: Tensor, value: Tensor, *, plan: AttentionPlan, window: int | None) -> Tensor:
    """Return the context [s, b, n d] of query [s, b, n, d] over key and value [s, b, k, d].

    Each document is one call, so no score between documents is computed and no mask needed. Splitting and joining are
    one copy each way at most, and none for a batch of whole rows: the result lies in memory as [b, s, n d], which the
    output projection folds as it is.
    """
    seq_length, num_rows = query.shape[:2]
    heads = [part.transpose(0, 1) for part in (query, key, value)]
    if torch.compiler.is_compiling():
        rows = _attend_in_graph(heads, plan=plan, window=window)
    elif plan.lengths is None:
        rows = _attend_one(*heads, mask=plan.mask(window=window, length=seq_length))
    else:
        documents = (part.flatten(0, 1).unsqueeze(0).split_with_sizes(list(plan.lengths), dim=1) for part in heads)
        masks = (plan.mask(window=window, length=length) for length in plan.lengths)
        rows = torch.cat(
            [_attend_one(*parts, mask=mask) for *parts, mask in zip(*documents, masks, strict=True)], dim=1
        )
    return rows.reshape(num_rows, seq_length, -1).transpose(0, 1)


def _attend_in_graph(heads: list[Tensor], *, plan: AttentionPlan, window: int | None) -> Tensor:
    """Do it for heads [b, s, n or k, d] so that the number and the lengths of documents are data, not code.

    On a CPU that is one operator for all documents, with eager code's kernels. Elsewhere, where they keep other things
    for their backward, packed rows are attended to whole under a mask, which computes the scores between documents too.
    """
    if heads[0].device.type == "cpu":
        tokens = [part.flatten(0, 1) for part in heads]
        return attend_documents(*tokens, plan.bounds, plan.longest_mask(window), window or 0)[0]
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
    query, key, value = (part.transpose(1, 2) for part in (query, key, value))
    if mask is None and causal_attention_unsupported(query, key, value) is None:
        return CausalAttention.apply(query, key, value).transpose(1, 2)
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
    """Return the context [T, n, d] of query [T, n, d] over key and value [T, k, d], and what its backward needs.

    bounds: where documents begin and the last one ends, int64 on the CPU; mask: which keys a query of the longest
    document sees, for documents longer than ``window``; else it sees all before it. CPU only. No collectives.
    """
    context, logsumexp = torch.empty_like(query), query.new_empty(query.shape[:2], dtype=_wide(query))
    for group in _groups(bounds, mask, window=window):
        heads = [group.of(part).transpose(1, 2) for part in (query, key, value)]
        if group.takes_our_kernel(*heads):
            found, roots = kernels.attend(*heads)
        else:
            found, roots = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *heads,
                0.0,
                group.mask is None,
                attn_mask=_added(group.mask, query),
            )
        group.of(context).copy_(found.transpose(1, 2))
        group.of(logsumexp).copy_(roots.transpose(1, 2))
    return context, logsumexp


@attend_documents.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), query.new_empty(query.shape[:2], dtype=_wide(query))


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
    """Return the gradients of query, key and value, the ``heads``, from that of the context [T, n, d]."""
    grads = _like(heads)
    for group in _groups(bounds, mask, window=window):
        own = [group.of(part).transpose(1, 2) for part in (grad, *heads, context, logsumexp)]
        if group.takes_our_kernel(*own[1:4]):
            found = kernels.attend_backward(*own)
        else:
            found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *own,
                0.0,
                group.mask is None,
                attn_mask=_added(group.mask, grad),
            )
        for whole, part in zip(grads, found, strict=True):
            group.of(whole).copy_(part.transpose(1, 2))
    return grads


@attend_documents_backward.register_fake
def _(grad: Tensor, heads: list[Tensor], *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _like(heads)


def _like(heads: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = heads
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


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

    def of(self, tokens: Tensor) -> Tensor:
        """Return these documents' part of [T, ...] as [documents, length, ...], a view."""
        return tokens[self.tokens].unflatten(0, (self.num_documents, -1))

    def takes_our_kernel(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Return whether our own kernel attends to these documents, both ways."""
        return self.mask is None and causal_attention_unsupported(query, key, value) is None


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
    return None if mask is None else torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, -torch.inf)


def _wide(query: Tensor) -> torch.dtype:
    return torch.promote_types(query.dtype, torch.float32)
