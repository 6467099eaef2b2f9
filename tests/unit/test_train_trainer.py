"""One step: the loss is a mean over tokens however the rows are cut, and what cannot be learned from is an error."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from megatron_frozen.comm import get_data_parallel_group, get_tensor_model_parallel_group, initialize_model_parallel
from megatron_frozen.errors import MegatronFrozenError
from megatron_frozen.testing import run_ranks
from megatron_frozen.train.batches import RowOrder, collate, collate_all, num_labels
from megatron_frozen.train.config import TrainConfig
from megatron_frozen.train.evaluate import evaluate
from megatron_frozen.train.packing import PackedRow
from megatron_frozen.train.trainer import Trainer

CPU = torch.device("cpu")
# Three labelled tokens of loss 1, then one of loss 5: the mean over tokens is 2, the mean of the rows' means 3.
ROWS = [
    PackedRow(input_ids=[1, 1, 1, 9], labels=[4, 4, 4, -100], document_lengths=(4,)),
    PackedRow(input_ids=[5, 9, 9, 9], labels=[4, -100, -100, -100], document_lengths=(1, 3)),
]


class TokenLoss(nn.Module):
    """Stands for a model: the loss of a labelled token is its id times a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.tp_group = get_tensor_model_parallel_group()

    def forward(self, input_ids: Tensor, *, labels: Tensor, document_lengths: list[list[int]]) -> Tensor:
        assert all(sum(lengths) == input_ids.shape[1] for lengths in document_lengths)
        return self.weight * input_ids * (labels != -100)


def config(**changes: Any) -> TrainConfig:
    return TrainConfig(
        model="m", output_dir="o", train_data="t", max_steps=9, lora=None, dtype="fp32", learning_rate=0.5, **changes
    )


def trainer(model: nn.Module, **changes: Any) -> Trainer:
    return Trainer(cast("Any", model), config=config(max_grad_norm=None, **changes), rows=ROWS, device=CPU)


def step_of_toy(rank: int, world_size: int, tp_size: int, changes: dict[str, int]) -> tuple[float, float, float]:
    initialize_model_parallel(tp_size)
    one = trainer(TokenLoss(), **changes)
    report = one.run_step()
    return report.loss, report.grad_norm, float(one.parameters["weight"].detach())


@pytest.mark.parametrize(
    ("world_size", "tp_size", "changes"),
    [
        (1, 1, {"micro_batch_size": 2}),
        (1, 1, {"gradient_accumulation_steps": 2}),
        (2, 1, {}),
        (2, 2, {"gradient_accumulation_steps": 2}),
        (2, 2, {"micro_batch_size": 2}),
    ],
)
def test_loss_is_the_mean_over_tokens_for_every_cut(world_size, tp_size, changes):
    for loss, norm, weight in run_ranks(world_size, step_of_toy, tp_size, changes):
        assert loss == pytest.approx(2.0, abs=1e-6)
        assert norm == pytest.approx(2.0, abs=1e-6)
        assert weight == pytest.approx(0.5)  # Adam's first step is the rate itself


def evaluate_toy(rank: int, world_size: int) -> tuple[float, int]:
    initialize_model_parallel(1)
    model = TokenLoss().train()
    one = trainer(model)
    batches = collate_all(ROWS[rank::world_size] if rank < 2 else [], size=1, multiple_of=1, device=CPU)
    result = evaluate(cast("Any", model), batches, group=get_data_parallel_group(), precision=one.precision)
    assert model.training
    return result


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_evaluation_is_the_mean_over_tokens_of_all_ranks(world_size):
    assert run_ranks(world_size, evaluate_toy) == [(2.0, 4)] * world_size


def test_optimizer_is_adamw_with_the_schedule():
    one = trainer(TokenLoss(), warmup_steps=2, weight_decay=0.1)
    assert [one.run_step().learning_rate for _ in range(3)] == pytest.approx(
        [0.25, 0.5, 0.5 * 0.5 * (1 + math.cos(math.pi / 7))]
    )
    assert (one.step, one.position) == (3, 3)
    assert [group["weight_decay"] for group in one.optimizer.param_groups] == [0.0]  # a scalar is no matrix
    groups = trainer(Unused(), weight_decay=0.1).optimizer.param_groups
    assert [(group["weight_decay"], len(group["params"])) for group in groups] == [(0.1, 1), (0.0, 1)]


class Unused(TokenLoss):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(2, 2))


def test_parameter_without_gradient_is_named():
    one = trainer(Unused())
    with pytest.raises(MegatronFrozenError, match=r"step 1: 1 of 2 trainable parameters got no gradient \(unused,"):
        one.run_step()


def test_gradients_that_are_all_zero_are_an_error():
    model = TokenLoss()
    one = Trainer(
        cast("Any", model),
        config=config(),
        rows=[dataclasses.replace(ROWS[0], input_ids=[0, 0, 0, 0])],
        device=CPU,
    )
    with pytest.raises(MegatronFrozenError, match=r"step 1: every gradient is zero, .* and lower learning_rate if"):
        one.run_step()
    assert float(model.weight.detach()) == 1.0


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_numbers_that_are_not_finite_end_the_run_before_the_update(value):
    model = TokenLoss()
    one = trainer(model)
    one.run_step()
    with torch.no_grad():
        model.weight.fill_(value)
    with pytest.raises(MegatronFrozenError, match=r"step 2: the loss is (inf|nan) and the gradient norm .* Lower"):
        one.run_step()
    assert float(one.optimizer.state[model.weight]["step"]) == 1.0


def test_order_of_rows_depends_on_the_seed_alone():
    order = RowOrder(5, seed=3)
    rows = order.rows(0, count=12)
    assert sorted(rows[:5]) == sorted(rows[5:10]) == [0, 1, 2, 3, 4]
    assert rows[:5] != rows[5:10]
    assert RowOrder(5, seed=3).rows(4, count=3) == rows[4:7]
    assert order.rows(2, count=1) == rows[2:3]
    assert RowOrder(5, seed=4).rows(0, count=12) != rows


def test_batch_ends_with_its_last_label():
    batch = collate(ROWS, multiple_of=2, device=CPU)
    assert batch.input_ids.tolist() == [[1, 1, 1, 9], [5, 9, 9, 9]]
    assert batch.document_lengths == [[4], [1, 3]]
    batch = collate(ROWS, multiple_of=1, device=CPU)
    assert batch.input_ids.tolist() == [[1, 1, 1], [5, 9, 9]]
    assert batch.labels.tolist() == [[4, 4, 4], [4, -100, -100]]
    assert batch.document_lengths == [[3], [1, 2]]
    longer = collate(ROWS, multiple_of=3 * 2, device=CPU)
    assert longer.input_ids.tolist() == [[1, 1, 1, 9, 0, 0], [5, 9, 9, 9, 0, 0]]
    assert longer.document_lengths == [[4, 2], [1, 3, 2]]
    assert num_labels(ROWS) == 4
