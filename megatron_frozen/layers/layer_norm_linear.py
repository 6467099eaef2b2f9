"""A norm and the linear layer behind it as one module, with Transformer Engine's arguments and keys."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch

from megatron_frozen.comm.groups import Group
from megatron_frozen.errors import ConfigError
from megatron_frozen.layers.linear import (
    ParallelMode,
    add_linear,
    described_linear,
    linear_config,
    linear_output,
    set_options,
)
from megatron_frozen.layers.norm import layer_norm, rms_norm
from megatron_frozen.layers.sharded_state import SavesShards
from megatron_frozen.layers.split_parameters import (
    ParametersSplit,
    joined_bias,
    new_buffer,
    part_sizes,
    repack_parts_,
)
from megatron_frozen.params import mark_partial_grad
from megatron_frozen.params.shards import InitMethod

Normalization: TypeAlias = Literal["LayerNorm", "RMSNorm"]


class LayerNormLinear(SavesShards):
    """Y = norm(X) W^T + b: LayerNorm or RMSNorm over in_features, then what ``Linear`` does, split parameters too.

    Shapes: X [..., in_features], Y [..., out_features], ``layer_norm_weight`` [in_features] and, for LayerNorm,
    ``layer_norm_bias`` [in_features] beside the parameters of ``Linear``. ``zero_centered_gamma`` scales by 1 +
    ``layer_norm_weight``, which starts at 0. Statistics are in fp32 for lower dtypes.

    ``parallel_mode`` is None or "column", with the collectives of ``Linear``; the norm runs before the all-gather of
    sequence parallelism, so that each rank sees a part of the tokens, and its parameters are marked for
    ``sum_partial_grads``. Arguments are those of ``transformer_engine.pytorch.LayerNormLinear``. Forward returns Y,
    or a tuple of Y, the bias with ``return_bias`` and the norm of X with ``return_layernorm_output``.

    Raises ConfigError as ``Linear`` does, for another normalization, and for parallel_mode "row", whose ranks hold a
    slice of the features each.
    """

    layer_norm_weight: torch.nn.Parameter
    layer_norm_bias: torch.nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Group = None,
        init_method: InitMethod | None = None,
        bias: bool = True,
        normalization: Normalization = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: ParallelMode = None,
        return_layernorm_output: bool = False,
        parameters_split: ParametersSplit = None,
        zero_centered_gamma: bool = False,
        device: torch.device | str | None = None,
        name: str | None = None,
    ) -> None:
        """Create the layer; ``device`` None is the current GPU, or the CPU; name is what messages call it by."""
        super().__init__()
        if normalization not in ("LayerNorm", "RMSNorm"):
            raise ConfigError(f"normalization is {normalization!r}; give 'LayerNorm' or 'RMSNorm'")
        if parallel_mode == "row":
            raise ConfigError(
                "LayerNormLinear got parallel_mode 'row', whose ranks hold a slice of the features each, where a norm "
                "needs them all; give 'column' or None, or use a norm and a Linear"
            )
        config = linear_config(params_dtype, sequence_parallel=sequence_parallel, fuses=fuse_wgrad_accumulation)
        set_options(
            self,
            config=config,
            tp_group=tp_group,
            parallel_mode=parallel_mode,
            use_bias=bias,
            return_bias=return_bias,
        )
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, zero_centered_gamma
        self.return_layernorm_output = return_layernorm_output
        scale = new_buffer(in_features, config=config, device=device).fill_(0.0 if zero_centered_gamma else 1.0)
        self.layer_norm_weight = torch.nn.Parameter(scale)
        has_shift = normalization == "LayerNorm"
        shift = new_buffer(in_features, config=config, device=device).zero_() if has_shift else None
        self.layer_norm_bias = None if shift is None else torch.nn.Parameter(shift)
        if self.sequence_parallel:
            for parameter in self.parameters():
                mark_partial_grad(parameter)
        sizes = part_sizes(parameters_split, out_features=out_features)
        add_linear(self, sizes, in_features=in_features, init_method=init_method, device=device, name=name)

    def forward(self, input_: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
        """Return Y, or a tuple; see the class."""
        normalised = self._normalise(input_)
        output = linear_output(self, normalised)
        if not (self.return_bias or self.return_layernorm_output):
            return output
        bias = (joined_bias(self),) if self.return_bias else ()
        return output, *bias, *((normalised,) if self.return_layernorm_output else ())

    def _normalise(self, input_: torch.Tensor) -> torch.Tensor:
        weight = self.layer_norm_weight + 1 if self.zero_centered_gamma else self.layer_norm_weight
        if self.normalization == "RMSNorm":
            return rms_norm(input_, weight, eps=self.eps)
        return layer_norm(input_, weight, self.layer_norm_bias, eps=self.eps)

    def repack_(self) -> bool:
        """Make the parts adjoin in memory again, in place; return whether they do. See ``storage.repack_``."""
        return repack_parts_(self)

    def extra_repr(self) -> str:
        """Return the sizes for ``repr``."""
        return f"{described_linear(self)}, {self.normalization}, eps={self.eps}"
