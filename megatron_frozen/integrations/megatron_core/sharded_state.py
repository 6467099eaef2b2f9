"""Shards of our own layers in megatron-core's distributed checkpoints, interchangeable with those of its layers."""

from __future__ import annotations

from typing import Any

from megatron_frozen.integrations.megatron_core import upstream
from megatron_frozen.layers.sharded_state import SavesShards, give_sharded_state
from megatron_frozen.params import is_sharded


def sharded_state(
    layer: SavesShards, *, prefix: str, sharded_offsets: tuple[Any, ...], metadata: Any
) -> dict[str, Any]:
    """Return {key: ShardedTensor} of ``layer``, each parameter cut along the dim that it is marked with."""
    utils = upstream.core("transformer.utils")
    metadata = utils.ensure_metadata_has_dp_cp_group(metadata)
    state = layer.state_dict(prefix="", keep_vars=True)
    group: Any = layer.tp_group
    cut = {name: tensor.partition_dim for name, tensor in state.items() if group is not None and is_sharded(tensor)}
    if layer.has_extra_state:
        state["_extra_state"] = None
    if group is None:  # every rank of megatron-core's group holds the layer whole
        group = upstream.core("parallel_state").get_tensor_model_parallel_group()
    groups = {"tp_group": group, "dp_cp_group": metadata["dp_cp_group"]}
    tensors = utils.make_sharded_tensors_for_checkpoint(state, prefix, cut, sharded_offsets, **groups)
    if layer.may_be_padded:
        for name in cut:
            tensors[f"{prefix}{name}"].allow_shape_mismatch = True
    return tensors


give_sharded_state(sharded_state)
