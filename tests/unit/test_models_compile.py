"""A compiled model: the values of eager code, and three graphs for all layers, lengths and documents."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_frozen.testing import run_ranks
from tests.unit.models_compile_ranks import compile_model
from tests.unit.models_reference import tiny_model, weights_of

# Dynamo looks at .grad of a layer's input.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def _arguments(variant: str) -> tuple[Any, Any]:
    reference = tiny_model(variant, num_hidden_layers=3)
    weights = {name: weight.double() for name, weight in weights_of(reference).items()}
    return {**reference.config.to_dict(), "dtype": torch.float64}, weights


def test_one_graph_for_the_first_layer_one_for_the_others_and_one_without_gradients() -> None:
    ((error, num_graphs, num_compared),) = run_ranks(1, compile_model, *_arguments("llama"), {})
    assert num_compared == 5 * (2 + 3 * 14)
    assert error < 1
    assert num_graphs == [3, 3]  # recomputing adds none


def test_all_weights_train_under_sequence_parallelism() -> None:
    options = {"sequence_parallel": True, "lora": False, "evaluates": False}
    for error, num_graphs, _ in run_ranks(2, compile_model, *_arguments("qwen3"), options):
        assert error < 1
        assert num_graphs == [1, 1]  # the first layer's input has a gradient too


def test_adapters_on_two_ranks() -> None:
    options = {"evaluates": False}
    for error, num_graphs, _ in run_ranks(2, compile_model, *_arguments("llama"), options):
        assert error < 1
        assert num_graphs == [2, 2]
