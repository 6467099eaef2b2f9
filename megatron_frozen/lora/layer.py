"""A tensor-parallel linear with LoRA adapters beside it, which add no collective to it.

Base and branch meet between the base's own communication: the input enters the parallel region once, both multiply it,
and their sum leaves once. In the backward their input gradients meet before the one reduction likewise. See
``lora.factors`` for how factors are cut over ranks; the parts of a gradient that ranks share are summed once per step.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import nn

from megatron_frozen.comm import Group
from megatron_frozen.errors import ConfigError
from megatron_frozen.layers import ColumnParallelLinear, RowParallelLinear
from megatron_frozen.layers.joint_columns import ColumnPart
from megatron_frozen.layers.parts import is_plain_and_frozen
from megatron_frozen.lora.config import LoraConfig
from megatron_frozen.lora.factors import FullFactors, empty_pair, low_rank_delta, multiply_adapted

Linear: TypeAlias = ColumnParallelLinear | RowParallelLinear
_PLAIN_PRODUCTS = (ColumnParallelLinear.multiply, RowParallelLinear.multiply)


def base_of(module: nn.Module) -> Linear:
    """Return the base layer of a LoraLinear, and a bare linear itself."""
    base = module.base_layer if isinstance(module, LoraLinear) else module
    assert isinstance(base, ColumnParallelLinear | RowParallelLinear)
    return base


def is_linear(module: nn.Module) -> bool:
    """Return whether ``module`` is of a kind that adapters go on, bare or wrapped already."""
    return isinstance(module, LoraLinear | ColumnParallelLinear | RowParallelLinear)


def unsupported(module: nn.Module) -> str | None:
    """Return why ``module`` cannot carry an adapter, as the end of a sentence; None if it can."""
    if not isinstance(module, ColumnParallelLinear | RowParallelLinear):
        return f"it is a {type(module).__name__}, and LoRA adapts ColumnParallelLinear and RowParallelLinear only"
    if getattr(module, "weight_names", ["weight"]) != ["weight"]:
        return "it holds its weight in named parts, of which adapters know nothing; leave parameters_split unset"
    if module.weight is None:
        return "it holds no weight of its own (skip_weight_param_allocation); adapt the module that owns the weight"
    if getattr(module, "output_dtype", None) is not None:
        return "its output_dtype is wider than its operands, to which an adapter adds; leave output_dtype unset"
    if module.expert_parallel:
        return "its experts are spread over ranks, which start and sum adapters apart; leave expert layers out"
    if getattr(module.weight, "partition_stride", 1) != 1:
        return "its rows are interleaved over ranks (stride above 1), which PEFT's files cannot say; use stride=1"
    return None


class LoraLinear(nn.Module):
    """Wraps one ColumnParallelLinear or RowParallelLinear. Adapters have names, and one of them is active.

    forward takes what the base takes and returns its ``(output, bias)``, in the base's dtype. The factors are cast to
    the activations' dtype for the products (h = A x stays in it); their gradients come back in the factors' own.

    With an adapter active the base's three steps (enter_parallel, multiply, leave_parallel) run, which a subclass may
    override, with the adapter between them; the base itself is not called, so that neither its hooks nor a forward of
    its own run. Put hooks on the LoraLinear.

    Raises ConfigError where the base is of another type, or cannot carry an adapter.
    """

    active_adapter: str | None
    """Name of the adapter that forward adds; None for the base alone."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        if (why_not := unsupported(base_layer)) is not None:
            raise ConfigError(f"LoraLinear was given a base layer it cannot wrap: {why_not}")
        self.base_layer = base = base_of(base_layer)
        self.adapters: dict[str, LoraConfig] = {}
        self.lora_A, self.lora_B = empty_pair(is_column=isinstance(base, ColumnParallelLinear), tp_group=base.tp_group)
        self.active_adapter = None

    @property
    def weight(self) -> torch.Tensor:
        """The base's weight shard."""
        weight = self.base_layer.weight
        assert weight is not None
        return weight

    @property
    def bias(self) -> torch.Tensor | None:
        """The base's bias."""
        return self.base_layer.bias

    @property
    def tp_group(self) -> Group:
        """The base's tensor-parallel group."""
        return self.base_layer.tp_group

    def add_adapter(self, adapter_name: str, config: LoraConfig, *, full_A: torch.Tensor, full_B: torch.Tensor) -> None:
        """Add an adapter from full factors A [r, in] and B [out, r]; this rank keeps its part. No collective."""
        assert adapter_name not in self.adapters
        for factors, full in ((self.lora_A, full_A), (self.lora_B, full_B)):
            factors.add(adapter_name, full, like=self.weight, dtype=config.dtype, is_summed_later=True)
        self.adapters[adapter_name] = config

    def set_factors(self, adapter_name: str, *, full_A: torch.Tensor, full_B: torch.Tensor) -> None:
        """Overwrite an adapter with this rank's parts of full factors A [r, in] and B [out, r]. No collective."""
        self.lora_A.overwrite(adapter_name, full_A)
        self.lora_B.overwrite(adapter_name, full_B)

    def full_factors(self, adapter_name: str) -> FullFactors:
        """Return A [r, in] and B [out, r] on every rank of the group, in their own dtype. One all-gather."""
        return self.lora_A.full(adapter_name), self.lora_B.full(adapter_name)

    def forward(self, input_: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the base's ``(output, bias)``, with scale * B A dropout(input) of the active adapter in the output.

        Shapes, dtypes, collectives and ``options`` (a column layer's runtime_gather_output) are the base's.
        """
        name = self.active_adapter
        if name is None:
            return self.base_layer(input_, **options)
        input_parallel = self.base_layer.enter_parallel(input_)
        return self.base_layer.leave_parallel(self._multiply(input_parallel, self.adapters[name], name=name), **options)

    def column_part(self) -> ColumnPart | None:
        """Return what this layer multiplies, for a product that it shares with others; None if it does more than that.

        See ``layers.joint_columns``, which looks at the base; dropout and a subclass's own forward are ours to say.
        """
        name = self.active_adapter
        if not isinstance(self.base_layer, ColumnParallelLinear) or type(self).forward is not LoraLinear.forward:
            return None
        if name is None:
            return ColumnPart(self.base_layer)
        config = self.adapters[name]
        if (self.training and config.dropout > 0) or type(self)._multiply is not LoraLinear._multiply:
            return None
        return ColumnPart(self.base_layer, self.lora_A[name], self.lora_B[name], config.scale)

    def _multiply(self, input_parallel: torch.Tensor, config: LoraConfig, *, name: str) -> torch.Tensor:
        base, weight = self.base_layer, self.weight
        return multiply_adapted(
            base,
            input_parallel,
            self.lora_A[name],
            self.lora_B[name],
            scale=config.scale,
            p=config.dropout if self.training else 0.0,
            is_plain=type(base).multiply in _PLAIN_PRODUCTS
            and weight.shape[1] == input_parallel.shape[-1]  # else the base says what is wrong
            and is_plain_and_frozen([weight], input_parallel, config=base.config),
        )

    def extra_repr(self) -> str:
        """Name the adapters and the active one."""
        return f"adapters={list(self.adapters)}, active_adapter={self.active_adapter!r}"


def adapter_delta(layer: LoraLinear, *, adapter_name: str | None = None) -> torch.Tensor:
    """Return scale * B A in fp32 (fp64 for an fp64 base), of the shape of the base's weight shard, for the active
    adapter or a named one.

    No collective: each rank's factors give exactly its part of the full product.
    """
    name = adapter_name if adapter_name is not None else layer.active_adapter
    if name not in layer.adapters:
        raise ConfigError(
            f"adapter {name!r} is not on this layer, which holds {', '.join(layer.adapters) or 'none'}; "
            f"name one that it holds"
        )
    return low_rank_delta(layer.lora_A[name], layer.lora_B[name], scale=layer.adapters[name].scale, weight=layer.weight)
