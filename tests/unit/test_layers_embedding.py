"""VocabParallelEmbedding at 1 and 2 ranks: values, row gradients of the whole table, padding ids (case 30), errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from megatron_frozen import ModelParallelConfig, VocabParallelEmbedding, initialize_model_parallel
from megatron_frozen.comm import get_tensor_model_parallel_group
from megatron_frozen.diagnostics import Recorder
from megatron_frozen.errors import ConfigError, LayoutError
from megatron_frozen.params import gather_full, set_tensor_model_parallel_attributes
from megatron_frozen.testing import run_ranks
from tests.unit.core_ranks import seeded

V, H = 10, 3
IDS = torch.tensor([[1, 7, 2, 9], [7, 0, 4, 5]])


def embedding_of(*, dtype: torch.dtype = torch.float32, deterministic: bool = False, **options: Any) -> Any:
    torch.manual_seed(0)
    config = ModelParallelConfig(params_dtype=dtype, deterministic_mode=deterministic)
    return VocabParallelEmbedding(V, H, config=config, init_method=torch.nn.init.normal_, **options)


def table_and_gradient(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole weight and its whole gradient."""
    group = get_tensor_model_parallel_group()
    gradient = torch.nn.Parameter(layer.weight.grad)
    set_tensor_model_parallel_attributes(gradient, is_parallel=True, dim=0, stride=1)
    return gather_full(layer.weight, group=group), gather_full(gradient, group=group)


def values_body(rank: int, world_size: int) -> None:
    initialize_model_parallel(world_size)
    for dtype in (torch.float32, torch.bfloat16):
        for deterministic in (False, True):
            for cuts in (False, True):
                layer = embedding_of(dtype=dtype, deterministic=deterministic, reduce_scatter_embeddings=cuts)
                with Recorder() as forward:
                    y = layer(IDS)
                grad = seeded(*y.shape, seed=rank if cuts else 0, dtype=dtype)
                with Recorder() as backward:
                    y.backward(grad)
                # Without the cut each rank goes on with all tokens, so its dY is the same as the others'.
                grads = [seeded(*y.shape, seed=number, dtype=dtype) for number in range(world_size)] if cuts else [grad]
                whole_grad = torch.cat(grads).transpose(0, 1) if cuts else grad
                table, gradient = table_and_gradient(layer)
                leaf = table.clone().requires_grad_()
                expected = F.embedding(IDS, leaf)
                expected.backward(whole_grad)
                expected = expected.transpose(0, 1).chunk(world_size)[rank] if cuts else expected
                assert torch.equal(y, expected)
                assert leaf.grad is not None
                torch.testing.assert_close(gradient, leaf.grad)
                sent = ({}, {})
                if world_size > 1:
                    sent = ({"reduce_scatter": 1}, {"all_gather": 1}) if cuts else ({"all_reduce": 1}, {})
                assert (dict(forward.collectives()), dict(backward.collectives())) == sent


@pytest.mark.parametrize("world_size", [1, 2])
def test_values_and_row_gradients(world_size: int) -> None:
    run_ranks(world_size, values_body)


def padding_body(rank: int, world_size: int, padding_idx: int | None) -> torch.Tensor:
    """Return the gradient of the whole table for case 30."""
    del rank
    initialize_model_parallel(world_size)
    ids = torch.tensor([[1, 7, 2, 9, 7]])
    layer = embedding_of(padding_idx=padding_idx)
    y = layer(ids)
    y.sum().backward()
    table, gradient = (tensor.clone() for tensor in table_and_gradient(layer))
    assert torch.equal(y, F.embedding(ids, table))  # that of the padding id too
    assert (gradient == gradient[:, :1]).all()
    layer(torch.tensor([[0, 5]])).sum().backward()  # the first row of each rank's part, where the others look up
    gained = table_and_gradient(layer)[1] - gradient
    assert gained[:, 0].nonzero().flatten().tolist() == [0, 5]
    return gradient[:, 0]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("padding_idx", "counts"),
    [
        (7, {1: 1, 2: 1, 9: 1}),
        (-3, {1: 1, 2: 1, 9: 1}),
        (1, {2: 1, 7: 2, 9: 1}),
        (2, {1: 1, 7: 2, 9: 1}),
        (None, {1: 1, 2: 1, 7: 2, 9: 1}),
    ],
)
def test_case_30_the_padding_id_is_global(padding_idx: int | None, counts: dict[int, int], world_size: int) -> None:
    expected = torch.tensor([float(counts.get(row, 0)) for row in range(V)])
    for gradient in run_ranks(world_size, padding_body, padding_idx):
        assert torch.equal(gradient, expected)


def others_body(rank: int, world_size: int) -> None:
    initialize_model_parallel(world_size)
    layer = embedding_of()
    assert (layer.vocab_start_index, layer.vocab_end_index) == (rank * V // world_size, (rank + 1) * V // world_size)
    assert layer.num_embeddings_per_partition == V // world_size
    said = r"an embedding of 10 rows got ids from {} to {}; ids go from 0 to 9, so use the tokenizer of this checkpoint"
    for bad in ((3, 10), (-1, 3), (-100, 400)):
        with pytest.raises(LayoutError, match=said.format(*bad)):
            layer(torch.tensor([bad]))
    assert layer(torch.tensor([[0, 9]], dtype=torch.int32)).shape == (1, 2, H)
    assert layer(torch.zeros(1, 0, dtype=torch.int64)).shape == (1, 0, H)
    layer.weight.requires_grad = False
    with Recorder() as seen:
        y = layer(IDS)
    assert not y.requires_grad
    assert seen.collectives().total() == (world_size > 1)
    cut = embedding_of(reduce_scatter_embeddings=True)
    if world_size == 2:
        with pytest.raises(LayoutError, match=r"dim 0 of a tensor of shape \[3, 1, 3\] is to be cut over 2 ranks"):
            cut(torch.zeros(1, 3, dtype=torch.int64))


def test_ranges_errors_and_freezing() -> None:
    run_ranks(1, others_body)
    run_ranks(2, others_body)


@pytest.mark.parametrize("padding_idx", [10, -11])
def test_padding_id_out_of_range_is_refused(padding_idx: int) -> None:
    with pytest.raises(ConfigError, match=rf"padding_idx is {padding_idx} in a vocabulary of 10; give an id in that"):
        embedding_of(padding_idx=padding_idx)


def test_output_may_be_written_into() -> None:
    """Megatron's embedding dropout and scaling write in place, under a frozen table too."""
    for is_frozen in (False, True):
        layer = embedding_of()
        layer.weight.requires_grad = not is_frozen
        y = layer(IDS)
        y.mul_(2)
        assert torch.equal(y, 2 * F.embedding(IDS, layer.weight))
