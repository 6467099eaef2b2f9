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

from megatron_frozen.comm import get_data_parallel_group, group_size
from megatron_frozen.integrations.fsdp import fp32_grads
from megatron_frozen.lora import named_lora_layers
from megatron_frozen.models import CausalLM
from megatron_frozen.params import marks_kept


def is_cut(model: CausalLM) -> bool:
    """Whether FSDP2 has cut the model, so that every forward pass is a collective of all ranks."""
    return isinstance(model, FSDPModule)


def shard_over_data_parallel(model: CausalLM, *, device: torch.device, compute_dtype: torch.dtype) -> None:
    """Cut the parameters of `model` in place, but not its adapters, and give up what other ranks hold.

    On one data-parallel rank there is nothing to cut. Trainable parameters are cast to `compute_dtype` as they are
    gathered; they must be fp32 where that is narrower. Gradients are sums over the ranks, not FSDP2's means.
    Collectives: none. Peak memory: this rank's model as it is now, and the parts of one group.
    """
    group = get_data_parallel_group()
    if group is None or group_size(group) == 1:
        return
    # Meshes are equal if ranks and names are, and torch's caches then bring up an earlier one, whose group may be gone.
    mesh = DeviceMesh.from_group(group, device.type, mesh_dim_names=(f"data_parallel_{group.group_name}",))
    adapters = {
        factor for _, layer in named_lora_layers(model) for factor in (*layer.lora_A.values(), *layer.lora_B.values())
    }
    casts = not adapters and compute_dtype != torch.float32
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if casts:
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    with ExitStack() as marks:
        for module in model.modules():
            marks.enter_context(marks_kept(module._parameters))
        for part in (*model.model.layers, model):
            cut = fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=True, ignored_params=adapters)
            cut.set_gradient_divide_factor(1.0)
            cut.set_force_sum_reduction_for_comms(enable=True)  # gloo knows no other reduction with a factor
    if casts:
        fp32_grads(model)
