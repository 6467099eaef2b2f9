"""What column- and row-parallel linears share: making parameters, choosing a group, choosing the product."""

from __future__ import annotations

from typing import Any

import torch

from megatron_frozen.comm.groups import Group, get_tensor_model_parallel_group
from megatron_frozen.functional import linear_with_frozen_weight, linear_with_grad_accumulation_and_async_allreduce
from megatron_frozen.params import init_shard_, set_tensor_model_parallel_attributes
from megatron_frozen.params.shards import InitMethod


def chosen_group(tp_group: Group, pg_collection: Any = None) -> Group:
    """Return ``tp_group``, else the collection's ``tp``, else the group of ``initialize_model_parallel``."""
    if tp_group is None and pg_collection is not None:
        tp_group = pg_collection.tp
    return tp_group if tp_group is not None else get_tensor_model_parallel_group()


def new_parameter(*shape: int, config: Any) -> torch.nn.Parameter:
    """Return an unfilled parameter on the current GPU, or on the CPU where there is none or the config says so."""
    device = None
    if torch.cuda.is_available() and not config.use_cpu_initialization:
        device = torch.device("cuda", torch.cuda.current_device())
    return torch.nn.Parameter(torch.empty(*shape, device=device, dtype=config.params_dtype))


def new_weight(
    shape: tuple[int, int],
    *,
    full_shape: tuple[int, int],
    partition_dim: int,
    config: Any,
    init_method: InitMethod,
    group: Group,
    stride: int = 1,
) -> tuple[torch.nn.Parameter, torch.Tensor | None]:
    """Return a weight shard and, where it was initialised, the full fp32 tensor it was cut from."""
    weight = new_parameter(*shape, config=config)
    set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=partition_dim, stride=stride)
    if not config.perform_initialization or weight.is_meta:
        return weight, None
    master = init_shard_(
        weight,
        full_shape=full_shape,
        partition_dim=partition_dim,
        init_method=init_method,
        group=group,
        stride=stride,
    )
    return weight, master


def new_bias(size: int, *, config: Any) -> torch.nn.Parameter:
    """Return a bias of zeros."""
    bias = new_parameter(size, config=config)
    if config.perform_initialization:
        torch.nn.init.zeros_(bias)
    return bias


def frozen_or_trainable_linear(
    input_: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, config: Any, **options: Any
) -> torch.Tensor:
    """Take the frozen product if ``weight`` is frozen now, else the trainable one; see ``functional``."""
    linear = linear_with_grad_accumulation_and_async_allreduce if weight.requires_grad else linear_with_frozen_weight
    return linear(
        input_,
        weight,
        bias,
        gradient_accumulation_fusion=config.gradient_accumulation_fusion,
        dgrad_in_fp32=getattr(config, "dgrad_in_fp32", False),
        allreduce_dgrad_in_fp32=getattr(config, "allreduce_dgrad_in_fp32", False),
        **options,
    )


def drop_extra_state(_: torch.nn.Module, state_dict: dict[str, Any], prefix: str, *__: Any) -> None:
    """Take ``_extra_state``, which Transformer Engine and Megatron layers save, out of a state dict before it loads."""
    state_dict.pop(f"{prefix}_extra_state", None)
