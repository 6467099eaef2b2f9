"""The model's weights cut over the data-parallel ranks by PyTorch's FSDP2 and gathered layer by layer.

| what trains | cut | gradients |
|---|---|---|
| adapters | the frozen base only | whole on each rank, summed by `params.sum_grads` as without FSDP |
| everything | all fp32 parameters | computed from bf16 operands in fp32, summed and cut by FSDP2 in fp32 |

Each decoder layer is one group, and embedding, final norm and head another. Every group is gathered for its forward
and once more for its backward, so between steps a rank holds its part alone. Tensor parallelism is untouched: what is
cut is each tensor-parallel rank's own part of a weight.
"""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from megatron_frozen.comm import get_data_parallel_group
from megatron_frozen.integrations.fsdp import fp32_grads
from megatron_frozen.models import CausalLM
from megatron_frozen.params import marks_kept


def is_cut(model: CausalLM) -> bool:
    """Whether FSDP2 has cut the model, so that every forward pass is a collective of all ranks."""
    return isinstance(model, FSDPModule)


def cut_over_data_parallel(model: CausalLM, *, device: torch.device, cast_to: torch.dtype | None) -> None:
    """Cut `model`, whose parameters are on the meta device, in place, and allocate this rank's parts on `device`.

    Adapters are added later and stay whole. If `cast_to` is given, parameters train in fp32 and are cast to it as they
    are gathered. Gradients are sums over the ranks, not FSDP2's means. Several data-parallel ranks. Collectives: none.
    """
    group = get_data_parallel_group()
    assert group is not None
    # Meshes are equal if ranks and names are, and torch's caches then bring up an earlier one, whose group may be gone.
    mesh = DeviceMesh.from_group(group, device.type, mesh_dim_names=(f"data_parallel_{group.group_name}",))
    policy = MixedPrecisionPolicy(
        param_dtype=cast_to, reduce_dtype=torch.float32 if cast_to else None, cast_forward_inputs=False
    )
    with ExitStack() as marks:
        for module in model.modules():
            marks.enter_context(marks_kept(module._parameters))
        for part in (*model.model.layers, model):
            cut = fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
            cut.set_gradient_divide_factor(1.0)
            cut.set_force_sum_reduction_for_comms(enable=True)  # gloo knows no other reduction with a factor
        model.to_empty(device=device)
    if cast_to is not None:
        fp32_grads(model)
