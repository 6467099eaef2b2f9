"""The linear layer with Transformer Engine's arguments, whose parameters may be split into named parts."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, TypeAlias

import torch

from megatron_frozen.comm import reduce_from_tensor_model_parallel_region, reduce_scatter_to_sequence_parallel_region
from megatron_frozen.comm.groups import Group, chosen_group, group_size
from megatron_frozen.errors import ConfigError
from megatron_frozen.layers.config import ModelParallelConfig
from megatron_frozen.layers.parts import drop_extra_state
from megatron_frozen.layers.sharded_state import SavesShards
from megatron_frozen.layers.split_parameters import (
    ParametersSplit,
    add_parts,
    biases_of,
    described_parts,
    joined_bias,
    multiply_parts,
    part_sizes,
    repack_parts_,
)
from megatron_frozen.main_grad import name_parameters
from megatron_frozen.params import mark_partial_grad
from megatron_frozen.params.shards import InitMethod

ParallelMode: TypeAlias = Literal["column", "row"] | None

CUT_DIMS = {None: None, "column": 0, "row": 1}
DEFAULT_INIT: InitMethod = partial(torch.nn.init.normal_, std=0.023)  # Transformer Engine's


class Linear(SavesShards):
    """Y = X W^T + b, with W in one parameter ``weight`` or, split, in one ``<name>_weight`` for each part.

    Shapes: X [..., in_features], Y [..., out_features]; a part has a weight [size, in_features] and a bias [size],
    ``<name>_bias``. ``parameters_split`` names the parts in the order of their rows: a sequence of names for parts of
    one size, or a dict of names to sizes over all ranks; trailing underscores of names are dropped. The parts are
    multiplied in one product, in place as long as they adjoin in memory, where they are created, else over one
    concatenation per step; which it is, is seen at each call. ``repack_`` makes them adjoin again after a deepcopy, a
    cast or a wrapper has moved them. A frozen part gets no gradient, and none is computed for it.

    ``parallel_mode``: "column" cuts the output features, so that Y is [..., out_features / ranks], each rank having
    its slice of each part in order; "row" cuts the input features, which X brings as this rank's slice; None keeps
    the layer whole on each rank. Collectives: column, an all-reduce of dX backward, or with ``sequence_parallel`` an
    all-gather of X forward and a reduce-scatter of dX backward; row, an all-reduce of Y, or with ``sequence_parallel``
    its reduce-scatter; None, none, where under ``sequence_parallel`` each rank sees a part of the tokens, so that the
    gradients are marked for ``sum_partial_grads``, as those of a row layer's biases are.

    Arguments are those of ``transformer_engine.pytorch.Linear``; ``fuse_wgrad_accumulation`` writes weight gradients
    into each part's ``main_grad``. Forward returns Y, with ``return_bias`` ``(Y, bias)`` and no bias added. The full
    parameters and their keys in a state dict are the same at any number of ranks.

    Raises ConfigError for a split that does not fit (see ``part_sizes``) or sizes that do not divide by the ranks.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Group = None,
        init_method: InitMethod | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: ParallelMode = None,
        parameters_split: ParametersSplit = None,
        device: torch.device | str | None = None,
        name: str | None = None,
    ) -> None:
        """Create the layer; ``device`` None is the current GPU, or the CPU; name is what messages call it by."""
        super().__init__()
        set_options(
            self,
            config=linear_config(params_dtype, sequence_parallel=sequence_parallel, fuses=fuse_wgrad_accumulation),
            tp_group=tp_group,
            parallel_mode=parallel_mode,
            use_bias=bias,
            return_bias=return_bias,
        )
        add_linear(
            self,
            part_sizes(parameters_split, out_features=out_features),
            in_features=in_features,
            init_method=init_method,
            device=device,
            name=name,
        )

    def forward(self, input_: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]:
        """Return Y, or ``(Y, bias)``; see the class."""
        output = linear_output(self, input_)
        return (output, joined_bias(self)) if self.return_bias else output

    def repack_(self) -> bool:
        """Make the parts adjoin in memory again, in place; return whether they do. See ``storage.repack_``."""
        return repack_parts_(self)

    def extra_repr(self) -> str:
        """Return the sizes for ``repr``."""
        return described_linear(self)


def linear_config(params_dtype: torch.dtype | None, *, sequence_parallel: bool, fuses: bool) -> ModelParallelConfig:
    """Return Transformer Engine's arguments as the settings that our layers read."""
    return ModelParallelConfig(
        params_dtype=params_dtype or torch.get_default_dtype(),
        sequence_parallel=sequence_parallel,
        gradient_accumulation_fusion=fuses,
    )


def set_options(
    layer: Any,
    *,
    config: ModelParallelConfig,
    tp_group: Group,
    parallel_mode: ParallelMode,
    use_bias: bool,
    return_bias: bool,
) -> None:
    """Set what a linear layer does on ``layer``; raise ConfigError for a mode that there is not."""
    if parallel_mode not in CUT_DIMS:
        raise ConfigError(f"parallel_mode is {parallel_mode!r}; give 'column', 'row', or None for a whole layer")
    layer.config, layer.tp_group = config, chosen_group(tp_group)
    layer.parallel_mode, layer.use_bias, layer.return_bias = parallel_mode, use_bias, return_bias
    layer.tp_size = group_size(layer.tp_group)
    layer.sequence_parallel = config.sequence_parallel and layer.tp_size > 1


def add_linear(
    layer: Any,
    sizes: dict[str, int],
    *,
    in_features: int,
    init_method: InitMethod | None,
    device: torch.device | str | None,
    name: str | None,
) -> None:
    """Give ``layer``, which has its options, the parameters of a linear layer and its ``in_features`` and
    ``out_features`` on this rank."""
    add_parts(
        layer,
        sizes,
        in_features=in_features,
        bias=layer.use_bias,
        cut_dim=CUT_DIMS[layer.parallel_mode],
        init_method=init_method or DEFAULT_INIT,
        device=device,
    )
    layer.in_features = getattr(layer, layer.weight_names[0]).shape[1]
    layer.out_features = sum(layer.parameter_split_sizes)
    if layer.sequence_parallel and layer.parallel_mode is None:
        seen_in_part = list(layer.parameters())
    else:
        seen_in_part = biases_of(layer) if layer.sequence_parallel and layer.parallel_mode == "row" else []
    for parameter in seen_in_part:
        mark_partial_grad(parameter)
    if name is not None:
        name_parameters(layer, prefix=name)
    layer.register_load_state_dict_pre_hook(drop_extra_state)


def linear_output(layer: Any, input_: torch.Tensor) -> torch.Tensor:
    """Return Y of a layer that ``add_linear`` made, with its bias unless ``return_bias`` gives that to the caller."""
    adds_bias, is_column = layer.use_bias and not layer.return_bias, layer.parallel_mode == "column"
    sums_output = layer.parallel_mode == "row" and layer.tp_size > 1
    output = multiply_parts(
        layer,
        input_,
        with_bias=adds_bias and not sums_output,
        allreduce_dgrad=is_column and layer.tp_size > 1 and not layer.sequence_parallel,
        sequence_parallel=is_column and layer.sequence_parallel,
    )
    if not sums_output:
        return output
    if layer.sequence_parallel:
        output = reduce_scatter_to_sequence_parallel_region(output, layer.tp_group)
    else:
        output = reduce_from_tensor_model_parallel_region(output, layer.tp_group)
    bias = joined_bias(layer) if adds_bias else None
    return output if bias is None else output + bias.to(output.dtype)


def described_linear(layer: Any) -> str:
    """Return the sizes of a linear layer for its ``repr``."""
    return (
        f"in_features={layer.in_features}, out_features={layer.out_features}, bias={layer.use_bias}, "
        f"parallel_mode={layer.parallel_mode}, TP={layer.tp_size}{described_parts(layer)}"
    )
