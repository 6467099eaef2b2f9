"""Column-parallel layers that read one input, multiplied together: q, k and v, or gate and up.

Each layer keeps its own parameters, adapter and name; what they share is the product. Whether they can share it is
judged at each call, by `multiply_together` alone, which leaves to the layers whatever it does not do as they do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from megatron_frozen.autograd import AdaptedParts, FrozenSplitWithAdapters
from megatron_frozen.layers.column_parallel import ColumnParallelLinear
from megatron_frozen.layers.parts import is_plain_and_frozen, is_watched, split_linear
from megatron_frozen.params import SharesGroups
from megatron_frozen.storage import adjacent_view, repack_

_STEPS = ("__call__", "forward", "enter_parallel", "multiply", "leave_parallel", "_leave", "_chosen_weight")


class ColumnPart(NamedTuple):
    """One layer's share of a joint product. A wrapper of a column layer gives it by a method ``column_part``."""

    base: ColumnParallelLinear
    A: torch.Tensor | None = None
    """Factor [r, in] of the adapter beside the base; None without one."""
    B: torch.Tensor | None = None
    """Factor [out / ranks, r]."""
    scale: float = 1.0
    """Of the adapter's product."""


class HoldsJointColumns(SharesGroups):
    """A module some of whose column layers read one input, and are to multiply it together.

    Their weights lie one above the other in one storage, and so do their biases, so that no product has to copy them;
    each stays a parameter of its own layer. Casting, moving, copying and materialising the module keep them so.
    """

    joint_names: ClassVar[tuple[str, ...]]
    """The attributes that hold these layers, in the order of their outputs."""

    def joint_columns(self) -> list[nn.Module]:
        """Return these layers, bare or wrapped."""
        return [getattr(self, name) for name in self.joint_names]

    def multiply_jointly(self, input_: torch.Tensor) -> torch.Tensor | None:
        """Return their outputs beside each other, or None; see `multiply_together`."""
        return multiply_together(self.joint_columns(), input_)

    def make_adjacent(self) -> None:
        """Move their parameters beside each other where nobody else laid these out (see ``storage.repack_``)."""
        for parts in _weights_and_biases(self.joint_columns()):
            repack_(parts)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        were_adjacent = _lie_adjacent(self.joint_columns())
        result = super()._apply(*args, **kwargs)
        if were_adjacent:
            self.make_adjacent()
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = super().__deepcopy__(memo)
        if _lie_adjacent(self.joint_columns()):
            copied.make_adjacent()
        return copied


def _weights_and_biases(modules: Sequence[nn.Module]) -> list[list[torch.Tensor]]:
    """Return the layers' weights, and their biases; without those of which one layer has none."""
    both = []
    for name in ("weight", "bias"):
        found = [getattr(module, name, None) for module in modules]
        parts = [part for part in found if isinstance(part, torch.Tensor)]
        both += [parts] if len(parts) == len(modules) else []
    return both


def _lie_adjacent(modules: Sequence[nn.Module]) -> bool:
    """Return whether the layers' parameters adjoin, or lie nowhere yet."""
    return all(
        adjacent_view(parts) is not None or all(type(part) is nn.Parameter and part.is_meta for part in parts)
        for parts in _weights_and_biases(modules)
    )


def multiply_together(modules: Sequence[nn.Module], input_: torch.Tensor) -> torch.Tensor | None:
    """Return the outputs of all ``modules`` for ``input_`` [..., I] beside each other, [..., sum O_i], by one product.

    None where they have to be called one by one, as they give something else than X W^T + b and at most an adapter's
    product, or something would not see its call: hooks, steps of a subclass, communication of a layer's own, dropout,
    operands of several dtypes; and where they train under FSDP, whose gathered weights their concatenation would
    outlive. Both ways give equal results. Collectives: none, in either direction.
    """
    parts = [_part(module) for module in modules]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts) or not _fit(known, input_):
        return None
    bases = [part.base for part in known]
    weights = [base.weight for base in bases if base.weight is not None]
    biases = [base.bias for base in bases if base.bias is not None]
    adapted = tuple(i for i, part in enumerate(known) if part.A is not None)
    is_gathered = any(getattr(base, "_is_fsdp_managed_module", False) for base in bases)
    if not adapted and is_gathered:
        return None
    if not adapted:
        return split_linear(
            input_,
            weights,
            biases,
            config=bases[0].config,
            allreduce_dgrad=False,
            sequence_parallel=False,
            tp_group=bases[0].tp_group,
        )
    if not is_plain_and_frozen(weights, input_, config=bases[0].config):
        return None
    scales = tuple(known[i].scale for i in adapted)
    beside = AdaptedParts(len(known), bool(biases), adapted, scales, keeps_concatenation=not is_gathered)
    factors = [known[i].A for i in adapted] + [known[i].B for i in adapted]
    return FrozenSplitWithAdapters.apply(input_, beside, *weights, *biases, *factors)


def _part(module: nn.Module) -> ColumnPart | None:
    """Return the share of ``module`` if calling it is nothing but its steps, and none of them is a subclass's own."""
    if is_watched(module):
        return None
    if isinstance(module, ColumnParallelLinear):
        part = ColumnPart(module)
    else:
        share = getattr(module, "column_part", None)
        part = None if share is None else share()
        if part is None or (part.A is None and is_watched(part.base)):
            return None
    kind = type(part.base)
    if any(getattr(kind, step) is not getattr(ColumnParallelLinear, step) for step in _STEPS):
        return None
    return None if "forward" in vars(part.base) or "forward" in vars(module) else part


def _fit(parts: Sequence[ColumnPart], input_: torch.Tensor) -> bool:
    """Return whether one product over all parts is what the layers compute."""
    first = parts[0].base
    return input_.dim() > 0 and all(
        base.weight is not None
        and type(base.weight) is nn.Parameter  # no class with operators of its own, such as DTensor
        and base.weight.dtype == input_.dtype == first.weight.dtype  # pyright: ignore[reportOptionalMemberAccess]
        and base.weight.device == input_.device
        and tuple(base.weight.shape) == (base.output_size_per_partition, input_.shape[-1])
        and (base.bias is None) == (first.bias is None)
        and (base.bias is None or base.bias.dtype == input_.dtype)
        and base.config is first.config
        and base.tp_group is first.tp_group
        and not (base.sequence_parallel or base.allreduce_dgrad or base.gather_output or base.skip_bias_add)
        and base.output_dtype is None
        and base.embedding_activation_buffer is None
        and base.grad_output_buffer is None
        for base in (part.base for part in parts)
    )
