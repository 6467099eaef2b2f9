"""Our linears in megatron-core's layer specs and backend providers, without a change to megatron-core."""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any, TypeVar

from megatron_frozen.errors import ConfigError
from megatron_frozen.integrations.megatron_core import upstream
from megatron_frozen.integrations.megatron_core.layers import ColumnSteps, RowSteps, frozen_class

Spec = TypeVar("Spec")

LINEARS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""The fields that are swapped."""

LEFT_ALONE = ("experts",)
"""Fields not looked into: experts are multiplied in groups, or exchange tokens themselves."""


def frozen_layer_spec(spec: Spec) -> Spec:
    """Return ``spec`` with linear_qkv, linear_proj, linear_fc1 and linear_fc2 of every layer swapped for ours.

    spec: a local layer spec (``get_gpt_layer_local_spec``), the block submodules that
    ``get_gpt_decoder_block_spec`` returns, a multi-token-prediction block spec, or a list of any; it is left as it is.
    Shared experts are swapped; routed experts and the other projections of multi-latent attention are not, since
    megatron-core compares the classes of its down projections by identity. The head is in no spec: see
    ``use_frozen_head``.

    Raises ConfigError for a Transformer Engine spec, for a linear of a class of somebody else's, and where there is
    nothing to swap.
    """
    swapped: list[str] = []
    result = _swapped(spec, field="", found=swapped)
    if not swapped:
        raise ConfigError(
            f"frozen_layer_spec found no {', '.join(LINEARS)} in the {type(spec).__name__} it was given; "
            f"give the spec of a transformer layer, such as get_gpt_layer_local_spec returns"
        )
    return result


def _swapped(node: Any, *, field: str, found: list[str]) -> Any:
    """Return a copy of the tree below ``node`` with its linears swapped, and note the fields in ``found``."""
    if field in LEFT_ALONE or node is None:
        return node
    if field in LINEARS:
        found.append(field)
        return _frozen_linear(node, field=field)
    if isinstance(node, list | tuple):
        return type(node)(_swapped(child, field=field, found=found) for child in node)
    if not dataclasses.is_dataclass(node) or isinstance(node, type):
        return node
    result = copy.copy(node)
    is_spec = hasattr(node, "module") and hasattr(node, "submodules")
    for name in ["submodules"] if is_spec else [entry.name for entry in dataclasses.fields(node)]:
        setattr(result, name, _swapped(getattr(node, name), field=name, found=found))
    return result


def _frozen_linear(builder: Any, *, field: str) -> Any:
    """Return what builds our linear where ``builder`` (a class, a ModuleSpec or a partial) builds upstream's."""
    if isinstance(builder, functools.partial):
        return functools.partial(_frozen_linear(builder.func, field=field), *builder.args, **builder.keywords)
    if hasattr(builder, "module") and hasattr(builder, "submodules"):
        result = copy.copy(builder)
        result.module = _frozen_linear(upstream.core("transformer.spec_utils").get_module(builder), field=field)
        return result
    layers = upstream.core("tensor_parallel.layers")
    if builder in (layers.ColumnParallelLinear, layers.RowParallelLinear):
        return frozen_class(builder)
    if isinstance(builder, type) and issubclass(builder, ColumnSteps | RowSteps):
        return builder
    name = getattr(builder, "__name__", repr(builder))
    if "transformer_engine" in getattr(builder, "__module__", "") or name.startswith("TE"):
        raise ConfigError(
            f"{field} is a {name} of Transformer Engine, whose linears multiply for themselves; "
            f"start from the local spec (get_gpt_layer_local_spec, or transformer_impl='local')"
        )
    raise ConfigError(
        f"{field} is a {name}, which is not one of megatron-core's own ColumnParallelLinear and RowParallelLinear; "
        f"swap it in the spec yourself"
    )


class _ProviderSteps:
    """What a backend provider of ours answers; every other question is megatron-core's LocalSpecProvider's."""

    def column_parallel_linear(self) -> type:
        """Return our column-parallel linear."""
        return frozen_class(upstream.core("tensor_parallel.layers").ColumnParallelLinear)

    def row_parallel_linear(self) -> type:
        """Return our row-parallel linear."""
        return frozen_class(upstream.core("tensor_parallel.layers").RowParallelLinear)


@functools.cache
def frozen_spec_provider_class() -> type:
    """Return ``FrozenSpecProvider``: megatron-core's LocalSpecProvider with our linears. Imports megatron-core."""
    local = upstream.core("models.backends").LocalSpecProvider
    return type(
        "FrozenSpecProvider", (_ProviderSteps, local), {"__doc__": _ProviderSteps.__doc__, "__module__": __package__}
    )
