"""Column layers that read one input, with and without adapters, called together and one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron_frozen.layers import ColumnParallelLinear, ModelParallelConfig
from megatron_frozen.layers.joint_columns import multiply_together
from megatron_frozen.lora import LoraConfig, LoraLinear
from tests.unit.lora_toys import seeded

IN, SIZES = 7, (8, 4, 5)
RANKS = (3, 2, 4)


def columns(*, dtype: torch.dtype = torch.float32, bias: bool = False, **options: Any) -> list[nn.Module]:
    """Three layers over one config, frozen, filled with seeded numbers."""
    config = options.pop("config", None) or ModelParallelConfig(params_dtype=dtype)
    layers: list[nn.Module] = []
    for number, size in enumerate(SIZES):
        layer = ColumnParallelLinear(IN, size, config=config, init_method=nn.init.zeros_, bias=bias, **options)
        assert layer.weight is not None
        layer.weight.data.copy_(seeded(size, IN, seed=number))
        if layer.bias is not None:
            layer.bias.data.copy_(seeded(size, seed=10 + number))
        layers.append(layer.requires_grad_(requires_grad=False))
    return layers


def adapt(layers: list[nn.Module], which: Sequence[int], **fields: Any) -> list[nn.Module]:
    """Wrap the layers of these numbers, each with a rank and a scale of its own and a B that is not zero."""
    for number in which:
        r, size = RANKS[number], SIZES[number]
        wrapped = LoraLinear(layers[number])
        wrapped.add_adapter(
            "default",
            LoraConfig(**{"r": r, "alpha": r * (number + 1), **fields}),
            full_A=seeded(r, IN, seed=20 + number),
            full_B=seeded(size, r, seed=30 + number),
        )
        wrapped.active_adapter = "default"
        layers[number] = wrapped
    return layers


def together(layers: Sequence[nn.Module], input_: Tensor) -> Tensor:
    output = multiply_together(layers, input_)
    assert output is not None, "the layers did not multiply together"
    return output


def one_by_one(layers: Sequence[nn.Module], input_: Tensor) -> Tensor:
    return torch.cat([layer(input_)[0] for layer in layers], dim=-1)


def step(
    run: Callable[[Sequence[nn.Module], Tensor], Tensor], layers: Sequence[nn.Module], input_: Tensor, grad: Tensor
) -> dict[str, Tensor | None]:
    """y, dx and the gradient of every parameter by name, from a forward and a backward."""
    leaf = input_.detach()  # keeps the strides, which clone would not
    leaf.requires_grad_()
    group = nn.ModuleList(layers)
    group.zero_grad()
    output = run(layers, leaf)
    output.backward(grad)
    return {"y": output.detach(), "dx": leaf.grad, **{name: param.grad for name, param in group.named_parameters()}}
