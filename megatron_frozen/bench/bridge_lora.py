"""How Megatron-Bridge puts LoRA beside a tensor-parallel linear, built from this package's layers, to be counted.

Both factors are parallel layers of their own, so each brings its own communication:

| base | A | B | sequence parallel |
|---|---|---|---|
| column | column (r / ranks, in), output gathered | column (out / ranks, r) | input gathered for A once more |
| row | row (r, in / ranks), output summed | column (out / ranks, r), output gathered | output cut after B |

The factors' layers themselves run without sequence parallelism. Source: Megatron-Bridge's ParallelLinearAdapter and
LoRALinear, described in words; no line is theirs.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import torch
from torch import nn

from megatron_frozen.comm import gather_from_sequence_parallel_region, scatter_to_sequence_parallel_region
from megatron_frozen.layers import ColumnParallelLinear, RowParallelLinear


class BridgeLora(nn.Module):
    """Base plus scale * B A x, from full factors A [r, in] and B [out, r], whose rank must divide by the ranks."""

    def __init__(
        self,
        base: ColumnParallelLinear | RowParallelLinear,
        full_A: torch.Tensor,
        full_B: torch.Tensor,
        *,
        scale: float,
    ) -> None:
        super().__init__()
        self.base, self.scale, self.sequence_parallel = base, scale, base.sequence_parallel
        r, in_features = full_A.shape
        options = {
            "config": dataclasses.replace(base.config, sequence_parallel=False),
            "bias": False,
            "tp_group": base.tp_group,
        }
        if isinstance(base, ColumnParallelLinear):
            self.A: nn.Module = ColumnParallelLinear(
                in_features,
                r,
                init_method=partial(_fill, full=full_A),
                gather_output=True,
                disable_grad_reduce=base.sequence_parallel,
                **options,
            )
        else:
            self.A = RowParallelLinear(
                in_features,
                r,
                init_method=partial(_fill, full=full_A),
                input_is_parallel=True,
                skip_bias_add=False,
                **options,
            )
        self.B = ColumnParallelLinear(
            r,
            full_B.shape[0],
            init_method=partial(_fill, full=full_B),
            gather_output=isinstance(base, RowParallelLinear),
            **options,
        )

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the base's ``(output, bias)`` with the adapter's product in the output."""
        output, bias = self.base(input_)
        is_row = isinstance(self.base, RowParallelLinear)
        if self.sequence_parallel and not is_row:
            input_ = gather_from_sequence_parallel_region(input_, group=self.base.tp_group)
        adapted = self.B(self.A(input_)[0])[0]
        if self.sequence_parallel and is_row:
            adapted = scatter_to_sequence_parallel_region(adapted, self.base.tp_group)
        return output + self.scale * adapted, bias


def _fill(weight: torch.Tensor, *, full: torch.Tensor) -> torch.Tensor:
    return weight.copy_(full)
