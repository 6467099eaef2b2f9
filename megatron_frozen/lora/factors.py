"""What adapters on a tensor-parallel linear share, whatever layer carries them: how factors are held, and dropout."""

from __future__ import annotations

import torch
from torch import nn

from megatron_frozen.comm import Group
from megatron_frozen.params import KeepsMarks, shard_of


class Factors(KeepsMarks, nn.ParameterDict):
    """The factors of one kind, A or B, by the name of their adapter or projection."""


def drop_entries(input_: torch.Tensor, *, p: float, full_width: int, cut_over: Group) -> torch.Tensor:
    """Return ``input_`` [..., I] with entries zeroed with probability ``p``, unscaled, by a mask of the full width.

    So tensor-parallel ranks in one random state draw what one rank would: the same mask for an input that is whole on
    each (``cut_over`` None), its own columns of it for one whose features are cut over a group.
    """
    full_shape = [*input_.shape[:-1], full_width]
    if torch.compiler.is_compiling():  # inductor (torch 2.13) may draw bernoulli_ after the mask is read
        keep = torch.rand(full_shape, device=input_.device) < 1 - p
    else:
        keep = torch.empty(full_shape, dtype=torch.bool, device=input_.device).bernoulli_(1 - p)
    return input_ * shard_of(keep, partition_dim=keep.dim() - 1, group=cut_over)
