"""The adapters of one linear of megatron-core: a pair of factors per projection, multiplied as one pair.

| linear | A of each projection | B of each projection | has a part of its gradient on each rank |
|---|---|---|---|
| column | (r, in), the same on all ranks | (out / tp, r) | A |
| row | (r, in / tp) | (out, r), the same on all ranks | B |

Under sequence parallelism the parts are marked, for Megatron's ``finalize_model_grads`` or ``sum_partial_grads`` to sum
once per step. Without it Megatron sums nothing afterwards, so they are summed in the backward, all of a linear at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from megatron_frozen import gemm
from megatron_frozen.autograd import AddLowRank, FrozenLinearWithAdapter
from megatron_frozen.comm import copy_to_tensor_model_parallel_region, group_size
from megatron_frozen.gpt_lora.projections import Projection
from megatron_frozen.integrations.megatron_core.steps import Adapter
from megatron_frozen.layers.parts import dgrad_in_fp32
from megatron_frozen.lora import LoraConfig
from megatron_frozen.lora.factors import Factors, drop_entries
from megatron_frozen.params import (
    SharesGroups,
    gather_full,
    mark_partial_grad,
    set_tensor_model_parallel_attributes,
    shard_of,
)

FullFactors = tuple[torch.Tensor, torch.Tensor]


class ProjectionAdapters(Adapter, SharesGroups):
    """Y = X W^T and, in the rows of each projection p, scale * (dropout(X) A_p^T) B_p^T.

    The A_p are stacked, and the B_p set side by side into the rows that the fused weight has for them, so that the
    products are as many as for one adapter and no activation is taken apart. One dropout mask serves all projections.
    """

    def __init__(self, base: Any, config: LoraConfig, *, factors: Mapping[Projection, FullFactors]) -> None:
        """Keep this rank's part of the full factors A [r, in] and B [out, r] of each projection. No collective."""
        super().__init__()
        self.config, self.is_enabled = config, True
        self.tp_group, self.is_column = base.tp_group, base.partition_dim == 0
        self.output_size_per_partition = base.weight.shape[0]
        self.paths = {projection.name: projection.path for projection in factors}
        self.lora_A, self.lora_B = Factors(), Factors()
        for projection, (full_A, full_B) in factors.items():
            for kept, full in ((self.lora_A, full_A), (self.lora_B, full_B)):
                kept[projection.name] = self._factor(base, self._shard(full, of=kept), is_cut=self._is_cut(kept))
            if projection.rows is not None:
                rows = torch.tensor(projection.rows, device=base.weight.device)
                self.register_buffer(f"rows_of_{projection.name}", rows, persistent=False)

    def _factor(self, base: Any, shard: torch.Tensor, *, is_cut: bool) -> nn.Parameter:
        factor = nn.Parameter(shard.to(base.weight.device, self.config.dtype or base.weight.dtype, copy=True))
        if is_cut:
            set_tensor_model_parallel_attributes(factor, is_parallel=True, dim=self._cut_dim, stride=1)
        elif base.sequence_parallel:
            mark_partial_grad(factor)
        return factor

    @property
    def _cut_dim(self) -> int:
        return 0 if self.is_column else 1

    def _is_cut(self, factors: nn.ParameterDict) -> bool:
        return factors is (self.lora_B if self.is_column else self.lora_A)

    def _shard(self, full: torch.Tensor, *, of: nn.ParameterDict) -> torch.Tensor:
        if not self._is_cut(of):
            return full
        return shard_of(full, partition_dim=self._cut_dim, group=self.tp_group)

    def partition_dims(self) -> dict[str, int]:
        """Return the names of the factors that are cut, with the dim."""
        kind = "lora_B" if self.is_column else "lora_A"
        return {f"{kind}.{name}": self._cut_dim for name in self.paths}

    def full_factors(self, name: str) -> FullFactors:
        """Return a projection's A [r, in] and B [out, r] on every rank of the group. One all-gather."""
        A, B = self.lora_A[name], self.lora_B[name]
        return gather_full(A, group=self.tp_group), gather_full(B, group=self.tp_group)

    @torch.no_grad()
    def set_factors(self, name: str, *, full_A: torch.Tensor, full_B: torch.Tensor) -> None:
        """Overwrite a projection's factors with this rank's parts of full ones. No collective."""
        self.lora_A[name].copy_(self._shard(full_A, of=self.lora_A))
        self.lora_B[name].copy_(self._shard(full_B, of=self.lora_B))

    def multiply(self, base: Any, input_parallel: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the output [s, b, O]: the frozen product and the adapters', in the base's dtype.

        input_parallel: [s, b, I] of this rank. No collective, but for the sums of factors' gradients (see above).
        """
        if not self.is_enabled:
            return base.multiply(input_parallel)
        A, B, scale = self._joint(self.lora_A), self._joint(self.lora_B), self.config.scale
        drops = self.training and self.config.dropout > 0
        if not drops and _is_plain(base, input_parallel):
            return FrozenLinearWithAdapter.apply(input_parallel, base.weight, A, B, scale)
        output_parallel = base.multiply(input_parallel)
        if drops:
            input_parallel = drop_entries(
                input_parallel,
                p=self.config.dropout,
                full_width=base.input_size,
                cut_over=None if self.is_column else self.tp_group,
            )
            scale /= 1 - self.config.dropout
        return AddLowRank.apply(output_parallel, input_parallel, A, B, scale)

    def _joint(self, factors: nn.ParameterDict) -> torch.Tensor:
        """Return all A as one [n r, I], or all B as one [O, n r] in the rows of the fused weight."""
        if factors is self.lora_A:
            joined = _joined(list(factors.values()), dim=0)
        else:
            joined = _joined([self._in_fused_rows(B, name=name) for name, B in factors.items()], dim=1)
        is_summed_later = getattr(next(iter(factors.values())), "sequence_parallel", False)
        if self._is_cut(factors) or is_summed_later or group_size(self.tp_group) == 1:
            return joined
        return copy_to_tensor_model_parallel_region(joined, self.tp_group)

    def _rows(self, name: str) -> torch.Tensor | None:
        return getattr(self, f"rows_of_{name}", None)

    def _in_fused_rows(self, B: torch.Tensor, *, name: str) -> torch.Tensor:
        rows = self._rows(name)
        if rows is None:
            return B
        return B.new_zeros(self.output_size_per_partition, B.shape[1]).index_copy(0, rows, B)

    @torch.no_grad()
    def merge_into(self, weight: torch.Tensor) -> None:
        """Add scale * B_p A_p to this rank's rows of each projection in ``weight``, in at least fp32. No collective."""
        wide = torch.promote_types(weight.dtype, torch.float32)
        for name in self.paths:
            delta = gemm.dgrad(self.lora_B[name].to(wide), self.lora_A[name].to(wide)).mul_(self.config.scale)
            rows = self._rows(name)
            rows = slice(None) if rows is None else rows
            weight[rows] = (weight[rows].to(wide) + delta).to(weight.dtype)

    def extra_repr(self) -> str:
        """Name the projections and the rank."""
        return f"{', '.join(self.paths)}, r={self.config.r}, is_enabled={self.is_enabled}"


def _joined(parts: Sequence[torch.Tensor], *, dim: int) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=dim)


def _is_plain(base: Any, input_: torch.Tensor) -> bool:
    """Return whether base.multiply is X W^T of a frozen W with no cast and no option."""
    return (
        not base.weight.requires_grad
        and base.weight.dtype == input_.dtype
        and base.output_dtype in (None, input_.dtype)
        and not gemm.autocast_is_on(input_)
        and not dgrad_in_fp32(base.config)
    )
