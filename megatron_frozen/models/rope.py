"""Rotary position embedding: the frequencies as transformers computes them, and the rotation as one autograd node.

Shape suffixes: [s] sequence, [b] batch or 1, [n] heads, [d] head dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_frozen.kernels import passes
from megatron_frozen.models.rope_config import RopeConfig


class RotaryTables(NamedTuple):
    """What one forward's layers share: cos [s, b or 1, 1, d] and sin [s, b or 1, 1, d/2], in the activations' dtype."""

    cos: Tensor
    sin: Tensor


def rotary_tables(
    positions: Tensor,
    *,
    rope: RopeConfig,
    head_dim: int,
    num_positions: int,
    max_position_embeddings: int,
    dtype: torch.dtype,
) -> RotaryTables:
    """Return the tables for integer ``positions`` [s, b or 1], all of them below ``num_positions``.

    Angles are fp32 whatever ``dtype`` is, as in transformers.
    """
    frequencies, attention_factor = inverse_frequencies(
        rope,
        head_dim=head_dim,
        num_positions=num_positions,
        max_position_embeddings=max_position_embeddings,
        device=positions.device,
    )
    angles = (positions.unsqueeze(-1).float() * frequencies).unsqueeze(-2)
    cos, sin = angles.cos() * attention_factor, angles.sin() * attention_factor
    return RotaryTables(cos=torch.cat((cos, cos), dim=-1).to(dtype), sin=sin.to(dtype))


def join_tables(documents: Sequence[RotaryTables], *, num_rows: int) -> RotaryTables:
    """Return the tables [s, num_rows, 1, d] of rows packed from ``documents``, row after row; each is [s, 1, 1, d]."""
    cos, sin = (
        torch.cat(parts).unflatten(0, (num_rows, -1)).squeeze(2).transpose(0, 1)
        for parts in zip(*documents, strict=True)
    )
    return RotaryTables(cos=cos, sin=sin)


def inverse_frequencies(
    rope: RopeConfig,
    *,
    head_dim: int,
    num_positions: int,
    max_position_embeddings: int,
    device: torch.device | None = None,
) -> tuple[Tensor, float]:
    """Return the fp32 radians per position [d/2] and the factor on cos and sin.

    Source: transformers 5.24, modeling_rope_utils.py. ``dynamic`` depends on ``num_positions``, the length of the
    sequence, once that is above ``max_position_embeddings``; the others ignore it.
    """
    base, factor = rope.rope_theta, rope.factor if rope.factor is not None else 1.0
    if rope.rope_type == "dynamic":
        stretch = max(num_positions, max_position_embeddings) / max_position_embeddings
        base *= (factor * stretch - (factor - 1)) ** (head_dim / (head_dim - 2))
    exponents = torch.arange(0, head_dim, 2, device=device).float() / head_dim
    wavelengths = base**exponents
    original = rope.original_max_position_embeddings or max_position_embeddings
    if rope.rope_type == "llama3":
        return _llama3(1.0 / wavelengths, rope, factor=factor, original=original), 1.0
    if rope.rope_type == "yarn":
        return _yarn(wavelengths, rope, factor=factor, original=original), _yarn_attention_factor(rope, factor=factor)
    return 1.0 / wavelengths / (factor if rope.rope_type == "linear" else 1.0), 1.0


def _llama3(frequencies: Tensor, rope: RopeConfig, *, factor: float, original: int) -> Tensor:
    low, high = rope.low_freq_factor, rope.high_freq_factor
    assert low is not None
    assert high is not None
    lengths = 2 * math.pi / frequencies
    smooth = (original / lengths - low) / (high - low)
    smoothed = (1 - smooth) * frequencies / factor + smooth * frequencies
    scaled = torch.where(lengths > original / low, frequencies / factor, smoothed)
    return torch.where(lengths < original / high, frequencies, scaled)


def _yarn(wavelengths: Tensor, rope: RopeConfig, *, factor: float, original: int) -> Tensor:
    head_dim = 2 * wavelengths.shape[0]

    def dimension_of(num_rotations: float) -> float:
        return head_dim * math.log(original / (num_rotations * 2 * math.pi)) / (2 * math.log(rope.rope_theta))

    low, high = dimension_of(rope.beta_fast or 32), dimension_of(rope.beta_slow or 1)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = torch.arange(head_dim // 2, dtype=torch.float32, device=wavelengths.device)
    kept = 1 - ((ramp - low) / (high - low)).clamp(0, 1)
    return 1.0 / (factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept


def _yarn_attention_factor(rope: RopeConfig, *, factor: float) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def rotate(heads: Tensor, tables: RotaryTables) -> Tensor:
    """Return ``heads`` [s, b, n, d] rotated by their positions; same dtype, same memory order."""
    return _Rotate.apply(heads, tables.cos, tables.sin)


class _Rotate(torch.autograd.Function):
    """Rotate the pairs (i, i + d/2) of each head by a per-position angle.

    Shapes: heads [s, b, n, d]; cos [s, b or 1, 1, d]; sin [s, b or 1, 1, d/2]; result as heads.
    Forward: (first cos - second sin, second cos + first sin) over the two halves of each head.
    Dgrad: the same rotation with the sign of sin turned.
    Wgrad: none, the tables are constants.
    Dbias: none.
    Collectives: none.
    Saved: cos and sin, which all layers share; not the heads.
    Why: the plain expression takes five operations and two copies a call, and keeps the heads; this takes three, or
        one of ``kernels.passes``.
    """

    @staticmethod
    def forward(ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return rotated(heads, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return rotated(grads[0], cos, sin, sign=-1), None, None


def rotated(heads: Tensor, cos: Tensor, sin: Tensor, *, sign: float = 1, out: Tensor | None = None) -> Tensor:
    """Return what `rotate` does, or its reverse for a ``sign`` of -1, outside autograd and, if given, in ``out``."""
    half = heads.shape[-1] // 2
    if passes.takes(heads, cos, sin, *() if out is None else (out,), max_leading=3):
        into = passes.like(heads) if out is None else out
        passes.rotate(heads, cos, sin, sign=sign, out=into)
        return into
    into = heads * cos if out is None else torch.mul(heads, cos, out=out)
    into[..., :half].addcmul_(heads[..., half:], sin, value=-sign)
    into[..., half:].addcmul_(heads[..., :half], sin, value=sign)
    return into
