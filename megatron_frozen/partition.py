"""Shard arithmetic on plain integers: how a dimension is cut over tensor-parallel ranks."""

from __future__ import annotations

from megatron_frozen.errors import ConfigError


def divide(numerator: int, denominator: int, *, what: str) -> int:
    """Return ``numerator // denominator`` where it is exact; else raise ConfigError naming both numbers."""
    if denominator < 1 or numerator % denominator:
        raise ConfigError(
            f"{what} is {numerator}, which does not divide by {denominator}; "
            f"choose a tensor-parallel size that divides it"
        )
    return numerator // denominator


def shard_range(size: int, *, rank: int, world_size: int) -> tuple[int, int]:
    """Return the half-open range of a dimension of ``size`` that ``rank`` of ``world_size`` holds."""
    shard = divide(size, world_size, what="the size of a sharded dimension")
    return rank * shard, (rank + 1) * shard


def padded_vocab_size(vocab_size: int, *, world_size: int, multiple_per_rank: int = 1) -> int:
    """Return the smallest size >= ``vocab_size`` that gives each rank a multiple of ``multiple_per_rank`` rows."""
    unit = world_size * multiple_per_rank
    return -(-vocab_size // unit) * unit


def stride_pieces(shard_size: int, *, rank: int, world_size: int, stride: int) -> list[tuple[int, int]]:
    """Return the pieces of the full dimension that ``rank`` holds when it is cut with a partition stride.

    The full dimension is ``world_size * stride`` pieces of ``shard_size / stride``; a rank holds each ``world_size``-th
    piece from its own number on (Megatron's ``weight_list[rank::world_size]``; stride 2 keeps a gated projection's two
    halves apart). Stride 1 is one contiguous piece.
    """
    piece = divide(shard_size, stride, what="the size of a shard")
    return [((rank + i * world_size) * piece, (rank + i * world_size + 1) * piece) for i in range(stride)]


def fused_qkv_rows(*, num_heads: int, num_groups: int, head_dim: int) -> dict[str, list[int]]:
    """Return the rows of a fused q, k, v projection that belong to each of the three, in their own order.

    Megatron stacks one group of heads upon the next: its queries, its key, its value. With 4 heads in 2 groups the
    order is q0 q1 k0 v0 q2 q3 k1 v1. For a shard give its own numbers of heads and groups.

    Raises ConfigError where the groups do not share the heads evenly.
    """
    per_group = divide(num_heads, num_groups, what="the number of query heads")
    rows: dict[str, list[int]] = {"q": [], "k": [], "v": []}
    start = 0
    for _ in range(num_groups):
        for part, size in (("q", per_group), ("k", 1), ("v", 1)):
            rows[part] += range(start, start + size * head_dim)
            start += size * head_dim
    return rows
