"""Causal attention on a CPU without AMX, from products that run at the speed of bf16.

Torch's flash kernel asks its BLAS for bf16 products into fp32, which have no fast path there: measured on
AVX512-BF16, its forward took seven times as long as this and its backward five times.

Shape suffixes: b = batch, n = query heads, k = key and value heads, s = sequence, d = head dim; L = queries of a block,
and as many keys.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from megatron_frozen import kernels
from megatron_frozen.autograd.once import once_differentiable

MIN_LENGTH = 64  # half a block; below, padding to one costs more than the products save
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]


def causal_attention_unsupported(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> str | None:
    """Return why ``CausalAttention`` should leave these heads to torch, as the end of a sentence; None if it runs."""
    heads = query, key, value
    are_read = all(part.device.type == "cpu" and part.dtype == torch.bfloat16 for part in heads)
    if not are_read or not kernels.in_memory(*heads):
        return "it is for bf16 tensors on a CPU"
    (b, n, length, head_dim), k = query.shape, key.shape[1]
    fit = key.shape == value.shape == (b, k, length, head_dim) and k > 0 and n % k == 0
    if not fit or length < MIN_LENGTH or head_dim % 2:
        return (
            f"it is for {MIN_LENGTH} tokens or more, each a query and a key, an even head dim, and as many query heads "
            "for each head of both key and value"
        )
    if torch.cpu._is_amx_tile_supported():
        return "torch's own kernel is fast with AMX"
    return kernels.absent()


class CausalAttention(torch.autograd.Function):
    """C = softmax(mask(Q K^T / sqrt(d))) V, where a query sees the keys from its first one up to its own place.

    Shapes: Q [b, n, s, d], K and V [b, k, s, d] with n a multiple of k, in bf16 with any strides; first keys [b, s] in
        int32, never falling along a row, or None for 0; C [b, n, s, d], of which [b, s, n, d] is dense.
    Forward: for each head and block of L queries, over the blocks of keys from its first one to the diagonal: S in fp32
        from bf16 operands, a running softmax in fp32, P rounded to bf16, C += P V in fp32.
    Dgrad: per block the same S, and P from the kept logarithms; D = sum of dC C over d; dP = dC V^T in fp32;
        dS = P (dP - D) in fp32, rounded to bf16; dQ += dS K, dK += dS^T Q and dV += P^T dC in fp32.
    Wgrad: none.
    Dbias: none.
    Collectives: none.
    Saved: Q, K, V, C, the first keys and the logarithm to base 2 of each query's sum of exponentials in fp32 [b, n, s].
    Why: half of a LoRA step is attention on such a CPU, and documents of a packed row, or a window, are first keys: one
        call for all of them, and no block of scores that nobody sees. Source: FlashAttention-2 (Dao, 2023); blocks of
        scores stand transposed here, see ``kernels/csrc/attention.cpp``.
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, first_keys: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return C; see the class."""
        context, logsumexp = kernels.attend(query, key, value, first_keys)
        ctx.save_for_backward(query, key, value, context, logsumexp, first_keys)
        return context

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> Gradients:
        """Return dQ, dK and dV; see the class."""
        if kernels.in_memory(grad_output):
            return *kernels.attend_backward(grad_output, *ctx.saved_tensors), None
        *saved, logsumexp, first_keys = ctx.saved_tensors  # one gradient of many under vmap
        mask = None if first_keys is None else added_to_scores(_seen(first_keys).unsqueeze(1), dtype=grad_output.dtype)
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_output, *saved, logsumexp * math.log(2), dropout_p=0.0, is_causal=mask is None, attn_mask=mask
        )
        return *grads, None


def _seen(first_keys: torch.Tensor) -> torch.Tensor:
    """Return which keys the queries see, [b, s, s]."""
    places = torch.arange(first_keys.shape[1], device=first_keys.device)
    return (places <= places[:, None]) & (places >= first_keys.unsqueeze(-1))


def added_to_scores(sees: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    """Return what torch's kernel takes for a boolean mask: 0 where a query sees a key, else -inf."""
    return torch.zeros_like(sees, dtype=dtype).masked_fill_(~sees, -torch.inf)
