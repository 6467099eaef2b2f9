"""Our names that Megatron-core has too take its arguments, in its order and with its defaults."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest
import torch

import megatron_frozen as ours
from megatron_frozen.errors import ConfigError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of Transformer Engine and apex being absent
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel import layers

CALLS = {
    "ColumnParallelLinear": (ours.ColumnParallelLinear, layers.ColumnParallelLinear),
    "ColumnParallelLinear.forward": (ours.ColumnParallelLinear.forward, layers.ColumnParallelLinear.forward),
    "RowParallelLinear": (ours.RowParallelLinear, layers.RowParallelLinear),
    "RowParallelLinear.forward": (ours.RowParallelLinear.forward, layers.RowParallelLinear.forward),
    "VocabParallelEmbedding": (ours.VocabParallelEmbedding, layers.VocabParallelEmbedding),
    "VocabParallelEmbedding.forward": (ours.VocabParallelEmbedding.forward, layers.VocabParallelEmbedding.forward),
    "LinearWithFrozenWeight": (ours.LinearWithFrozenWeight.forward, layers.LinearWithFrozenWeight.forward),
    **{
        name: (getattr(ours, name), getattr(tensor_parallel, name))
        for name in (
            "copy_to_tensor_model_parallel_region",
            "gather_from_tensor_model_parallel_region",
            "linear_with_grad_accumulation_and_async_allreduce",
            "reduce_from_tensor_model_parallel_region",
            "scatter_to_sequence_parallel_region",
            "scatter_to_tensor_model_parallel_region",
            "vocab_parallel_cross_entropy",
        )
    },
    "linear_with_frozen_weight": (ours.linear_with_frozen_weight, layers.linear_with_frozen_weight),
}


def parameters(function: Any) -> dict[str, inspect.Parameter]:
    """Return the named parameters of a call, in order, without the receiver."""
    return {name: value for name, value in inspect.signature(function).parameters.items() if name != "self"}


MAIN_ADDS = {"gtp_remat_size": 1, "output_dtype": None}
"""What Megatron-core's current main passes to its two linear functions by name, beyond 0.16.1."""


@pytest.mark.parametrize("name", ["linear_with_frozen_weight", "linear_with_grad_accumulation_and_async_allreduce"])
def test_a_call_of_megatrons_main_fits(name: str) -> None:
    linear, weight = getattr(ours, name), torch.randn(5, 4)
    call = {"bias": None, "gradient_accumulation_fusion": False, "allreduce_dgrad": False, "sequence_parallel": False}
    x = torch.randn(3, 4)
    output = linear(x, weight, **call, **MAIN_ADDS)
    torch.testing.assert_close(output, x @ weight.t())
    with pytest.raises(ConfigError, match="generalised-tensor-parallel shard"):
        linear(x, weight, **call, **MAIN_ADDS | {"gtp_remat_size": 2})


@pytest.mark.parametrize("name", CALLS)
def test_a_call_written_for_megatron_fits(name: str) -> None:
    """Each of its parameters is one of ours, in the same place if positional, with the same default."""
    mine, theirs = (parameters(function) for function in CALLS[name])
    positional = [
        [name for name, parameter in found.items() if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        for found in (mine, theirs)
    ]
    assert positional[0][: len(positional[1])] == positional[1]
    for parameter in theirs.values():
        assert parameter.name in mine
        if parameter.default is not inspect.Parameter.empty:
            assert mine[parameter.name].default == parameter.default, parameter.name
    extra = [value for key, value in mine.items() if key not in theirs]
    assert all(value.default is not inspect.Parameter.empty for value in extra)


@pytest.mark.parametrize(
    ("name", "left_out"),
    [
        # Its buffers and uneven splits serve expert layers, which this package does not have.
        ("gather_from_sequence_parallel_region", {"output_split_sizes", "use_global_buffer"}),
        ("reduce_scatter_to_sequence_parallel_region", {"input_split_sizes", "use_global_buffer"}),
    ],
)
def test_a_call_of_the_sequence_mappings_fits(name: str, left_out: set[str]) -> None:
    mine, theirs = parameters(getattr(ours, name)), parameters(getattr(tensor_parallel, name))
    assert set(theirs) - set(mine) == left_out
    kept = [key for key in theirs if key not in left_out]
    assert list(mine)[: len(kept)] == kept


def test_groups_take_the_first_three_arguments_of_megatrons() -> None:
    mine = list(parameters(ours.initialize_model_parallel))
    theirs = list(parameters(parallel_state.initialize_model_parallel))
    assert mine[:3] == theirs[:3]
    assert set(mine) <= set(theirs)


def test_megatrons_own_config_builds_our_layers() -> None:
    config = ModelParallelConfig(params_dtype=torch.bfloat16, use_cpu_initialization=True)
    options: dict[str, Any] = {"config": config, "init_method": torch.nn.init.xavier_normal_}
    column = ours.ColumnParallelLinear(8, 16, **options)
    row = ours.RowParallelLinear(16, 8, bias=True, input_is_parallel=True, skip_bias_add=True, **options)
    embedding = ours.VocabParallelEmbedding(32, 8, **options)
    hidden = embedding(torch.arange(6).view(2, 3)).transpose(0, 1)
    output, bias = row(column(hidden)[0])
    assert output.dtype == torch.bfloat16
    assert bias is row.bias
    output.sum().backward()
    assert column.weight is not None
    assert column.weight.grad is not None


def test_our_config_has_megatrons_names() -> None:
    own = {"dgrad_in_fp32", "allreduce_dgrad_in_fp32", "allreduce_dgrad_pieces"}
    fields = set(inspect.signature(ours.ModelParallelConfig).parameters) - own
    assert fields <= set(inspect.signature(ModelParallelConfig).parameters)
