"""Shards of our own layers in megatron-core's distributed checkpoints, interchangeable with those of its layers."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from megatron_frozen.comm.groups import Group
from megatron_frozen.integrations.megatron_core import upstream
from megatron_frozen.layers.sharded_state import SavesShards, give_sharded_state
from megatron_frozen.params import is_sharded


def sharded_state(
    layer: SavesShards, *, prefix: str, sharded_offsets: tuple[Any, ...], metadata: Any
) -> dict[str, Any]:
    """Return {key: ShardedTensor} of ``layer``, each parameter cut along the dim that it is marked with."""
    state = layer.state_dict(prefix="", keep_vars=True)
    group: Any = layer.tp_group
    cut = {name: tensor.partition_dim for name, tensor in state.items() if group is not None and is_sharded(tensor)}
    if layer.has_extra_state:
        state["_extra_state"] = None
    if group is None:  # every rank of megatron-core's group holds the layer whole
        group = upstream.core("parallel_state").get_tensor_model_parallel_group()
    tensors = sharded_tensors(
        state, cut, prefix=prefix, sharded_offsets=sharded_offsets, tp_group=group, metadata=metadata
    )
    if layer.may_be_padded:
        for name in cut:
            tensors[f"{prefix}{name}"].allow_shape_mismatch = True
    return tensors


def complete(metadata: Any) -> Any:
    """Return ``metadata`` with the data-parallel group, which megatron-core asks for since 0.16."""
    add_group = getattr(upstream.core("transformer.utils"), "ensure_metadata_has_dp_cp_group", None)
    return metadata if add_group is None else add_group(metadata)


def sharded_tensors(
    state: Mapping[str, torch.Tensor | None],
    cut: Mapping[str, int],
    *,
    prefix: str,
    sharded_offsets: tuple[Any, ...],
    tp_group: Group,
    metadata: Any,
) -> dict[str, Any]:
    """Return {key: ShardedTensor} of ``state``, of which ``cut`` names what is cut over tensor-parallel ranks, and
    along which dim."""
    make = upstream.core("transformer.utils").make_sharded_tensors_for_checkpoint
    groups: dict[str, Any] = {}
    if "tp_group" in inspect.signature(make).parameters:  # older releases have one set of groups for everything
        groups = {"tp_group": tp_group, "dp_cp_group": complete(metadata)["dp_cp_group"]}
    return make(state, prefix, cut, sharded_offsets, **groups)


give_sharded_state(sharded_state)
