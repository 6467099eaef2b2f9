"""Causal attention; see ``csrc/attention.cpp``.

Shape suffixes: [b] batch, [n] query heads, [k] key and value heads, [s] sequence, [d] head dim.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from megatron_frozen.kernels.call import LONG, POINTER, run


class _Heads(ctypes.Structure):
    _fields_ = (("at", POINTER), ("batch_stride", LONG), ("head_stride", LONG), ("row_stride", LONG))


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, first_keys: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return causal attention's context [b, n, s, d], of which [b, s, n, d] is dense, and the fp32 logarithm to base 2
    [b, n, s] of each query's sum of exponentials, of bf16 query [b, n, s, d], key and value [b, k, s, d]; d is even.

    first_keys: int32 [b, s], the first key that a query sees, no later than itself and never falling along a row; 0 for
    all if left out. A value that is not finite also reaches queries that do not see it, but stand in its block of 128
    tokens: 0 times infinity is no number."""
    context, logsumexp = _empty_heads(query), query.new_empty(query.shape[:3], dtype=torch.float32)
    heads = [_dense_rows(part) for part in (query, key, value)]
    if query.numel() > 0:
        sizes = _sizes(query, key, value, first_keys)
        run("mf_attention_forward", sizes, _heads(*heads, context), POINTER(logsumexp.data_ptr()))
    return context, logsumexp


def attend_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    context: torch.Tensor,
    logsumexp: torch.Tensor,
    first_keys: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query, key and value, of which [b, s, n or k, d] is dense, from the context's."""
    assert grad.shape == context.shape == query.shape, f"query {query.shape} got a gradient of {grad.shape}"
    grads = _empty_heads(query), _empty_heads(key), _empty_heads(value)
    if query.numel() == 0:
        for part in grads:  # there may be keys without a query
            part.zero_()
        return grads
    given = [_dense_rows(part) for part in (query, key, value, context, grad)]
    logsumexp = logsumexp.contiguous()
    sizes = _sizes(query, key, value, first_keys)
    run("mf_attention_backward", sizes, _heads(*given, *grads), POINTER(logsumexp.data_ptr()))
    return grads


def _empty_heads(like: torch.Tensor) -> torch.Tensor:
    b, n, s, d = like.shape
    return like.new_empty(b, s, n, d).transpose(1, 2)


class _Sizes(ctypes.Structure):
    _fields_ = (*((name, LONG) for name in ("batch", "num_heads", "num_groups", "length", "dim")),
                ("first_keys", POINTER))  # fmt: skip


def _sizes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, first_keys: torch.Tensor | None) -> Any:
    (b, n, s, d), k = query.shape, key.shape[1]
    fit = key.shape == value.shape == (b, k, s, d) and k > 0 and n % k == 0 and d % 2 == 0
    assert fit, f"query {query.shape} got key {key.shape} and value {value.shape}"
    if first_keys is None:
        return ctypes.byref(_Sizes(b, n, k, s, d, None))
    fit = first_keys.shape == (b, s) and first_keys.dtype == torch.int32 and first_keys.is_contiguous()
    assert fit, f"query {query.shape} got first keys {first_keys.shape} of {first_keys.dtype}"
    return ctypes.byref(_Sizes(b, n, k, s, d, first_keys.data_ptr()))


def _heads(*parts: torch.Tensor) -> Any:
    return (_Heads * len(parts))(*(_Heads(part.data_ptr(), *part.stride()[:3]) for part in parts))


def _dense_rows(heads: torch.Tensor) -> torch.Tensor:
    return heads if heads.stride(3) == 1 else heads.contiguous()
