"""Megatron-core's column and row parallel linears with the products of this package.

``FrozenColumnParallelLinear`` and ``FrozenRowParallelLinear`` are subclasses of megatron-core's classes, so that every
``isinstance`` test of Megatron, its fp8 code and its LoRA wrappers holds. ``frozen_class`` makes them when they are
first asked for, which imports megatron-core; what they do stands in the abstract classes below. Parameters, how they
start, state dicts and checkpoints are upstream's own.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from megatron_frozen.comm import (
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from megatron_frozen.comm.groups import Group, group_size
from megatron_frozen.errors import ConfigError, LayoutError
from megatron_frozen.integrations.megatron_core import upstream
from megatron_frozen.integrations.megatron_core.steps import Steps
from megatron_frozen.layers.parts import deferral, enter_region
from megatron_frozen.params.shards import InitMethod


class ColumnSteps(Steps):
    """Y = X W^T + b with W cut along its output features, for a subclass of megatron-core's ColumnParallelLinear.

    The arguments are those of megatron-core 0.16.1 and, last, those that its main branch adds. ``output_dtype``, wider
    than the operands', is the dtype of the output. ``explicit_expert_comm``, ``disable_grad_reduce``,
    ``sequence_parallel`` and whether the weight is frozen are read at each call. gradient_accumulation_fusion needs no
    apex.

    Collectives: as ``megatron_frozen.ColumnParallelLinear``.
    """

    partition_dim = 0
    input_size: int
    output_size_per_partition: int
    allreduce_dgrad: bool
    disable_grad_reduce: bool
    gather_output: bool
    embedding_activation_buffer: list[torch.Tensor] | None
    grad_output_buffer: list[torch.Tensor] | None

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: InitMethod,
        bias: bool = True,
        gather_output: bool = False,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        skip_bias_add: bool = False,
        skip_weight_param_allocation: bool = False,
        embedding_activation_buffer: list[torch.Tensor] | None = None,
        grad_output_buffer: list[torch.Tensor] | None = None,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,
        disable_grad_reduce: bool = False,
        tp_group: Group = None,
        name: str | None = None,
        output_dtype: torch.dtype | None = None,
        pg_collection: Any = None,
    ) -> None:
        """Create the layer as upstream does, with the same random numbers."""
        self.build(
            upstream.core("tensor_parallel.layers").ColumnParallelLinear,
            (input_size, output_size),
            config=config,
            init_method=init_method,
            bias=bias,
            gather_output=gather_output,
            stride=stride,
            keep_master_weight_for_test=keep_master_weight_for_test,
            skip_bias_add=skip_bias_add,
            skip_weight_param_allocation=skip_weight_param_allocation,
            embedding_activation_buffer=embedding_activation_buffer,
            grad_output_buffer=grad_output_buffer,
            is_expert=is_expert,
            tp_comm_buffer_name=tp_comm_buffer_name,
            disable_grad_reduce=disable_grad_reduce,
            tp_group=tp_group,
            name=name,
            pg_collection=pg_collection,
        )
        self.output_dtype = output_dtype

    @property
    def _sums_dgrad(self) -> bool:
        return self.allreduce_dgrad and not (self.disable_grad_reduce or self.explicit_expert_comm)

    @property
    def _gathers(self) -> bool:
        return self.sequence_parallel and not self.explicit_expert_comm

    def forward(
        self,
        input_: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,  # noqa: FBT001 - Megatron's signature
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return ``(output, bias)``; ``weight`` takes the place of the layer's own, which a tied head does not have."""
        if self.adapter is not None:
            return self._leave(self._adapted(input_), gather=runtime_gather_output)
        weight = self._chosen_weight(weight)
        put_off = deferral(self, weight)
        output_parallel = self.product(
            input_,
            weight,
            None if self.skip_bias_add else self.bias,
            sums_dgrad=self._sums_dgrad,
            gathers=self._gathers,
            grad_output_buffer=put_off.grad_outputs,
            wgrad_deferral_limit=put_off.limit,
        )
        put_off.keep(input_)
        return self._leave(output_parallel, gather=runtime_gather_output)

    def enter_parallel(self, input_: torch.Tensor) -> torch.Tensor:
        """Return the input that every rank multiplies, [s, b, input_size]; its gradient is summed over ranks, once."""
        if not (self._gathers or self._sums_dgrad):
            return input_
        return enter_region(input_, sequence_parallel=self._gathers, config=self.config, group=self.tp_group)

    def _adapted(self, input_: torch.Tensor) -> torch.Tensor:
        assert self.adapter is not None
        output_parallel = self.adapter.multiply(self, self.enter_parallel(input_))
        if self.bias is None or self.skip_bias_add:
            return output_parallel
        return output_parallel + self.bias.to(output_parallel.dtype)  # as F.linear under autocast

    def multiply(self, input_parallel: torch.Tensor) -> torch.Tensor:
        """Return X W^T [s, b, output_size / ranks]: no bias, no communication in either direction."""
        return self.product(input_parallel, self._chosen_weight(None), None)

    def _leave(self, output_parallel: torch.Tensor, *, gather: bool | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        if (self.gather_output if gather is None else gather) and group_size(self.tp_group) > 1:
            output_parallel = gather_from_tensor_model_parallel_region(output_parallel, self.tp_group)
        return output_parallel, self.bias if self.skip_bias_add else None

    def _chosen_weight(self, given: torch.Tensor | None) -> torch.Tensor:
        weight = self.weight if given is None else given
        if weight is None:
            raise ConfigError(
                "this FrozenColumnParallelLinear has no weight of its own (skip_weight_param_allocation) and was given "
                "none; pass weight= to forward"
            )
        expected = (self.output_size_per_partition, self.input_size)
        if tuple(weight.shape) != expected:
            raise LayoutError(
                f"FrozenColumnParallelLinear was handed a weight of shape {list(weight.shape)}; "
                f"give this rank's part, of shape {list(expected)}"
            )
        return weight


class RowSteps(Steps):
    """Y = X W^T + b with W cut along its input features, for a subclass of megatron-core's RowParallelLinear.

    The arguments are those of megatron-core 0.16.1 and, last, those that its main branch adds. Collectives: as
    ``megatron_frozen.RowParallelLinear``.
    """

    partition_dim = 1
    input_is_parallel: bool

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: InitMethod,
        bias: bool,
        input_is_parallel: bool,
        skip_bias_add: bool,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,
        tp_group: Group = None,
        name: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        """Create the layer as upstream does, with the same random numbers."""
        self.build(
            upstream.core("tensor_parallel.layers").RowParallelLinear,
            (input_size, output_size),
            config=config,
            init_method=init_method,
            bias=bias,
            input_is_parallel=input_is_parallel,
            skip_bias_add=skip_bias_add,
            stride=stride,
            keep_master_weight_for_test=keep_master_weight_for_test,
            is_expert=is_expert,
            tp_comm_buffer_name=tp_comm_buffer_name,
            tp_group=tp_group,
            name=name,
            pg_collection=pg_collection,
        )

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return ``(output, bias)``; bias is the parameter with ``skip_bias_add``, else None."""
        input_parallel = self.enter_parallel(input_)
        if self.adapter is not None:
            return self.leave_parallel(self.adapter.multiply(self, input_parallel))
        return self.leave_parallel(self.multiply(input_parallel))

    def enter_parallel(self, input_: torch.Tensor) -> torch.Tensor:
        """Return this rank's features of the input, [s, b, input_size / ranks]."""
        if self.input_is_parallel or group_size(self.tp_group) == 1:
            return input_
        return scatter_to_tensor_model_parallel_region(input_, self.tp_group)

    def multiply(self, input_parallel: torch.Tensor) -> torch.Tensor:
        """Return this rank's partial sum of X W^T, [s, b, output_size]: no bias, no communication."""
        assert self.weight is not None
        return self.product(input_parallel, self.weight, None)

    def leave_parallel(self, output_parallel: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sum the partial outputs over ranks, add the bias, and return ``(output, bias)`` as forward does."""
        if self.explicit_expert_comm:
            if self.bias is not None and not self.skip_bias_add:
                raise ConfigError(
                    "this FrozenRowParallelLinear leaves the sum over ranks to its caller (explicit_expert_comm), and "
                    "each rank would add the whole bias; set skip_bias_add"
                )
            return output_parallel, self.bias
        output = output_parallel
        if group_size(self.tp_group) > 1:
            leave = (
                reduce_scatter_to_sequence_parallel_region
                if self.sequence_parallel
                else reduce_from_tensor_model_parallel_region
            )
            output = leave(output_parallel, self.tp_group)
        if self.skip_bias_add:
            return output, self.bias
        return output if self.bias is None else output + self.bias.to(output.dtype), None  # as F.linear under autocast


@functools.cache
def frozen_class(base: type) -> type:
    """Return the subclass of megatron-core's ``base`` that multiplies with our products, always the same one.

    base: ColumnParallelLinear, RowParallelLinear, or a subclass of one of them whose forward calls theirs. Imports
    megatron-core.

    Raises ConfigError for any other class.
    """
    layers = upstream.core("tensor_parallel.layers")
    name = f"Frozen{base.__name__}"
    for steps, plain in ((ColumnSteps, layers.ColumnParallelLinear), (RowSteps, layers.RowParallelLinear)):
        if issubclass(base, steps):
            return base
        if base is plain:
            return type(name, (steps, base), {"__doc__": steps.__doc__, "__module__": __package__})
        if issubclass(base, plain):
            return type(name, (base, frozen_class(plain)), {"__doc__": base.__doc__, "__module__": __package__})
    raise ConfigError(
        f"{base.__module__}.{base.__name__} is no ColumnParallelLinear or RowParallelLinear of megatron-core; "
        f"build the model from the local layers"
    )


def use_frozen_linear(linear: Any) -> None:
    """Make a built linear of megatron-core ours, in place: the object stays and only its class changes, as
    ``fully_shard`` changes a module's, so that parameters, buffers, hooks and references stay too.

    Raises ConfigError where it is none of megatron-core's local linears.
    """
    if not isinstance(linear, Steps):
        linear.__class__ = frozen_class(type(linear))
        linear.finish()
