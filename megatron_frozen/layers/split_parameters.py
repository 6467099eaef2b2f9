"""Parameters of a linear layer in named parts, whose rows stand one above the other in the layer's one weight.

A layer's ``parameters_split`` says which parts; each has a weight and a bias of its own under its own name, so that it
is saved, loaded, frozen and updated alone, while the layer multiplies them all at once. They are cut from one buffer,
where that product reads them in place. Names and meaning are those of Transformer Engine's ``parameters_split``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

from megatron_frozen.comm.groups import Group, group_size
from megatron_frozen.errors import ConfigError
from megatron_frozen.layers.parts import frozen_or_trainable_linear, new_parameter, split_linear
from megatron_frozen.main_grad import introduce
from megatron_frozen.params import init_shard_, set_tensor_model_parallel_attributes
from megatron_frozen.params.shards import InitMethod
from megatron_frozen.partition import divide
from megatron_frozen.storage import repack_, split_rows

ParametersSplit: TypeAlias = Sequence[str] | Mapping[str, int] | None


def part_sizes(parameters_split: ParametersSplit, *, out_features: int) -> dict[str, int]:
    """Return the output features of each part, over all ranks, by its name without trailing underscores.

    A sequence of names gives parts of one size, a mapping names them with their sizes; the order is that of the rows.
    None is one part without a name. Raises ConfigError for anything from which no split follows.
    """
    if parameters_split is None:
        return {"": out_features}
    if isinstance(parameters_split, str):
        raise ConfigError(
            f"parameters_split is the string {parameters_split!r}, of which each letter would be a name; "
            f"give a sequence of names or a dict of names to sizes"
        )
    if not isinstance(parameters_split, Sequence | Mapping):
        raise ConfigError(
            f"parameters_split is of type {type(parameters_split).__name__}; "
            f"give a sequence of names, or a dict of names to sizes, in the order of the rows"
        )
    if not parameters_split:
        raise ConfigError("parameters_split is empty; name at least one part, or leave it None")
    names = _checked_names(list(parameters_split))
    if isinstance(parameters_split, Mapping):
        return dict(zip(names, _checked_sizes(parameters_split, out_features=out_features), strict=True))
    if not isinstance(out_features, int) or out_features < len(names) or out_features % len(names):
        raise ConfigError(
            f"out_features is {out_features}, which does not divide into {len(names)} equal parts "
            f"({', '.join(names)}); give parameters_split as a dict of names to sizes"
        )
    return dict.fromkeys(names, out_features // len(names))


def _checked_names(given: list[Any]) -> list[str]:
    names: list[str] = []
    for name in given:
        if not isinstance(name, str):
            raise ConfigError(f"parameters_split has {name!r} for a name; names of parts are strings")
        stripped = name.rstrip("_")
        if not stripped:
            raise ConfigError(
                f"parameters_split has the name {name!r}, of which nothing is left without trailing underscores; "
                f"name the part"
            )
        if "." in name:
            raise ConfigError(
                f"parameters_split has the name {name!r}, but a dot in a parameter's name stands for a submodule; "
                f"name the part without one"
            )
        if stripped in names:
            raise ConfigError(
                f"parameters_split names the part {stripped!r} twice (trailing underscores do not count); "
                f"give each part a name of its own"
            )
        names.append(stripped)
    return names


def _checked_sizes(parameters_split: Mapping[str, Any], *, out_features: int) -> list[int]:
    for name, size in parameters_split.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ConfigError(
                f"parameters_split gives the part {name!r} the size {size!r}; "
                f"give its number of output features, a whole number of at least 1"
            )
    sizes = list(parameters_split.values())
    if sum(sizes) != out_features:
        listed = ", ".join(f"{name}: {size}" for name, size in parameters_split.items())
        raise ConfigError(
            f"the sizes of parameters_split ({listed}) sum to {sum(sizes)} where out_features is {out_features}; "
            f"give sizes over all ranks that sum to it"
        )
    return sizes


def add_parts(
    layer: Any,
    sizes: dict[str, int],
    *,
    in_features: int,
    bias: bool,
    cut_dim: int | None,
    init_method: InitMethod,
    device: torch.device | str | None = None,
) -> None:
    """Give ``layer`` its parameters, those of each part in ``sizes``: all weights first, then all biases of zeros.

    A rank of ``layer.tp_group`` holds its slice of each part if ``cut_dim`` is 0, its input features if it is 1 and
    the whole if it is None. ``init_method`` fills each part as if it stood alone, at any number of ranks with the same
    values. Sets ``weight_names``, ``bias_names`` and ``parameter_split_sizes``, the sizes on this rank; without
    ``bias`` the names of biases are None. ``layer.config`` gives dtype and device, if ``device`` does not.

    Raises ConfigError where a part does not divide by the ranks, or takes a name that the layer has.
    """
    group, config = layer.tp_group, layer.config
    layer.weight_names = [f"{name}_weight" if name else "weight" for name in sizes]
    layer.bias_names = [f"{name}_bias" if name else "bias" for name in sizes]
    layer.parameter_split_sizes = [
        _local_size(name, size, group=group) if cut_dim == 0 else size for name, size in sizes.items()
    ]
    columns = divide(in_features, group_size(group), what="in_features") if cut_dim == 1 else in_features
    weights = new_buffer(sum(layer.parameter_split_sizes), columns, config=config, device=device)
    rows = split_rows(weights, layer.parameter_split_sizes)
    for name, full_size, part in zip(layer.weight_names, sizes.values(), rows, strict=True):
        weight = _registered(layer, name, part)
        introduce(weight)
        mark_as_cut(weight, cut_dim)
        if config.perform_initialization and not weight.is_meta:
            init_shard_(
                weight,
                full_shape=(full_size, in_features),
                partition_dim=cut_dim or 0,
                init_method=init_method,
                group=None if cut_dim is None else group,
            )
    if not bias:
        for name in layer.bias_names:
            _registered(layer, name, None)
        return
    biases = new_buffer(sum(layer.parameter_split_sizes), config=config, device=device)
    if config.perform_initialization:
        biases.zero_()
    for name, part in zip(layer.bias_names, split_rows(biases, layer.parameter_split_sizes), strict=True):
        mark_as_cut(_registered(layer, name, part), 0 if cut_dim == 0 else None)


def _local_size(name: str, size: int, *, group: Group) -> int:
    return divide(size, group_size(group), what=f"the size of part {name!r}" if name else "out_features")


def new_buffer(*shape: int, config: Any, device: torch.device | str | None) -> torch.Tensor:
    """Return an unfilled tensor for parameters, on ``device`` or, for None, where ``new_parameter`` makes them."""
    if device is None:
        return new_parameter(*shape, config=config).data
    return torch.empty(*shape, dtype=config.params_dtype, device=device)


def _registered(layer: torch.nn.Module, name: str, part: torch.Tensor | None) -> Any:
    if hasattr(layer, name):
        raise ConfigError(
            f"parameters_split makes a parameter named {name!r}, which {type(layer).__name__} has already; "
            f"give that part another name"
        )
    # .data, so that a write to one part is no write to what a graph has saved of the others
    parameter = None if part is None else torch.nn.Parameter(part.data)
    layer.register_parameter(name, parameter)
    return parameter


def mark_as_cut(parameter: torch.nn.Parameter, cut_dim: int | None) -> None:
    """Mark a parameter as one that ranks hold slices of along ``cut_dim``, or as the same on all of them for None."""
    dim = -1 if cut_dim is None else cut_dim
    set_tensor_model_parallel_attributes(parameter, is_parallel=cut_dim is not None, dim=dim, stride=1)


def weights_of(layer: Any) -> list[torch.Tensor]:
    """Return the weights of a layer's parts, in the order of its rows."""
    return [getattr(layer, name) for name in layer.weight_names]


def biases_of(layer: Any) -> list[torch.Tensor]:
    """Return the biases of a layer's parts, in the order of its rows; an empty list where it has none."""
    biases = [getattr(layer, name) for name in layer.bias_names]
    return [bias for bias in biases if bias is not None]


def joined_bias(layer: Any) -> torch.Tensor | None:
    """Return the biases as one vector, the parameter itself where there is one, None where the layer has none."""
    biases = biases_of(layer)
    if len(biases) < 2:
        return biases[0] if biases else None
    return torch.cat(biases)


def repack_parts_(layer: Any) -> bool:
    """Make the parts adjoin in memory again, in place; return whether they do now. See ``storage.repack_``."""
    biases = biases_of(layer)
    weights_adjoin = repack_(weights_of(layer))
    return (not biases or repack_(biases)) and weights_adjoin


def multiply_parts(layer: Any, input_: torch.Tensor, *, with_bias: bool, **options: Any) -> torch.Tensor:
    """Return X W^T [..., sum of the parts on this rank] in one product, plus the biases ``with_bias``.

    options: ``allreduce_dgrad``, ``sequence_parallel``, ``output_dtype``, as the functions of ``functional`` take them.
    """
    weights, biases = weights_of(layer), biases_of(layer) if with_bias else []
    if len(weights) > 1:
        return split_linear(input_, weights, biases, config=layer.config, tp_group=layer.tp_group, **options)
    bias = biases[0] if biases else None
    return frozen_or_trainable_linear(input_, weights[0], bias, config=layer.config, tp_group=layer.tp_group, **options)


def in_order_of_parts(gathered: torch.Tensor, layer: Any) -> torch.Tensor:
    """Return outputs [..., O] that were gathered rank by rank in the order of the parts, as one rank has them."""
    sizes = layer.parameter_split_sizes
    if len(sizes) == 1:
        return gathered
    by_rank = gathered.unflatten(-1, (group_size(layer.tp_group), sum(sizes)))
    return torch.cat([part.flatten(-2) for part in by_rank.split(sizes, dim=-1)], dim=-1)


def described_parts(layer: Any) -> str:
    """Return the parts and their sizes on this rank for a layer's ``repr``; nothing where there is but one."""
    parts = dict(zip(layer.weight_names, layer.parameter_split_sizes, strict=True))
    return f", parts={parts}" if len(parts) > 1 else ""
