"""Building layers: arguments, attributes, initial weights, state dicts, foreign configs, and each refusal's words."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_frozen import (
    ColumnParallelLinear,
    ModelParallelConfig,
    RowParallelLinear,
    VocabParallelEmbedding,
    destroy_model_parallel,
    initialize_model_parallel,
)
from megatron_frozen.comm import get_tensor_model_parallel_group
from megatron_frozen.errors import ConfigError, LayoutError
from megatron_frozen.params import gather_full
from megatron_frozen.testing import run_ranks

CONFIG = ModelParallelConfig()
NORMAL: dict[str, Any] = {"config": CONFIG, "init_method": torch.nn.init.normal_}
ROW: dict[str, Any] = {"bias": True, "input_is_parallel": True, "skip_bias_add": False}


def weight_of(layer: Any) -> torch.nn.Parameter:
    assert isinstance(layer.weight, torch.nn.Parameter)
    return layer.weight


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor_model_parallel_size": 0}, "tensor_model_parallel_size is 0; give the number of ranks, at least 1"),
        ({"expert_model_parallel_size": -1}, "expert_model_parallel_size is -1; give the number of ranks"),
        ({"params_dtype": torch.int32}, "params_dtype is torch.int32; give a floating-point dtype"),
    ],
)
def test_config_refuses(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelParallelConfig(**settings)


def test_linears_refuse_what_cannot_work() -> None:
    sequence_parallel = ModelParallelConfig(sequence_parallel=True)
    with pytest.raises(ConfigError, match="RowParallelLinear got sequence_parallel without input_is_parallel"):
        RowParallelLinear(4, 4, **{**NORMAL, "config": sequence_parallel}, **{**ROW, "input_is_parallel": False})
    head = ColumnParallelLinear(4, 6, **NORMAL, skip_weight_param_allocation=True)
    assert head.weight is None
    with pytest.raises(ConfigError, match="was built with skip_weight_param_allocation and got no weight; pass w"):
        head(torch.ones(2, 1, 4))
    with pytest.raises(ConfigError, match="was built with skip_weight_param_allocation and got no weight"):
        head.multiply(torch.ones(2, 1, 4))
    message = r"the weight given to ColumnParallelLinear has shape \[4, 6\]; give this rank's part, of shape \[6, 4\]"
    with pytest.raises(LayoutError, match=message):
        head(torch.ones(2, 1, 4), weight=torch.ones(4, 6))
    expert = ModelParallelConfig(expert_model_parallel_size=2)
    partial = RowParallelLinear(4, 4, **{**NORMAL, "config": expert}, **ROW, is_expert=True)
    with pytest.raises(ConfigError, match="an expert RowParallelLinear returns partial sums, to which each rank would"):
        partial(torch.ones(2, 1, 4))


def sizes_body(rank: int, world_size: int) -> None:
    del rank
    initialize_model_parallel(world_size)
    with pytest.raises(ConfigError, match=r"^output_size is 5, which does not divide by 2"):
        ColumnParallelLinear(4, 5, **NORMAL)
    with pytest.raises(ConfigError, match=r"^input_size is 5, which does not divide by 2"):
        RowParallelLinear(5, 4, **NORMAL, **ROW)
    with pytest.raises(ConfigError, match=r"^num_embeddings is 65, which does not divide by 2"):
        VocabParallelEmbedding(65, 4, **NORMAL)


def test_sizes_that_do_not_divide_are_named() -> None:
    run_ranks(2, sizes_body)


def test_attributes_and_repr() -> None:
    """The members that Megatron's other modules touch (contracts 4.2)."""
    column = ColumnParallelLinear(4, 6, **NORMAL, skip_bias_add=True, gather_output=True, tp_comm_buffer_name="qkv")
    row = RowParallelLinear(4, 6, **NORMAL, **{**ROW, "bias": False}, name="proj")
    for layer in (column, row):
        assert (layer.input_size, layer.output_size) == (4, 6)
        assert layer.config is CONFIG
        assert layer.tp_group is None
        assert (layer.sequence_parallel, layer.is_expert, layer.expert_parallel) == (False, False, False)
        assert layer.gradient_accumulation_fusion is False
        layer.backward_dw()
        assert weight_of(layer).allreduce is True  # pyright: ignore[reportAttributeAccessIssue]
    assert (column.output_size_per_partition, row.input_size_per_partition) == (6, 4)
    assert (column.gather_output, column.skip_bias_add, column.allreduce_dgrad) == (True, True, False)
    assert (row.input_is_parallel, row.skip_bias_add, row.bias) == (True, False, None)
    assert repr(column) == "ColumnParallelLinear(in_features=4, out_features=6, bias=True, TP=1)"
    assert repr(row) == "RowParallelLinear(in_features=4, out_features=6, bias=False, TP=1)"
    assert repr(VocabParallelEmbedding(8, 4, **NORMAL)) == "VocabParallelEmbedding(8, 4, TP=1)"
    expert = ModelParallelConfig(expert_model_parallel_size=2)
    experts = ColumnParallelLinear(4, 6, **{**NORMAL, "config": expert}, is_expert=True)
    assert experts.explicit_expert_comm
    assert weight_of(experts).allreduce is False  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(TypeError, match="unexpected keyword argument 'gather_outputs'"):
        ColumnParallelLinear(4, 6, **NORMAL, gather_outputs=True)  # pyright: ignore[reportCallIssue]


def test_parameters_are_left_for_a_loader_if_asked() -> None:
    def refuse(tensor: torch.Tensor) -> None:
        raise AssertionError(f"initialised {tensor.shape}")

    bare: dict[str, Any] = {
        "config": ModelParallelConfig(perform_initialization=False, params_dtype=torch.bfloat16),
        "init_method": refuse,
    }
    layers = [ColumnParallelLinear(4, 6, **bare), RowParallelLinear(4, 6, **bare, **ROW)]
    layers.append(VocabParallelEmbedding(8, 4, **bare))  # pyright: ignore[reportArgumentType]
    assert {parameter.dtype for layer in layers for parameter in layer.parameters()} == {torch.bfloat16}
    with torch.device("meta"):
        assert weight_of(ColumnParallelLinear(4, 6, config=CONFIG, init_method=refuse)).is_meta


def initial_weights_body(rank: int, world_size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """The gathered weights and biases of layers built one after the other from one random state."""
    del rank
    initialize_model_parallel(world_size)
    group = get_tensor_model_parallel_group()
    torch.manual_seed(11)
    init: dict[str, Any] = {
        "config": ModelParallelConfig(params_dtype=dtype),
        "init_method": lambda tensor: torch.nn.init.xavier_normal_(tensor),
    }
    layers = [
        ColumnParallelLinear(12, 24, **init),
        ColumnParallelLinear(12, 24, **init, stride=2),
        RowParallelLinear(24, 12, **init, **ROW),
        RowParallelLinear(24, 12, **init, **ROW, stride=2),
        VocabParallelEmbedding(24, 12, **init),
    ]
    masters = [
        ColumnParallelLinear(12, 24, **init, keep_master_weight_for_test=True),
        RowParallelLinear(24, 12, **init, **ROW, keep_master_weight_for_test=True),
    ]
    for layer in masters:
        assert isinstance(layer.master_weight, torch.Tensor)
        assert torch.equal(layer.master_weight.to(dtype), gather_full(weight_of(layer), group=group))
    for layer, dim in zip(layers, (0, 0, 1, 1, 0), strict=True):
        assert getattr(layer, "master_weight", None) is None
        weight = weight_of(layer)
        assert weight.partition_dim == dim  # pyright: ignore[reportAttributeAccessIssue]
        assert weight.shape[dim] * world_size == 24
    gated = weight_of(layers[1])
    full = gather_full(gated, group=group)
    halves = full.chunk(2)  # each rank holds its part of gate, then its part of up
    place = 0 if group is None else torch.distributed.get_rank(group)
    assert torch.equal(gated, torch.cat([half.chunk(world_size)[place] for half in halves]))
    return [gather_full(parameter, group=group) for layer in [*layers, *masters] for parameter in layer.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_initial_weights_do_not_depend_on_the_ranks(dtype: torch.dtype) -> None:
    (alone,) = run_ranks(1, initial_weights_body, dtype)
    for world_size in (2, 3, 4):
        for gathered in run_ranks(world_size, initial_weights_body, dtype):
            assert len(gathered) == len(alone)
            assert all(torch.equal(left, right) for left, right in zip(gathered, alone, strict=True))


def test_extra_state_of_other_layers_loads() -> None:
    """Transformer Engine and Megatron layers save `_extra_state`, which these have no use for."""

    def model() -> torch.nn.ModuleDict:
        return torch.nn.ModuleDict(
            {
                "column": ColumnParallelLinear(4, 6, **NORMAL),
                "row": RowParallelLinear(4, 6, **NORMAL, **ROW),
                "embedding": VocabParallelEmbedding(8, 4, **NORMAL),
            }
        )

    source, target = model(), model()
    state: dict[str, Any] = dict(source.state_dict())
    assert sorted(state) == ["column.bias", "column.weight", "embedding.weight", "row.bias", "row.weight"]
    state |= {"column._extra_state": None, "row._extra_state": io.BytesIO(b"fp8"), "embedding._extra_state": None}
    keys = list(state)
    target.load_state_dict(state, strict=True)
    assert list(state) == keys
    assert all(torch.equal(target.state_dict()[name], value) for name, value in source.state_dict().items())
    with pytest.raises(RuntimeError, match="Unexpected key"):
        target.load_state_dict({**state, "column.extra": torch.ones(1)}, strict=True)


MEGATRON_0_16_FIELDS = {
    "params_dtype": torch.float32,
    "use_cpu_initialization": True,
    "perform_initialization": True,
    "sequence_parallel": False,
    "gradient_accumulation_fusion": False,
    "expert_model_parallel_size": 1,
    "defer_embedding_wgrad_compute": False,
    "wgrad_deferral_limit": 0,
    "deterministic_mode": True,
    "_cpu_offloading_context": None,
    "cpu_offloading": False,
    "cpu_offloading_activations": False,
}


def test_megatrons_own_config_is_taken() -> None:
    """An object that has the fields of 0.16 and none of ours, with the keywords its modules pass."""
    config = SimpleNamespace(**MEGATRON_0_16_FIELDS)
    init: dict[str, Any] = {"config": config, "init_method": torch.nn.init.normal_}
    passed: dict[str, Any] = {"is_expert": False, "tp_comm_buffer_name": "fc1", "tp_group": None}
    column = ColumnParallelLinear(4, 6, **init, gather_output=False, bias=True, skip_bias_add=True, stride=2, **passed)
    row = RowParallelLinear(6, 4, **init, bias=True, input_is_parallel=True, skip_bias_add=True, **passed)
    collection = SimpleNamespace(tp=None)
    newer = ColumnParallelLinear(4, 8, **init, name="head", pg_collection=collection)
    embedding = VocabParallelEmbedding(8, 4, **init, reduce_scatter_embeddings=False, tp_group=None)
    ids = torch.tensor([[1, 7, 2]])
    hidden = embedding(ids).transpose(0, 1)
    middle, fc1_bias = column(hidden)
    hidden, fc2_bias = row(middle + fc1_bias)
    logits, nothing = newer(hidden + fc2_bias)
    assert nothing is None
    logits.sum().backward()
    parameters = [*column.parameters(), *row.parameters(), *newer.parameters(), *embedding.parameters()]
    assert all(parameter.grad is not None for parameter in parameters)


def late_groups_body(rank: int, world_size: int) -> None:
    """A layer built before the groups is whole, and stays one rank's; one built after is cut."""
    torch.manual_seed(3)
    column = ColumnParallelLinear(4, 6, **NORMAL, gather_output=True)
    row = RowParallelLinear(6, 4, **NORMAL, **{**ROW, "input_is_parallel": False})
    embeddings = [VocabParallelEmbedding(8, 4, **NORMAL, reduce_scatter_embeddings=cuts) for cuts in (False, True)]
    ids = torch.tensor([[1, 7, 2, 5]])

    def outputs() -> list[torch.Tensor]:
        hidden = torch.full((2, 1, 4), float(rank))
        return [column(hidden)[0], row(column(hidden)[0])[0], *(embedding(ids) for embedding in embeddings)]

    before = outputs()
    initialize_model_parallel(world_size)
    for early, late in zip(before, outputs(), strict=True):
        assert torch.equal(early, late)
    assert ColumnParallelLinear(4, 6, **NORMAL).output_size_per_partition == 6 // world_size
    destroy_model_parallel()
    assert ColumnParallelLinear(4, 6, **NORMAL).output_size_per_partition == 6
    everyone = torch.distributed.group.WORLD
    choices: list[dict[str, Any]] = [{"tp_group": everyone}, {"pg_collection": SimpleNamespace(tp=everyone)}]
    for given in choices:
        assert ColumnParallelLinear(4, 6, **NORMAL, **given).output_size_per_partition == 6 // world_size
        assert RowParallelLinear(6, 4, **NORMAL, **ROW, **given).input_size_per_partition == 6 // world_size


def test_layers_keep_the_groups_they_were_built_with() -> None:
    run_ranks(2, late_groups_body)
