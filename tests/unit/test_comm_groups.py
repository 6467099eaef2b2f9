"""Which ranks form which groups, and what happens without any."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron_frozen.comm import (
    WORLD,
    destroy_model_parallel,
    get_data_parallel_group,
    get_data_parallel_rank,
    get_data_parallel_world_size,
    get_tensor_model_parallel_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    group_rank,
    group_size,
    initialize_model_parallel,
)
from megatron_frozen.errors import ParallelError
from megatron_frozen.testing import run_ranks


def places() -> tuple[int, int, int, int]:
    return (
        get_tensor_model_parallel_rank(),
        get_tensor_model_parallel_world_size(),
        get_data_parallel_rank(),
        get_data_parallel_world_size(),
    )


def layout_body(rank: int, world_size: int) -> list[Any]:
    assert places() == (0, 1, 0, 1)
    assert (group_rank(WORLD), group_size(WORLD)) == (rank, world_size)
    assert (group_rank(None), group_size(None)) == (0, 1)
    with pytest.raises(ParallelError, match="tensor_model_parallel_size is 3 with 4 ranks; start a number of ranks"):
        initialize_model_parallel(3)
    layouts = []
    for size in (2, 1, 4):
        initialize_model_parallel(size)
        tensor, data = get_tensor_model_parallel_group(), get_data_parallel_group()
        assert tensor is not None
        assert data is not None
        layouts.append((places(), dist.get_process_group_ranks(tensor), dist.get_process_group_ranks(data)))
        with pytest.raises(ParallelError, match="initialize_model_parallel was called twice; call destroy_model"):
            initialize_model_parallel(size)
        destroy_model_parallel()
        destroy_model_parallel()
        assert get_tensor_model_parallel_group() is None
        assert get_data_parallel_group() is None
        assert dist.is_initialized()
    return layouts


def test_neighbours_share_tensors_and_strides_share_data() -> None:
    by_rank = run_ranks(4, layout_body)
    assert [layouts[0] for layouts in by_rank] == [
        ((0, 2, 0, 2), [0, 1], [0, 2]),
        ((1, 2, 0, 2), [0, 1], [1, 3]),
        ((0, 2, 1, 2), [2, 3], [0, 2]),
        ((1, 2, 1, 2), [2, 3], [1, 3]),
    ]
    everyone = [0, 1, 2, 3]
    assert [layouts[1] for layouts in by_rank] == [((0, 1, rank, 4), [rank], everyone) for rank in everyone]
    assert [layouts[2] for layouts in by_rank] == [((rank, 4, 0, 1), everyone, [rank]) for rank in everyone]


def test_without_a_process_group_everything_is_one_rank() -> None:
    assert places() == (0, 1, 0, 1)
    try:
        initialize_model_parallel()
        assert places() == (0, 1, 0, 1)
        assert get_tensor_model_parallel_group() is None
        with pytest.raises(ParallelError, match="initialize_model_parallel was called twice"):
            initialize_model_parallel()
    finally:
        destroy_model_parallel()
    initialize_model_parallel(1)
    destroy_model_parallel()
    with pytest.raises(ParallelError, match="tensor_model_parallel_size is 2 with 1 ranks"):
        initialize_model_parallel(2)
    with pytest.raises(ParallelError, match="tensor_model_parallel_size is 0 with 1 ranks"):
        initialize_model_parallel(0)


@pytest.mark.parametrize(
    "sizes",
    [
        {"pipeline_model_parallel_size": 2},
        {"context_parallel_size": 2},
        {"expert_model_parallel_size": 2},
        {"virtual_pipeline_model_parallel_size": 1},
    ],
    ids=lambda sizes: next(iter(sizes)),
)
def test_other_kinds_of_parallelism_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ParallelError, match=r"this package shards over tensor and data parallel ranks only"):
        initialize_model_parallel(1, **sizes)  # pyright: ignore[reportArgumentType]
    assert get_tensor_model_parallel_world_size() == 1


def outlived_body(rank: int, world_size: int) -> None:
    """The default group may go first, and another may come, before ours are forgotten."""
    with tempfile.TemporaryDirectory() as folder:
        initialize_model_parallel(world_size)
        dist.destroy_process_group()
        dist.init_process_group("gloo", init_method=f"file://{Path(folder, 'store')}", rank=rank, world_size=world_size)
        destroy_model_parallel()
        initialize_model_parallel(world_size)
        assert places() == (0, 1, 0, 1)
        dist.destroy_process_group()
        destroy_model_parallel()
        assert get_tensor_model_parallel_group() is None


def test_groups_may_outlive_the_default_group() -> None:
    run_ranks(1, outlived_body)
