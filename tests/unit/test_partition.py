"""Shard arithmetic and the words of the errors that users see."""

from __future__ import annotations

import pytest

from megatron_frozen.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    LayoutError,
    MegatronFrozenError,
    ParallelError,
    nearest,
)
from megatron_frozen.partition import divide, fused_qkv_rows, padded_vocab_size, shard_range, stride_pieces


@pytest.mark.parametrize(("numerator", "denominator"), [(7, 2), (8, 0), (8, -2), (1, 3)])
def test_divide_names_both_numbers(numerator: int, denominator: int) -> None:
    assert divide(8, 4, what="num_heads") == 2
    assert divide(0, 4, what="num_heads") == 0
    with pytest.raises(
        ConfigError, match=rf"^num_heads is {numerator}, which does not divide by {denominator}; choose"
    ):
        divide(numerator, denominator, what="num_heads")


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6])
def test_shard_ranges_tile_the_dimension(world_size: int) -> None:
    ranges = [shard_range(12, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert [index for start, stop in ranges for index in range(start, stop)] == list(range(12))
    with pytest.raises(ConfigError, match="the size of a sharded dimension is 13, which does not divide by 5"):
        shard_range(13, rank=0, world_size=5)


@pytest.mark.parametrize(
    ("vocab_size", "world_size", "multiple_per_rank", "padded"),
    [(65, 2, 1, 66), (65, 2, 128, 256), (64, 2, 1, 64), (1, 4, 1, 4), (0, 2, 8, 0), (49152, 3, 1, 49152)],
)
def test_padded_vocab_is_the_smallest_that_fits(
    vocab_size: int, world_size: int, multiple_per_rank: int, padded: int
) -> None:
    """Row 32 of the cases gives the first two."""
    assert padded_vocab_size(vocab_size, world_size=world_size, multiple_per_rank=multiple_per_rank) == padded


def test_stride_pieces_are_megatrons() -> None:
    """weight_list[rank::world_size] over pieces of shard_size / stride: stride 2 keeps gate and up on each rank."""
    for world_size in (1, 2, 3):
        for stride in (1, 2):
            pieces = [
                piece
                for rank in range(world_size)
                for piece in stride_pieces(12 // world_size, rank=rank, world_size=world_size, stride=stride)
            ]
            assert sorted(index for start, stop in pieces for index in range(start, stop)) == list(range(12))
    assert stride_pieces(4, rank=1, world_size=2, stride=2) == [(2, 4), (6, 8)]
    assert stride_pieces(4, rank=1, world_size=2, stride=1) == [(4, 8)]
    with pytest.raises(ConfigError, match="the size of a shard is 5, which does not divide by 2"):
        stride_pieces(5, rank=0, world_size=2, stride=2)


def test_errors_are_value_errors_and_name_the_nearest() -> None:
    for error in (ConfigError, CheckpointError, DataError, LayoutError, ParallelError):
        assert issubclass(error, MegatronFrozenError)
        assert issubclass(error, ValueError)
    assert nearest("learnig_rate", ["learning_rate", "warmup"]) == ", did you mean 'learning_rate'?"
    assert nearest("zzz", ["learning_rate", "warmup"]) == ""


def test_fused_qkv_rows_of_case_28() -> None:
    """4 query heads in 2 groups, head dim 2: q0 q1 k0 v0 q2 q3 k1 v1."""
    rows = fused_qkv_rows(num_heads=4, num_groups=2, head_dim=2)
    assert rows == {"q": [0, 1, 2, 3, 8, 9, 10, 11], "k": [4, 5, 12, 13], "v": [6, 7, 14, 15]}
    shard = fused_qkv_rows(num_heads=2, num_groups=1, head_dim=2)
    assert shard == {"q": [0, 1, 2, 3], "k": [4, 5], "v": [6, 7]}
    with pytest.raises(ConfigError, match="the number of query heads is 4, which does not divide by 3"):
        fused_qkv_rows(num_heads=4, num_groups=3, head_dim=2)
