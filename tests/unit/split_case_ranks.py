"""Bodies for `run_ranks` about single cases of layers with split parameters."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megatron_frozen import (
    ColumnParallelLinear,
    ModelParallelConfig,
    get_tensor_model_parallel_group,
    initialize_model_parallel,
    sum_partial_grads,
)
from megatron_frozen.diagnostics import Recorder
from megatron_frozen.errors import ConfigError
from megatron_frozen.layers import LayerNormLinear, Linear
from megatron_frozen.params import gather_full
from megatron_frozen.testing import relative_error
from tests.unit.core_ranks import seeded
from tests.unit.split_ranks import columns_of, data

SPLIT = {"q_": 8, "k_": 4, "v_": 4}


def column_case(rank: int, world_size: int, kind: str, bias: bool) -> dict[str, Any]:  # noqa: FBT001
    """Build a column layer from one seed, freeze k, run a step and return what a test compares, gathered."""
    if world_size > 1:
        initialize_model_parallel(world_size)
    group = get_tensor_model_parallel_group()
    torch.manual_seed(5)
    layer = _column_layer(kind, SPLIT, bias=bias)
    layer.k_weight.requires_grad = False
    input_, grad = data()
    input_.requires_grad_()
    output = layer(input_)
    output = output[0] if kind == "Column" else output
    if kind != "Column":
        grad = columns_of(grad, rank=rank, world_size=world_size)
        gathered = [torch.empty_like(output) for _ in range(world_size)]
        if world_size > 1:
            dist.all_gather(gathered, output.detach().contiguous())
        else:
            gathered = [output.detach()]
        in_parts = [full.split(layer.parameter_split_sizes, -1) for full in gathered]
        full_output = torch.cat([torch.cat(parts, -1) for parts in zip(*in_parts, strict=True)], -1)
    else:
        full_output = output.detach()
    output.backward(grad)
    grads = {name: getattr(layer, f"{name}_weight").grad for name in "qkv"}
    return {
        "sizes": layer.parameter_split_sizes,
        "keys": list(layer.state_dict()),
        "full": torch.cat([gather_full(getattr(layer, name), group=group) for name in layer.weight_names]),
        "output": full_output,
        "dx": input_.grad,
        "k grad": grads["k"],
        "q grad": _gathered(grads["q"], world_size),
        "v grad": _gathered(grads["v"], world_size),
        "error": _error_of(kind, bias=bias),
    }


def _column_layer(kind: str, split: Any, *, bias: bool) -> Any:
    if kind == "Column":
        return ColumnParallelLinear(
            8, 16, config=ModelParallelConfig(), init_method=nn.init.xavier_normal_, bias=bias, gather_output=True,
            parameters_split=split,
        )  # fmt: skip
    layer_type = Linear if kind == "Linear" else LayerNormLinear
    return layer_type(8, 16, parallel_mode="column", bias=bias, parameters_split=split)


def _gathered(shard: Tensor, world_size: int) -> Tensor:
    if world_size == 1:
        return shard
    shards = [torch.empty_like(shard) for _ in range(world_size)]
    dist.all_gather(shards, shard)
    return torch.cat(shards)


def _error_of(kind: str, *, bias: bool) -> str:
    try:
        _column_layer(kind, {"k": 3, "q": 13}, bias=bias)
    except ConfigError as error:
        return str(error)
    return ""


def layouts_on_ranks(rank: int, world_size: int) -> dict[str, Counter[str]]:
    """Return the operators of a step with a transposed gradient, for each branch of communication."""
    initialize_model_parallel(world_size)
    found = {}
    for mode in ("column", "row"):
        for sequence_parallel in (False, True):
            options: dict[str, Any] = {"parallel_mode": mode, "sequence_parallel": sequence_parallel}
            layer = Linear(8, 16, parameters_split=SPLIT, bias=mode == "column", **options)
            features = 8 if mode == "column" else 4
            input_ = torch.randn(4 // (world_size if sequence_parallel and mode == "column" else 1), 3, features)
            with Recorder() as seen:
                output: Any = layer(input_.requires_grad_())
                output.backward(torch.randn(3, output.shape[0], output.shape[2]).transpose(0, 1))
            found[f"{mode}, sequence_parallel={sequence_parallel}"] = Counter(op.name for op in seen.operations)
    return found


def bias_under_a_frozen_weight(rank: int, world_size: int) -> tuple[list[float], list[float]]:
    """Return the gradient of the last bias of a column layer, and of a row layer under sequence parallelism."""
    initialize_model_parallel(world_size)
    group, biases = get_tensor_model_parallel_group(), []
    for mode, input_ in (("column", torch.randn(6, 3, 8)), ("row", torch.randn(6, 3, 4))):
        options: dict[str, Any] = {"parallel_mode": mode, "sequence_parallel": mode == "row"}
        layer: Any = Linear(8, 16, parameters_split=SPLIT, **options)
        for name in layer.weight_names:
            getattr(layer, name).requires_grad = False
        layer(input_).sum().backward()
        sum_partial_grads(layer.parameters(), group=group)
        biases.append(layer.v_bias.grad.tolist())
    return biases[0], biases[1]


def under_fsdp2(rank: int, world_size: int) -> dict[str, float]:
    """Return errors of a layer sharded by FSDP2, whose parts have storages of their own, against the layer whole."""
    torch.manual_seed(0)
    whole = LayerNormLinear(8, 16, parameters_split=SPLIT)
    sharded = copy.deepcopy(whole)
    mesh = init_device_mesh("cpu", (world_size,))
    fully_shard(sharded, mesh=mesh)
    inputs = [seeded(4, 3, 8, seed=seed, dtype=torch.float32) for seed in range(world_size)]
    output = sharded(inputs[rank])
    errors = {"y": relative_error(output, whole(inputs[rank]))}
    output.square().sum().backward()
    sum(whole(input_).square().sum() for input_ in inputs).div(world_size).backward()  # pyright: ignore[reportAttributeAccessIssue]
    for (name, parameter), expected in zip(sharded.named_parameters(), whole.parameters(), strict=True):
        grad: Any = parameter.grad
        assert expected.grad is not None
        errors[name] = relative_error(grad.full_tensor(), expected.grad)
    return errors
