"""The table of main_grad: each combination of facts, its plan, and what is refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from megatron_frozen import linear_with_frozen_weight, linear_with_grad_accumulation_and_async_allreduce
from megatron_frozen.errors import ConfigError
from megatron_frozen.main_grad import Plan, Returns, WeightFacts, check_product, decide, facts_of

OPTIONS: dict[str, Any] = {"gradient_accumulation_fusion": True, "allreduce_dgrad": False, "sequence_parallel": False}
ADD = {"writes": True, "accumulates": True}
OVER = {"writes": True, "accumulates": False}
DDP = {"has_buffer": True, "flag": False}
FSDP = {"has_getter": True, "flag": False, "asks_to_overwrite": True}

TABLE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "frozen": ({"trains": False}, {}),
    "frozen, buffer": ({"trains": False, **DDP}, {}),
    "frozen, Megatron-FSDP": ({"trains": False, **FSDP, "is_sharded": True}, {}),
    "frozen, nobody's shard": ({"trains": False, "is_gtp": True}, {}),
    "fusion off": ({"is_fused": False, **DDP}, {"returns": Returns.GRADIENT}),
    "buffer, nobody looks": ({"has_buffer": True}, ADD),
    "buffer to overwrite": ({"has_buffer": True, "asks_to_overwrite": True}, OVER),
    "buffer to overwrite, second use": ({"has_buffer": True, "asks_to_overwrite": True, "was_written": True}, ADD),
    "DDP": (DDP, {**ADD, "returns": Returns.DUMMY, "sets_flag": True}),
    "DDP, next micro-batch": ({**DDP, "flag": True}, {**ADD, "returns": Returns.DUMMY, "sets_flag": True}),
    "DDP, tied": ({**DDP, "is_shared": True}, {**ADD, "returns": Returns.ZEROS, "sets_flag": True}),
    "FSDP, sharded": ({**FSDP, "is_sharded": True}, {**OVER, "returns": Returns.DUMMY, "sets_flag": True}),
    "FSDP, sharded, second use": (
        {**FSDP, "is_sharded": True, "flag": True},
        {**ADD, "returns": Returns.DUMMY, "sets_flag": True},
    ),
    "FSDP, whole": ({**FSDP, "is_sharded": False}, {**ADD, "returns": Returns.DUMMY, "sets_flag": True}),
    "FSDP, whole, tied": ({**FSDP, "is_sharded": False, "is_shared": True}, ADD),
    "FSDP, no _gbuf": (FSDP, {**OVER, "returns": Returns.DUMMY, "sets_flag": True}),
    "FSDP, no _gbuf, whole": (
        {**FSDP, "asks_to_overwrite": False},
        {**ADD, "returns": Returns.DUMMY, "sets_flag": True},
    ),
    "getter, nobody looks": ({"has_getter": True}, ADD),
}


@pytest.mark.parametrize("name", TABLE)
def test_plan(name: str) -> None:
    facts, plan = TABLE[name]
    assert decide(WeightFacts(**facts)) == Plan(**plan)


BOOLEANS = ("has_buffer", "has_getter", "asks_to_overwrite", "was_written", "is_shared", "is_gtp")


def every_fact() -> list[WeightFacts]:
    return [
        WeightFacts(**dict(zip(BOOLEANS, values, strict=True)), is_sharded=is_sharded, flag=flag)
        for values in itertools.product([False, True], repeat=len(BOOLEANS))
        for is_sharded in (None, False, True)
        for flag in (None, False, True)
    ]


def test_no_plan_loses_a_gradient() -> None:
    """Properties over all combinations of facts of a fused, trainable weight: 576 of them."""
    num_plans = 0
    for facts in every_fact():
        try:
            plan = decide(facts)
        except ConfigError:
            unsound = facts.is_gtp or (facts.is_shared and facts.has_getter and facts.overwrites)
            assert unsound or not (facts.has_buffer or facts.has_getter), facts
            continue
        num_plans += 1
        holds = facts.flag if facts.flag is not None else facts.was_written
        assert plan.writes, facts
        assert plan.accumulates or (facts.overwrites and not holds), facts  # only what is of no use is written over
        assert not plan.sets_flag or facts.flag is not None, facts  # no flag where nobody looks
        assert plan.returns is Returns.NOTHING or plan.sets_flag, facts  # a dummy is never taken for a gradient
        assert not (facts.is_shared and plan.returns is Returns.DUMMY), facts
    assert num_plans > 100


class Bucket:
    def __init__(self, *, is_data_distributed: bool) -> None:
        self.is_data_distributed = is_data_distributed


def test_attributes_become_facts() -> None:
    weight: Any = torch.nn.Parameter(torch.zeros(5, 7))
    assert facts_of(weight) == WeightFacts()
    weight.main_grad, weight.grad_added_to_main_grad, weight.zero_out_wgrad = torch.zeros(5, 7), False, True
    assert facts_of(weight) == WeightFacts(has_buffer=True, flag=False, is_shared=True)
    weight.main_grad, weight.zero_out_wgrad, weight.overwrite_main_grad = None, False, True
    weight.get_main_grad, weight._gbuf, weight._is_shared = None, Bucket(is_data_distributed=True), True
    facts = WeightFacts(has_getter=True, flag=False, asks_to_overwrite=True, is_sharded=True, is_shared=True)
    assert facts_of(weight) == facts
    assert facts_of(weight.requires_grad_(requires_grad=False)).trains is False


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"has_buffer": True, "is_gtp": True}, "is a generalised-tensor-parallel shard .is_gtp_weight_remat"),
        ({"flag": False}, "trains and has neither a main_grad buffer nor a get_main_grad"),
        ({**FSDP, "is_sharded": True, "is_shared": True}, "is shared with a layer that does not fuse"),
    ],
)
def test_what_is_refused(facts: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        decide(WeightFacts(**facts))


@pytest.mark.parametrize("trains", [False, True])
def test_a_gtp_shard_is_refused_in_forward(*, trains: bool) -> None:
    weight: Any = torch.nn.Parameter(torch.zeros(5, 7), requires_grad=trains)
    weight.is_gtp_weight_remat = True
    linear = linear_with_grad_accumulation_and_async_allreduce if trains else linear_with_frozen_weight
    with pytest.raises(ConfigError, match="whose gradient the weight object reduces itself"):
        linear(torch.zeros(2, 7), weight, None, **OPTIONS)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_gradient_put_off_under_sharded_fsdp_is_refused_before_anything_is_kept(*, is_sharded: bool) -> None:
    weight: Any = torch.nn.Parameter(torch.zeros(5, 7))
    weight.get_main_grad, weight._gbuf = None, Bucket(is_data_distributed=is_sharded)
    kept: list[torch.Tensor] = []
    check_product(weight)
    if not is_sharded:
        check_product(weight, is_put_off=True)
        return
    with pytest.raises(ConfigError, match="defer_embedding_wgrad_compute is on for a weight of shape"):
        linear_with_grad_accumulation_and_async_allreduce(
            torch.zeros(2, 7), weight, None, **OPTIONS, grad_output_buffer=kept
        )
    assert not kept
