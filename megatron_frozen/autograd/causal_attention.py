"""Causal attention on a CPU without AMX, in blocks of queries, from products that run at the speed of bf16.

Torch's flash kernel asks its BLAS for bf16 products into fp32, which have no fast path there: measured on
AVX512-BF16, its forward and its backward took three times as long as these.

Shape suffixes: b = batch, n = query heads, k = key and value heads, g = query heads per key head, s = sequence,
d = head dim; L = queries of a block, R = g L; E = keys that a block sees.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from megatron_frozen import gemm
from megatron_frozen.autograd.once import once_differentiable

BLOCK = 128  # queries; as many keys are one panel of the packed operand. A quarter of the work is above the diagonal.
MIN_LENGTH = 2 * BLOCK  # below, calls cost what the products save
_softmax_backward = torch.ops.aten._softmax_backward_data
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def causal_attention_unsupported(query: torch.Tensor, key: torch.Tensor) -> str | None:
    """Return why ``CausalAttention`` should leave these heads to torch, as the end of a sentence; None if it runs."""
    if query.device.type != "cpu" or query.dtype != torch.bfloat16 or type(query) is not torch.Tensor:
        return "it is for bf16 tensors on a CPU"
    if query.shape[2] != key.shape[2] or query.shape[2] < MIN_LENGTH or query.shape[3] % 2:
        return f"it is for {MIN_LENGTH} tokens or more, each a query and a key, and an even head dim"
    if torch.cpu._is_amx_tile_supported():
        return "torch's own kernel is fast with AMX"
    return gemm.wide_unsupported()


class CausalAttention(torch.autograd.Function):
    """C = softmax(mask(Q K^T / sqrt(d))) V, where a query sees the keys up to its own place.

    Shapes: Q [b, n, s, d], K and V [b, k, s, d] with n a multiple of k, in bf16 with any strides; C [b, n, s, d], of
        which [b, s, n, d] is dense.
    Forward: for each batch row and block of L queries, with the g heads that share a key head as one matrix: scores
        S [k, R, E] in fp32 from bf16 operands, softmax in fp32, P rounded to bf16, C = P V.
    Dgrad: per block the same S and P again; dP = dC V^T in fp32; dS = P (dP - sum P dP) in fp32, rounded to bf16;
        dQ = dS K; dK += dS^T Q and dV += P^T dC, summed over blocks in fp32.
    Wgrad: none.
    Dbias: none.
    Collectives: none.
    Saved: Q, K and V.
    Why: half of a LoRA step is attention on such a CPU. Saving P would grow with s^2. Source: the recomputation and the
        sums are those of FlashAttention-2 (Dao, 2023); blocks of keys are not needed, as a block of scores fits.
    """

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return C; see the class."""
        ctx.save_for_backward(query, key, value)
        return causal_forward(query, key, value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> Gradients:
        """Return dQ, dK and dV; see the class."""
        return causal_backward(grad_output, *ctx.saved_tensors)


def causal_forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return C; see ``CausalAttention``."""
    b, n, s, d = query.shape
    context = query.new_empty(b, s, n, d).transpose(1, 2)
    for Q_nsd, K_ksd, V_ksd, C_nsd in zip(query, key, value, context, strict=True):
        panels, values = gemm.packed(K_ksd), V_ksd.contiguous()
        for block in _blocks(s, num_groups=K_ksd.shape[0]):
            probs_kRE = _probs(block.rows_of(Q_nsd), panels, block=block).bfloat16()
            block.write(C_nsd, gemm.batched(probs_kRE, values[:, : block.stop]))
    return context


def causal_backward(
    grad_output: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> Gradients:
    """Return dQ, dK and dV; see ``CausalAttention``."""
    grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    for row in zip(grad_output, query, key, value, *grads, strict=True):
        _row_backward(*row)
    return grads


def _row_backward(
    grad_output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    grad_query: torch.Tensor,
    grad_key: torch.Tensor,
    grad_value: torch.Tensor,
) -> None:
    """Write dQ, dK and dV of one batch row."""
    keys, key_panels, value_panels = key.contiguous(), gemm.packed(key), gemm.packed(value)
    scale = query.shape[-1] ** -0.5
    keys_sum, values_sum = (torch.zeros(key.shape, dtype=torch.float32) for _ in range(2))
    for block in _blocks(query.shape[1], num_groups=key.shape[0]):
        E, query_kRd, grad_kRd = block.stop, block.rows_of(query), block.rows_of(grad_output)
        probs_kRE = _probs(query_kRd, key_panels, block=block)
        grad_probs_kRE = gemm.batched_wide(grad_kRd, value_panels, num_columns=E)
        grad_scores_kRE = _softmax_backward(grad_probs_kRE, probs_kRE, -1, torch.float32).bfloat16()
        values_sum[:, :E] += gemm.batched(probs_kRE.bfloat16().transpose(1, 2), grad_kRd)
        keys_sum[:, :E] += gemm.batched(grad_scores_kRE.transpose(1, 2), query_kRd)
        block.write(grad_query, gemm.batched(grad_scores_kRE, keys[:, :E]).mul_(scale))
    grad_key.copy_(keys_sum.mul_(scale))
    grad_value.copy_(values_sum)


class _Block(NamedTuple):
    """The queries [start, stop) of all heads of a batch row, those of one key head below one another."""

    start: int
    stop: int
    num_groups: int

    def _of(self, heads_nsd: torch.Tensor) -> torch.Tensor:
        """Return this block's part as [k, g, L, d], a view."""
        num_heads = heads_nsd.shape[0]
        part = heads_nsd[:, self.start : self.stop]
        return part.unflatten(0, (self.num_groups, num_heads // self.num_groups))

    def rows_of(self, heads_nsd: torch.Tensor) -> torch.Tensor:
        """Return this block's part as dense [k, R, d]."""
        return self._of(heads_nsd).flatten(1, 2).contiguous()

    def write(self, heads_nsd: torch.Tensor, rows_kRd: torch.Tensor) -> None:
        """Put rows [k, R, d] into this block's part."""
        part = self._of(heads_nsd)
        part.copy_(rows_kRd.view(part.shape))


def _blocks(seq_length: int, *, num_groups: int) -> list[_Block]:
    return [_Block(start, min(start + BLOCK, seq_length), num_groups) for start in range(0, seq_length, BLOCK)]


def _probs(query_kRd: torch.Tensor, panels: torch.Tensor, *, block: _Block) -> torch.Tensor:
    """Return P [k, R, E] of a block's queries in fp32."""
    length = block.stop - block.start
    scores_kRE = gemm.batched_wide(query_kRd, panels, num_columns=block.stop)
    scores_kRE.mul_(query_kRd.shape[-1] ** -0.5)
    scores_kRE.unflatten(1, (-1, length))[..., block.start :] += _above_diagonal(length)
    return scores_kRE.softmax(-1)


@lru_cache(maxsize=8)
def _above_diagonal(length: int) -> torch.Tensor:
    """Return what hides later keys from a query: -inf above the diagonal, else 0."""
    with torch.inference_mode(mode=False):
        return torch.full((length, length), -math.inf, dtype=torch.float32, device="cpu").triu_(1)
