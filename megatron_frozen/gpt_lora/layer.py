"""The adapters of one linear of megatron-core: a pair of factors per projection, multiplied as one pair.

How factors are cut over ranks, see ``lora.factors``; each rank has a part of the gradient of one that is whole. Under
sequence parallelism these parts are marked, for Megatron's ``finalize_model_grads`` or ``sum_partial_grads`` to sum
once per step. Without it Megatron sums nothing afterwards, so they are summed in the backward, all of a linear at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_frozen.comm import copy_to_tensor_model_parallel_region, group_size
from megatron_frozen.gpt_lora.projections import Projection
from megatron_frozen.integrations.megatron_core.steps import Adapter
from megatron_frozen.layers.parts import is_plain_and_frozen
from megatron_frozen.lora import LoraConfig
from megatron_frozen.lora.factors import Factors, FullFactors, empty_pair, low_rank_delta, multiply_adapted
from megatron_frozen.params import SharesGroups, is_partial_grad


class ProjectionAdapters(Adapter, SharesGroups):
    """Y = X W^T and, in the rows of each projection p, scale * (dropout(X) A_p^T) B_p^T.

    The A_p are stacked, and the B_p set side by side into the rows that the fused weight has for them, so that the
    products are as many as for one adapter and no activation is taken apart. One dropout mask serves all projections.
    """

    def __init__(self, base: Any, config: LoraConfig, *, factors: Mapping[Projection, FullFactors]) -> None:
        """Keep this rank's part of the full factors A [r, in] and B [out, r] of each projection. No collective."""
        super().__init__()
        self.config, self.is_enabled = config, True
        self.tp_group = base.tp_group
        self.output_size_per_partition = base.weight.shape[0]
        self.paths = {projection.name: projection.path for projection in factors}
        self.lora_A, self.lora_B = empty_pair(is_column=base.partition_dim == 0, tp_group=base.tp_group)
        kind = {"like": base.weight, "dtype": config.dtype, "is_summed_later": base.sequence_parallel}
        for projection, (full_A, full_B) in factors.items():
            self.lora_A.add(projection.name, full_A, **kind)
            self.lora_B.add(projection.name, full_B, **kind)
            if projection.rows is not None:
                rows = torch.tensor(projection.rows, device=base.weight.device)
                self.register_buffer(f"rows_of_{projection.name}", rows, persistent=False)

    def partition_dims(self) -> dict[str, int]:
        """Return the names of the factors that are cut, with the dim."""
        kinds = {"lora_A": self.lora_A.cut_dim, "lora_B": self.lora_B.cut_dim}
        return {f"{kind}.{name}": dim for kind, dim in kinds.items() if dim is not None for name in self.paths}

    def full_factors(self, name: str) -> FullFactors:
        """Return a projection's A [r, in] and B [out, r] on every rank of the group. One all-gather."""
        return self.lora_A.full(name), self.lora_B.full(name)

    def set_factors(self, name: str, *, full_A: torch.Tensor, full_B: torch.Tensor) -> None:
        """Overwrite a projection's factors with this rank's parts of full ones. No collective."""
        self.lora_A.overwrite(name, full_A)
        self.lora_B.overwrite(name, full_B)

    def multiply(self, base: Any, input_parallel: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the output [s, b, O]: the frozen product and the adapters', in the base's dtype.

        input_parallel: [s, b, I] of this rank. No collective, but for the sums of factors' gradients (see above).
        """
        if not self.is_enabled:
            return base.multiply(input_parallel)
        return multiply_adapted(
            base,
            input_parallel,
            self._joint(self.lora_A),
            self._joint(self.lora_B),
            scale=self.config.scale,
            p=self.config.dropout if self.training else 0.0,
            is_plain=base.output_dtype in (None, input_parallel.dtype)
            and is_plain_and_frozen([base.weight], input_parallel, config=base.config),
        )

    def _joint(self, factors: Factors) -> torch.Tensor:
        """Return all A as one [n r, I], or all B as one [O, n r] in the rows of the fused weight."""
        if factors is self.lora_A:
            joined = _joined(list(factors.values()), dim=0)
        else:
            joined = _joined([self._in_fused_rows(B, name=name) for name, B in factors.items()], dim=1)
        is_summed_later = is_partial_grad(next(iter(factors.values())))
        if factors.cut_dim is not None or is_summed_later or group_size(self.tp_group) == 1:
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
        for name in self.paths:
            delta = low_rank_delta(self.lora_A[name], self.lora_B[name], scale=self.config.scale, weight=weight)
            rows = self._rows(name)
            rows = slice(None) if rows is None else rows
            weight[rows] = (weight[rows].to(delta.dtype) + delta).to(weight.dtype)

    def extra_repr(self) -> str:
        """Name the projections and the rank."""
        return f"{', '.join(self.paths)}, r={self.config.r}, is_enabled={self.is_enabled}"


def _joined(parts: Sequence[torch.Tensor], *, dim: int) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=dim)
