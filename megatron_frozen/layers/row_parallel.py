"""The linear layer whose input features are cut over tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch

from megatron_frozen.comm import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from megatron_frozen.comm.groups import Group, group_size
from megatron_frozen.errors import ConfigError
from megatron_frozen.layers.parts import (
    drop_extra_state,
    frozen_or_trainable_linear,
    layer_group,
    new_bias,
    new_weight,
)
from megatron_frozen.layers.sharded_state import SavesShards
from megatron_frozen.main_grad import name_parameters
from megatron_frozen.params import mark_partial_grad
from megatron_frozen.params.shards import InitMethod
from megatron_frozen.partition import divide


class RowParallelLinear(SavesShards):
    """Y = X W^T + b with W cut along its input features: each rank holds a partial sum of Y.

    weight: [output_size, input_size / ranks]; bias: [output_size], full on each rank and added after the sum. Forward
    takes X [s, b, input_size / ranks] (or [s, b, input_size], sliced here, without ``input_is_parallel``) and returns
    ``(output, bias)``: output [s, b, output_size], with sequence parallelism its shard [s / ranks, b, output_size];
    bias is the parameter with ``skip_bias_add``, else None. A frozen weight takes the frozen product, decided at each
    call.

    Collectives: forward, an all-reduce of Y; with sequence parallelism its reduce-scatter, and an all-gather of dY
    backward; without ``input_is_parallel`` an all-gather of dX. Under sequence parallelism each rank sees part of the
    tokens, so the bias's gradient is marked for ``sum_partial_grads``. An expert layer under tensor or expert
    parallelism (``explicit_expert_comm``) returns its partial sum and communicates nothing itself.

    Arguments, attributes and returns are those of ``megatron.core.tensor_parallel.RowParallelLinear``. The full
    weight is the same at any number of ranks that enter with one CPU random state.

    Raises ConfigError where input_size does not divide by the ranks or options exclude each other.
    """

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None

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
        """Create the layer; tp_comm_buffer_name is taken and not used, name is what messages call the weight by."""
        super().__init__()
        if config.sequence_parallel and not input_is_parallel:
            raise ConfigError(
                "RowParallelLinear got sequence_parallel without input_is_parallel, but its input is a shard then; "
                "set input_is_parallel"
            )
        self.input_size, self.output_size = input_size, output_size
        self.input_is_parallel, self.skip_bias_add = input_is_parallel, skip_bias_add
        self.is_expert, self.expert_parallel = is_expert, config.expert_model_parallel_size > 1
        self.config, self.gradient_accumulation_fusion = config, config.gradient_accumulation_fusion
        self.tp_group = layer_group(tp_group, pg_collection)
        world_size = group_size(self.tp_group)
        self.explicit_expert_comm = is_expert and (world_size > 1 or self.expert_parallel)
        self.sequence_parallel = config.sequence_parallel and world_size > 1
        self.input_size_per_partition = divide(input_size, world_size, what="input_size")
        self.weight, master = new_weight(
            (output_size, self.input_size_per_partition),
            full_shape=(output_size, input_size),
            partition_dim=1,
            config=config,
            init_method=init_method,
            group=self.tp_group,
            stride=stride,
        )
        self.master_weight = master if keep_master_weight_for_test else None
        self.bias = new_bias(output_size, config=config) if bias else None
        if self.bias is not None and self.sequence_parallel:
            mark_partial_grad(self.bias)
        for param in self.parameters():
            param.allreduce = not (is_expert and self.expert_parallel)  # pyright: ignore[reportAttributeAccessIssue]
        if name is not None:
            name_parameters(self, prefix=name)
        self.register_load_state_dict_pre_hook(drop_extra_state)

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return ``(output, bias)``; see the class."""
        return self.leave_parallel(self.multiply(self.enter_parallel(input_)))

    def enter_parallel(self, input_: torch.Tensor) -> torch.Tensor:
        """Return this rank's features of the input, [s, b, input_size / ranks]."""
        if self.input_is_parallel or self.tp_group is None:
            return input_
        return scatter_to_tensor_model_parallel_region(input_, self.tp_group)

    def multiply(self, input_parallel: torch.Tensor) -> torch.Tensor:
        """Return this rank's partial sum of X W^T, [s, b, output_size]: no bias, no communication in either
        direction.

        An adapter adds its own partial sum here, so that it shares the one all-reduce or reduce-scatter that follows.
        """
        return frozen_or_trainable_linear(
            input_parallel, self.weight, None, config=self.config, allreduce_dgrad=False, sequence_parallel=False
        )

    def leave_parallel(self, output_parallel: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sum the partial outputs over ranks, add the bias, and return ``(output, bias)`` as forward does."""
        if self.explicit_expert_comm:
            if self.bias is not None and not self.skip_bias_add:
                raise ConfigError(
                    "an expert RowParallelLinear returns partial sums, to which each rank would add the whole bias; "
                    "set skip_bias_add"
                )
            return output_parallel, self.bias
        if self.tp_group is None:
            output = output_parallel
        elif self.sequence_parallel:
            output = reduce_scatter_to_sequence_parallel_region(output_parallel, self.tp_group)
        else:
            output = reduce_from_tensor_model_parallel_region(output_parallel, self.tp_group)
        if self.skip_bias_add:
            return output, self.bias
        return output if self.bias is None else output + self.bias.to(output.dtype), None  # as F.linear under autocast

    def backward_dw(self) -> None:
        """Do nothing: weight gradients are computed in backward. Megatron's schedules call it."""

    def extra_repr(self) -> str:
        """Return the sizes for ``repr``."""
        return (
            f"in_features={self.input_size}, out_features={self.output_size}, bias={self.bias is not None}, "
            f"TP={group_size(self.tp_group)}"
        )
