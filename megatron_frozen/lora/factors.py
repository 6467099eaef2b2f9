"""What adapters on a tensor-parallel linear share, whatever layer carries them: their factors, product and dropout.

| base | A | B | has a part of its gradient on each rank |
|---|---|---|---|
| column | (r, in), the same on all ranks | (out / tp, r) | A |
| row | (r, in / tp) | (out, r), the same on all ranks | B |
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import nn

from megatron_frozen import gemm
from megatron_frozen.autograd import AddLowRank, FrozenLinearWithAdapter
from megatron_frozen.comm import Group
from megatron_frozen.params import (
    KeepsMarks,
    gather_full,
    mark_partial_grad,
    set_tensor_model_parallel_attributes,
    shard_of,
)

FullFactors: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""A [r, in] and B [out, r] of all ranks."""


class Factors(KeepsMarks, nn.ParameterDict):
    """The factors of one kind, A or B, by the name of their adapter or projection: this rank's parts of full ones."""

    def __init__(self, *, cut_dim: int | None = None, tp_group: Group = None) -> None:
        """``cut_dim``: the dim that is cut over ``tp_group``; None for factors that each rank has whole."""
        super().__init__()
        self.cut_dim, self.tp_group = cut_dim, tp_group

    def add(
        self, name: str, full: torch.Tensor, *, like: torch.Tensor, dtype: torch.dtype | None, is_summed_later: bool
    ) -> None:
        """Keep this rank's part of ``full`` on the device of ``like``, in ``dtype`` or, for None, its. No collective.

        ``is_summed_later`` marks a factor that is whole, as its gradient's parts are summed once per step."""
        factor = nn.Parameter(self._shard(full).to(like.device, dtype or like.dtype, copy=True))
        if self.cut_dim is not None:
            set_tensor_model_parallel_attributes(factor, is_parallel=True, dim=self.cut_dim, stride=1)
        elif is_summed_later:
            mark_partial_grad(factor)
        self[name] = factor

    @torch.no_grad()
    def overwrite(self, name: str, full: torch.Tensor) -> None:
        """Write this rank's part of ``full`` into a factor. No collective."""
        self[name].copy_(self._shard(full))

    def full(self, name: str) -> torch.Tensor:
        """Return a factor in full on every rank of the group, in its own dtype: one all-gather if it is cut."""
        return gather_full(self[name], group=self.tp_group)

    def _shard(self, full: torch.Tensor) -> torch.Tensor:
        return full if self.cut_dim is None else shard_of(full, partition_dim=self.cut_dim, group=self.tp_group)


def empty_pair(*, is_column: bool, tp_group: Group) -> tuple[Factors, Factors]:
    """Return the A and the B of a column or a row layer, with no factor in them yet."""
    if is_column:
        return Factors(tp_group=tp_group), Factors(cut_dim=0, tp_group=tp_group)
    return Factors(cut_dim=1, tp_group=tp_group), Factors(tp_group=tp_group)


def multiply_adapted(
    base: Any, input_: torch.Tensor, A: torch.Tensor, B: torch.Tensor, *, scale: float, p: float, is_plain: bool
) -> torch.Tensor:
    """Return ``base.multiply(input_)`` + scale * (dropout(input_) A^T) B^T [..., O] in the base's dtype. No collective.

    ``p`` is the probability of dropout. ``is_plain``: base.multiply is X W^T of a frozen W with no cast and no option.
    """
    if is_plain and p == 0:
        return FrozenLinearWithAdapter.apply(input_, base.weight, A, B, scale)
    output = base.multiply(input_)
    if p > 0:
        input_ = _drop_entries(input_, p=p, full_width=base.input_size, group=base.tp_group)
        scale /= 1 - p
    return AddLowRank.apply(output, input_, A, B, scale)


def _drop_entries(input_: torch.Tensor, *, p: float, full_width: int, group: Group) -> torch.Tensor:
    """Return ``input_`` [..., I] with entries zeroed with probability ``p``, unscaled, by a mask of the full width.

    So tensor-parallel ranks in one random state draw what one rank would: the same mask for an input that is whole on
    each, its own columns of it for one whose features are cut over the group.
    """
    full_shape = [*input_.shape[:-1], full_width]
    if torch.compiler.is_compiling():  # inductor (torch 2.13) may draw bernoulli_ after the mask is read
        keep = torch.rand(full_shape, device=input_.device) < 1 - p
    else:
        keep = torch.empty(full_shape, dtype=torch.bool, device=input_.device).bernoulli_(1 - p)
    if input_.shape[-1] < full_width:
        keep = shard_of(keep, partition_dim=keep.dim() - 1, group=group)
    return input_ * keep


@torch.no_grad()
def low_rank_delta(A: torch.Tensor, B: torch.Tensor, *, scale: float, weight: torch.Tensor) -> torch.Tensor:
    """Return scale * B A, what is to be added to ``weight``, in fp32 (fp64 for an fp64 weight). No collective."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return gemm.dgrad(B.to(wide), A.to(wide)).mul_(scale)
