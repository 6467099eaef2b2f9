"""How adapters start: the same at any size and on every rank, whatever the ranks' own seeds (cases 21, 22)."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

from megatron_frozen.comm import get_data_parallel_group, get_data_parallel_rank, get_tensor_model_parallel_rank
from megatron_frozen.lora import LoraConfig, LoraLinear, apply_lora, lora_parameters, named_lora_layers, reset_adapter
from megatron_frozen.lora.config import InitMethod
from megatron_frozen.lora.init import init_lora_a
from megatron_frozen.params import sum_grads, sum_partial_grads
from megatron_frozen.testing import run_ranks
from tests.unit.lora_toys import Stack, column, row, seeded, start_ranks

IN, R = 64, 4


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj = column(torch.zeros(8, IN))
        self.down_proj = row(torch.zeros(8, IN))


def _layers(model: nn.Module) -> dict[str, LoraLinear]:
    return dict(named_lora_layers(model))


def _starts(rank: int, world_size: int, method: InitMethod) -> dict[str, Tensor]:
    """Full A of a column and a row layer after apply_lora with each rank's own seed, and after a re-start."""
    start_ranks(world_size)
    torch.manual_seed(10 + rank)
    random.seed(10 + rank)
    state = torch.get_rng_state()
    config = LoraConfig(r=R, init_method=method, target_modules=["up_proj", "down_proj"])
    model = apply_lora(Pair(), config, seed=0 if rank == 0 else 100 + rank)
    assert torch.equal(torch.get_rng_state(), state)  # the job's own stream is left alone
    start = {name: layer.full_factors("default")[0].clone() for name, layer in _layers(model).items()}
    with torch.no_grad():
        for parameter in lora_parameters(model):
            parameter.fill_(9)
    reset_adapter(model, seed=0 if rank == 0 else 200 + rank)
    for name, layer in _layers(model).items():
        full_A, full_B = layer.full_factors("default")
        assert torch.equal(full_A, start[name])
        assert not full_B.any()
    return start


@pytest.mark.parametrize("method", ["kaiming_uniform", "xavier_normal"])
def test_a_starts_from_the_full_matrix_at_any_tensor_parallel_size(method: InitMethod) -> None:
    (alone,) = run_ranks(1, _starts, method)
    for ranks in (run_ranks(2, _starts, method), run_ranks(4, _starts, method)):
        for start in ranks:
            assert all(torch.equal(start[name], alone[name]) for name in alone)
    assert not torch.equal(alone["up_proj"], alone["down_proj"])


def test_the_spread_is_that_of_the_full_fan() -> None:
    draws = [
        {
            method: init_lora_a(R, IN, method=method, seed=seed, layer_name="x")
            for method in ("kaiming_uniform", "xavier_normal")
        }
        for seed in range(50)
    ]
    kaiming = torch.stack([draw["kaiming_uniform"] for draw in draws])
    assert 0.124 < kaiming.abs().max().item() <= 0.125  # 1 / sqrt(64); a shard's fan gives 0.1768 at TP=2
    xavier = torch.stack([draw["xavier_normal"] for draw in draws])
    assert xavier.std().item() == pytest.approx(0.1715, rel=0.03)  # a shard's fan gives 0.2357 at TP=2


def test_seed_and_layer_both_choose_the_start() -> None:
    def draw(seed: int, layer_name: str) -> Tensor:
        return init_lora_a(R, IN, method="kaiming_uniform", seed=seed, layer_name=layer_name)

    assert torch.equal(draw(1, "a"), draw(1, "a"))
    assert not torch.equal(draw(1, "a"), draw(2, "a"))
    assert not torch.equal(draw(1, "a"), draw(1, "b"))


def _trained_factors(rank: int, world_size: int) -> dict[str, tuple[int, int, Tensor, Tensor]]:
    """TP=2 x DP=2, other data on each data-parallel rank: this rank's factors before and after one step."""
    del world_size
    group = start_ranks(2)
    torch.manual_seed(10 + rank)
    random.seed(10 + rank)
    model = Stack(1)
    apply_lora(model, LoraConfig(r=R, target_modules=["up_proj", "down_proj"]), seed=rank)
    parameters = lora_parameters(model)
    before = [parameter.detach().clone() for parameter in parameters]
    model(seeded(3, 2, 8, seed=get_data_parallel_rank())).square().sum().backward()
    sum_partial_grads(parameters, group=group)
    sum_grads(parameters, group=get_data_parallel_group())
    torch.optim.AdamW(parameters, lr=0.1).step()
    names = ["up.A", "up.B", "down.A", "down.B"]
    place = get_tensor_model_parallel_rank(), get_data_parallel_rank()
    return {name: (*place, old, new.detach()) for name, old, new in zip(names, before, parameters, strict=True)}


def test_replicas_agree_everywhere_and_shards_across_data_parallel_ranks_also_after_a_step() -> None:
    ranks = run_ranks(4, _trained_factors)
    for name in ("up.A", "down.B"):  # replicated over TP
        for moment in (2, 3):
            assert all(torch.equal(result[name][moment], ranks[0][name][moment]) for result in ranks)
    for name in ("up.B", "down.A"):  # cut over TP
        for moment in (2, 3):
            by_tp = {(result[name][0], result[name][1]): result[name][moment] for result in ranks}
            assert torch.equal(by_tp[0, 0], by_tp[0, 1])
            assert torch.equal(by_tp[1, 0], by_tp[1, 1])
            if moment == 3 or name == "down.A":
                assert not torch.equal(by_tp[0, 0], by_tp[1, 0])
