"""Norms of the last dim: RMSNorm as a module, and both norms as functions, for a layer that holds their parameters.

Shape suffixes: [...] any leading dims, [h] the normalised dim.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_frozen.autograd.rms_norm import RMSNormFunction
from megatron_frozen.layers.config import ModelParallelConfig
from megatron_frozen.layers.parts import new_parameter
from megatron_frozen.params import KeepsMarks, mark_partial_grad


def rms_norm(input_: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Return ``input_`` [..., h] scaled to root mean square 1, then by ``weight`` [h]; see ``RMSNormFunction``."""
    return RMSNormFunction.apply(input_, weight, eps)


def layer_norm(input_: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """Return ``input_`` [..., h] with mean 0 and variance 1, times ``weight`` [h], plus ``bias`` [h].

    torch's own, which keeps statistics in fp32 for bf16 and fp16. Parameters of another dtype are cast to the input's.
    """
    cast_bias = None if bias is None else bias.to(input_.dtype)
    return torch.nn.functional.layer_norm(input_, weight.shape, weight.to(input_.dtype), cast_bias, eps)


class RMSNorm(KeepsMarks):
    """Scale each vector to root mean square 1, then by ``weight`` [h].

    Works on any leading dims in any memory order, which the result keeps. The weight is the same on all ranks; its
    gradient is marked as a partial sum where each rank sees a part of the sequence, or (``over_shards``) of the heads.
    """

    def __init__(self, size: int, *, eps: float, parallel: ModelParallelConfig, over_shards: bool = False) -> None:
        super().__init__()
        self.weight = new_parameter(size, config=parallel)
        nn.init.ones_(self.weight)
        self.eps = eps
        if parallel.sequence_parallel or over_shards:
            mark_partial_grad(self.weight)

    def forward(self, input_: Tensor) -> Tensor:
        return rms_norm(input_, self.weight, eps=self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"
