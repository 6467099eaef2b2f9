"""Adapters on the whole decoder over ranks: collectives per step, and gradients against one rank."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_frozen.diagnostics import Recorder
from megatron_frozen.layers import ModelParallelConfig
from megatron_frozen.lora import LoraConfig, apply_lora, lora_parameters, named_lora_layers, require_input_grads
from megatron_frozen.models import CausalLM, DecoderConfig
from megatron_frozen.params import sum_partial_grads
from megatron_frozen.testing import assert_close_to, run_ranks
from tests.unit.lora_toys import full_gradient, seeded, start_ranks
from tests.unit.models_ranks import build_model
from tests.unit.models_reference import tiny_config, tiny_model, weights_of

IDS = torch.arange(16).view(2, 8)
LABELS = IDS.roll(-1, 1)


def _counted(rank: int, world_size: int, mode: str, weights: dict[str, Tensor]) -> dict[str, Counter[str]]:
    """Collectives of one forward and backward through the frozen model, without and with adapters."""
    del rank
    start_ranks(world_size)
    model = build_model(tiny_config("llama"), weights, sequence_parallel=mode == "SP")
    model.requires_grad_(False)  # noqa: FBT003
    require_input_grads(model)  # so that the model without adapters has a backward, through the same layers

    def count() -> Counter[str]:
        with Recorder() as seen:
            model(IDS, labels=LABELS).sum().backward()
        return seen.collectives()

    counts = {"bare": count()}
    apply_lora(model, LoraConfig(r=2))
    counts["adapted"] = count()
    return counts


@pytest.mark.parametrize("mode", ["plain", "SP"])
def test_a_step_with_adapters_has_the_collectives_of_one_without(mode: str) -> None:
    for counts in run_ranks(2, _counted, mode, weights_of(tiny_model("llama"))):
        assert counts["bare"] == counts["adapted"]
        assert sum(counts["bare"].values()) > 8


def _gradients(rank: int, world_size: int, mode: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Full gradients of every factor, all filled, after the step's own sum over ranks."""
    del rank
    group = start_ranks(world_size)
    model = build_model(tiny_config("llama"), weights, sequence_parallel=mode == "SP")
    apply_lora(model, LoraConfig(r=2))
    for number, (_, layer) in enumerate(named_lora_layers(model)):
        full_A, full_B = layer.full_factors("default")
        full_B = 0.1 * seeded(*full_B.shape, seed=number)
        layer.set_factors("default", full_A=full_A, full_B=full_B)
    model(IDS, labels=LABELS).mean().backward()
    sum_partial_grads(lora_parameters(model), group=group)
    return {
        name: full_gradient(parameter, group=group)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


@pytest.mark.parametrize("mode", ["plain", "SP"])
def test_gradients_of_all_factors_are_those_of_one_rank_and_alike_on_all(mode: str) -> None:
    weights = weights_of(tiny_model("llama"))
    first, second = run_ranks(2, _gradients, mode, weights)
    (alone,) = run_ranks(1, _gradients, "plain", weights)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert len(first) == 2 * 2 * 7
    assert_close_to(first, alone, tolerance=2e-5)


def _marks(model: CausalLM) -> dict[str, dict[str, Any]]:
    """Everything said of each parameter; the key by which compiled graphs know a weight differs between models."""
    return {
        name: {mark: torch.is_tensor(value) or value for mark, value in vars(parameter).items()}
        for name, parameter in model.named_parameters()
    }


def test_every_parameter_keeps_its_marks_where_loading_replaces_it() -> None:
    config = DecoderConfig.from_hf(tiny_config("qwen3, bias"))

    def build() -> CausalLM:
        return CausalLM(config, parallel=ModelParallelConfig())

    built = build()
    apply_lora(built, LoraConfig(r=2))
    with torch.device("meta"):
        model = build()
    apply_lora(model, LoraConfig(r=2))
    model.to_empty(device="cpu")
    assert _marks(model) == _marks(built)
    model.load_state_dict({key: tensor.clone() for key, tensor in built.state_dict().items()}, assign=True)
    assert _marks(model) == _marks(built)
    assert sum(bool(marks) for marks in _marks(model).values()) > 40
