"""The embedding and the cross-entropy at 1 to 4 ranks against the whole table and whole rows of logits in fp64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from megatron_frozen import (
    ModelParallelConfig,
    VocabParallelEmbedding,
    initialize_model_parallel,
    vocab_parallel_cross_entropy,
)
from megatron_frozen.testing import assert_close_to, rank_device, run_ranks
from tests.functional.replicas import assert_equal_on_all_ranks
from tests.unit.core_ranks import seeded

S, B, V, H = 12, 3, 48, 5
IGNORED = -100


def _shard(tensor: torch.Tensor | None, *, dim: int, rank: int, world_size: int) -> torch.Tensor | None:
    return None if tensor is None else tensor.chunk(world_size, dim=dim)[rank]


def embedding_body(rank: int, world_size: int) -> None:
    initialize_model_parallel(world_size)
    device = rank_device()
    table = seeded(V, H, seed=1)
    ids = torch.randint(V, (B, S), generator=torch.Generator().manual_seed(2))
    grad = seeded(B, S, H, seed=3)
    leaf = table.clone().requires_grad_()
    expected = F.embedding(ids, leaf)
    expected.backward(grad)
    for sequence_parallel in (False, True):
        for is_frozen in (True, False):
            config = ModelParallelConfig(sequence_parallel=sequence_parallel, use_cpu_initialization=True)
            layer = VocabParallelEmbedding(
                V, H, init_method=lambda t: t.copy_(table), config=config, reduce_scatter_embeddings=sequence_parallel
            ).to(device)
            layer.weight.requires_grad = not is_frozen
            y = layer(ids.to(device))
            whole_y, dy = expected.detach(), grad
            if sequence_parallel:  # [s / ranks, b, h]
                whole_y, dy = (tensor.transpose(0, 1).chunk(world_size)[rank] for tensor in (whole_y, dy))
            else:
                assert_equal_on_all_ranks({"y": y.detach()})
            if not is_frozen:
                y.backward(dy.to(device, torch.float32))
            assert y.requires_grad is not is_frozen
            dw = None if is_frozen else _shard(leaf.grad, dim=0, rank=rank, world_size=world_size)
            results = {"y": y.detach().cpu(), "dw": None if layer.weight.grad is None else layer.weight.grad.cpu()}
            assert_close_to(results, {"y": whole_y, "dw": dw}, tolerance=1e-6)


def cross_entropy_body(rank: int, world_size: int) -> None:
    initialize_model_parallel(world_size)
    device = rank_device()
    target = torch.randint(V, (S, B), generator=torch.Generator().manual_seed(1))
    target[0, 1] = target[5, 2] = IGNORED
    dloss = seeded(S, B, seed=2, dtype=torch.float32)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 3e-3)):
        logits = (3 * seeded(S, B, V, seed=3)).to(dtype)
        whole = logits.double().requires_grad_()
        expected = F.cross_entropy(whole.flatten(0, 1), target.flatten(), reduction="none").view(S, B)
        expected.backward(dloss.double())
        # A head's logits are [b, s, V / ranks], seen as [s, b, V / ranks].
        shard = logits.transpose(0, 1).chunk(world_size, dim=-1)[rank].contiguous().transpose(0, 1)
        leaf = shard.to(device).requires_grad_()
        loss = vocab_parallel_cross_entropy(leaf, target.to(device))
        loss.backward(dloss.to(device))
        assert_equal_on_all_ranks({"loss": loss.detach()})
        assert leaf.grad is not None
        assert_close_to({"loss": loss.detach().cpu()}, {"loss": expected.detach()}, tolerance=1e-6)
        dlogits = _shard(whole.grad, dim=-1, rank=rank, world_size=world_size)
        assert_close_to({"dlogits": leaf.grad.cpu()}, {"dlogits": dlogits}, tolerance=tolerance)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_embedding_against_the_whole_table(world_size: int) -> None:
    run_ranks(world_size, embedding_body)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_cross_entropy_against_whole_rows(world_size: int) -> None:
    run_ranks(world_size, cross_entropy_body)
