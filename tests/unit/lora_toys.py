"""Small modules that the LoRA tests put adapters on, at any tensor-parallel size."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron_frozen.comm import get_tensor_model_parallel_group, initialize_model_parallel
from megatron_frozen.layers import ColumnParallelLinear, ModelParallelConfig, RowParallelLinear
from megatron_frozen.lora import LoraConfig, LoraLinear
from megatron_frozen.params import gather_full, shard_of


def seeded(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A normal tensor from its own generator, the same in every process."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32).to(dtype)


def config_for(*, sequence_parallel: bool = False, dtype: torch.dtype = torch.float32) -> ModelParallelConfig:
    return ModelParallelConfig(sequence_parallel=sequence_parallel, params_dtype=dtype)


def set_weight(linear: ColumnParallelLinear | RowParallelLinear, full: Tensor) -> None:
    dim = 0 if isinstance(linear, ColumnParallelLinear) else 1
    assert linear.weight is not None
    linear.weight.data.copy_(shard_of(full, partition_dim=dim, group=linear.tp_group))
    linear.weight.requires_grad = False


def column(full: Tensor, *, sequence_parallel: bool = False, **options: Any) -> ColumnParallelLinear:
    config = config_for(sequence_parallel=sequence_parallel, dtype=full.dtype)
    options = {"bias": False, **options}
    linear = ColumnParallelLinear(full.shape[1], full.shape[0], config=config, init_method=nn.init.zeros_, **options)
    set_weight(linear, full)
    return linear


def row(full: Tensor, *, sequence_parallel: bool = False, **options: Any) -> RowParallelLinear:
    config = config_for(sequence_parallel=sequence_parallel, dtype=full.dtype)
    options = {"bias": False, "input_is_parallel": True, "skip_bias_add": False, **options}
    linear = RowParallelLinear(full.shape[1], full.shape[0], config=config, init_method=nn.init.zeros_, **options)
    set_weight(linear, full)
    return linear


def with_adapter(
    base: nn.Module, full_A: Tensor, full_B: Tensor, *, name: str = "default", **fields: Any
) -> LoraLinear:
    """The base wrapped, with an active adapter of these full factors; alpha = 2 r, so scale 2, unless said."""
    layer = LoraLinear(base)
    r = full_A.shape[0]
    layer.add_adapter(name, LoraConfig(**{"r": r, "alpha": 2 * r, **fields}), full_A=full_A, full_B=full_B)
    layer.active_adapter = name
    return layer


class Mlp(nn.Module):
    """A column and a row layer with the names of a decoder's; takes and returns [s, b, h]."""

    def __init__(self, hidden: int = 8, inner: int = 12, *, sequence_parallel: bool = False, seed: int = 0) -> None:
        super().__init__()
        self.up_proj = column(seeded(inner, hidden, seed=seed), sequence_parallel=sequence_parallel)
        self.down_proj = row(seeded(hidden, inner, seed=seed + 1), sequence_parallel=sequence_parallel)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(torch.tanh(self.up_proj(hidden)[0]))[0]


class Stack(nn.Module):
    """Mlps under numbered layers, as in a decoder: model.layers.N.mlp.up_proj."""

    def __init__(self, num_layers: int = 2, *, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.model = nn.Module()
        layers = nn.ModuleList()
        for number in range(num_layers):
            layer = nn.Module()
            layer.mlp = Mlp(sequence_parallel=sequence_parallel, seed=10 * number)
            layer.norm = nn.LayerNorm(8)
            layers.append(layer)
        self.model.layers = layers

    def forward(self, hidden: Tensor) -> Tensor:
        layers = self.model.layers
        assert isinstance(layers, nn.ModuleList)
        for layer in layers:
            hidden = hidden + layer.mlp(hidden)  # pyright: ignore[reportCallIssue]
        return hidden


def start_ranks(tensor_parallel_size: int) -> Any:
    initialize_model_parallel(tensor_parallel_size)
    return get_tensor_model_parallel_group()


def full_gradient(parameter: Tensor, *, group: Any) -> Tensor:
    """The gradient of a whole factor, gathered along the dim along which the factor is cut."""
    grad = parameter.grad
    assert grad is not None
    for attribute in ("tensor_model_parallel", "partition_dim", "partition_stride"):
        if hasattr(parameter, attribute):
            setattr(grad, attribute, getattr(parameter, attribute))
    return gather_full(grad, group=group)
