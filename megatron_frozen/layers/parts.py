"""What the layers share: group, parameters, options, the entry of an input into the region, the choice of product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.modules.module as torch_module

from megatron_frozen import environment, gemm
from megatron_frozen.comm import (
    Group,
    chosen_group,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron_frozen.functional import (
    linear_with_frozen_weight,
    linear_with_grad_accumulation_and_async_allreduce,
    linear_with_split_parameters,
)
from megatron_frozen.main_grad import introduce
from megatron_frozen.params import init_shard_, set_tensor_model_parallel_attributes
from megatron_frozen.params.shards import InitMethod


def layer_group(tp_group: Group, pg_collection: Any) -> Group:
    """Return ``tp_group``, else the collection's ``tp``, else the group of ``initialize_model_parallel``."""
    return chosen_group(pg_collection.tp if tp_group is None and pg_collection is not None else tp_group)


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
    introduce(weight)
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


def dgrad_in_fp32(config: Any) -> bool:
    """Return whether ``config`` or the environment asks for dX to be multiplied in fp32."""
    # Megatron's configs, which are taken in place of ours, do not have the field.
    return getattr(config, "dgrad_in_fp32", False) or environment.switch(environment.LINEAR_DGRAD_FP32)


def is_plain_and_frozen(weights: Sequence[torch.Tensor], input_: torch.Tensor, *, config: Any) -> bool:
    """Return whether a layer's product of these weights is X W^T and dY W, with no cast and no weight gradient."""
    return (
        all(weight.dtype == input_.dtype and not weight.requires_grad for weight in weights)
        and not gemm.autocast_is_on(input_)
        and not dgrad_in_fp32(config)
    )


def dgrad_sum_in_fp32(config: Any) -> bool:
    """Return whether ``config`` or the environment asks for dX to be summed over ranks in fp32."""
    return getattr(config, "allreduce_dgrad_in_fp32", False) or environment.switch(environment.DGRAD_ALLREDUCE_FP32)


def enter_region(input_: torch.Tensor, *, sequence_parallel: bool, config: Any, group: Group) -> torch.Tensor:
    """Return the input [s, b, h] that every rank of ``group`` multiplies; its gradient is summed over them, once.

    Under sequence parallelism: all-gather forward, reduce-scatter backward; else nothing forward, all-reduce backward.
    """
    in_fp32 = dgrad_sum_in_fp32(config)  # read on one rank too, where a product does not, so that a bad switch is named
    if group is None:  # one rank, also where other groups stand
        return input_
    if sequence_parallel:
        return gather_from_sequence_parallel_region(input_, group=group, reduce_in_fp32=in_fp32)
    return copy_to_tensor_model_parallel_region(input_, group, reduce_in_fp32=in_fp32)


def frozen_or_trainable_linear(
    input_: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, config: Any, **options: Any
) -> torch.Tensor:
    """Take the frozen product if ``weight`` is frozen now, else the trainable one; see ``functional``."""
    linear = linear_with_grad_accumulation_and_async_allreduce if weight.requires_grad else linear_with_frozen_weight
    return linear(input_, weight, bias, **(_product_options(config) | options))


class Deferral(NamedTuple):
    """Where a head puts off its weight gradient to, for Megatron's ``drain_embedding_wgrad_compute``; or nowhere."""

    inputs: list[torch.Tensor] | None = None
    grad_outputs: list[torch.Tensor] | None = None
    limit: int | None = None

    def keep(self, input_: torch.Tensor) -> None:
        """Keep an input, whose dY the backward keeps; as many as the limit says, where 0 is no limit."""
        if self.inputs is not None and (not self.limit or len(self.inputs) < self.limit):
            self.inputs.append(input_)


_NOWHERE = Deferral()


def deferral(layer: Any, weight: torch.Tensor) -> Deferral:
    """Return where ``layer``, a column-parallel one of ours or Megatron's, puts off the gradient of ``weight`` to."""
    # Only the head gets a buffer, and a frozen one has nothing to put off.
    if not layer.config.defer_embedding_wgrad_compute or layer.embedding_activation_buffer is None:
        return _NOWHERE
    if not weight.requires_grad:
        return _NOWHERE
    return Deferral(layer.embedding_activation_buffer, layer.grad_output_buffer, layer.config.wgrad_deferral_limit)


def split_linear(
    input_: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor] = (),
    *,
    config: Any,
    **options: Any,
) -> torch.Tensor:
    """Return the one product of this rank's parts [..., sum O_i]; see ``functional.linear_with_split_parameters``."""
    return linear_with_split_parameters(input_, weights, biases, **(_product_options(config) | options))


def _product_options(config: Any) -> dict[str, Any]:
    """Return what ``config`` asks of each product; the functions themselves look at the environment's switches."""
    return {
        "gradient_accumulation_fusion": config.gradient_accumulation_fusion,
        # Megatron's configs, which are taken in place of ours, do not have these fields.
        "dgrad_in_fp32": getattr(config, "dgrad_in_fp32", False),
        "allreduce_dgrad_in_fp32": getattr(config, "allreduce_dgrad_in_fp32", False),
        "allreduce_dgrad_pieces": getattr(config, "allreduce_dgrad_pieces", 1),
    }


def is_watched(module: torch.nn.Module) -> bool:
    """Return whether a hook sees each call of ``module``, so that it must be called and not be computed with others."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, name) or getattr(torch_module, f"_global{name}") for name in names)


def drop_extra_state(_: torch.nn.Module, state_dict: dict[str, Any], prefix: str, *__: Any) -> None:
    """Take ``_extra_state``, which Transformer Engine and Megatron layers save, out of a state dict before it loads."""
    state_dict.pop(f"{prefix}_extra_state", None)
