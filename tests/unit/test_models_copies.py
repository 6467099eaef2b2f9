"""copy.deepcopy of a model: what it shares, what it keeps, and that it trains on its own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_frozen import ColumnParallelLinear, LoraConfig, ModelParallelConfig, apply_lora, sum_partial_grads
from megatron_frozen.main_grad import described
from megatron_frozen.models import CausalLM
from megatron_frozen.testing import run_ranks
from tests.unit.lora_toys import start_ranks
from tests.unit.models_ranks import build_model
from tests.unit.models_reference import random_batch, tiny_config, tiny_model, weights_of

MARKS = ("tensor_model_parallel", "partition_dim", "partition_stride", "sequence_parallel", "allreduce")


def marks(model: CausalLM) -> dict[str, Any]:
    return {
        name: [getattr(param, mark, None) for mark in MARKS] + [param.requires_grad, described(param)]
        for name, param in model.named_parameters()
    }


def gradients(model: CausalLM, *, group: Any) -> dict[str, Tensor]:
    model.zero_grad()
    input_ids, labels = random_batch()
    model(input_ids, labels=labels).sum().backward()
    sum_partial_grads(model.parameters(), group=group)
    return {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}


def copy_body(rank: int, world_size: int, mode: str, weights: dict[str, Tensor]) -> int:
    """The number of parameters with a partial gradient, which a copy without marks would leave unsummed."""
    del rank
    group = start_ranks(world_size)
    model = build_model(tiny_config("qwen3"), weights, sequence_parallel=mode == "SP")
    if mode == "LoRA":
        apply_lora(model, LoraConfig(r=2))
    expected = gradients(model, group=group)
    copied = copy.deepcopy(model)

    assert marks(copied) == marks(model)
    for part, original in zip(copied.modules(), model.modules(), strict=True):
        assert part is not original
        assert getattr(part, "tp_group", None) is getattr(original, "tp_group", None)
        assert getattr(part, "config", None) is getattr(original, "config", None)
    torch.testing.assert_close(gradients(copied, group=group), expected, rtol=0, atol=0)
    with torch.no_grad():
        for param in copied.parameters():
            param.zero_()
    torch.testing.assert_close(gradients(model, group=group), expected, rtol=0, atol=0)
    return sum(values[3] is True for values in marks(copied).values())


@pytest.mark.filterwarnings("ignore:sequence_parallel is on with one")
@pytest.mark.parametrize("mode", ["plain", "SP", "LoRA"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_copy_shares_groups_keeps_marks_and_trains_on_its_own(world_size: int, mode: str) -> None:
    counts = run_ranks(world_size, copy_body, mode, weights_of(tiny_model("qwen3")))
    assert all(count > 0 for count in counts) == (world_size == 2 or mode == "LoRA")


def test_a_compiled_copy_sets_its_own_flag() -> None:
    config = ModelParallelConfig(gradient_accumulation_fusion=True)
    layer = ColumnParallelLinear(7, 5, config=config, init_method=torch.nn.init.ones_, bias=False)
    copied = copy.deepcopy(layer)
    weights: list[Any] = [layer.weight, copied.weight]
    for weight in weights:
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(5, 7), False
    torch._dynamo.reset()
    for number, compiled in enumerate(torch.compile(part, fullgraph=True, backend="eager") for part in (layer, copied)):
        compiled(torch.ones(3, 7))[0].sum().backward()
        assert [weight.grad_added_to_main_grad for weight in weights] == [True, number == 1]
        assert [bool(weight.main_grad.any()) for weight in weights] == [True, number == 1]
    torch._dynamo.reset()
