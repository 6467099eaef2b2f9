"""The linear layer whose output features are cut over tensor-parallel ranks."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from megatron_frozen.comm import gather_from_tensor_model_parallel_region
from megatron_frozen.comm.groups import Group, group_size
from megatron_frozen.errors import ConfigError, LayoutError
from megatron_frozen.layers.parts import (
    deferral,
    drop_extra_state,
    enter_region,
    frozen_or_trainable_linear,
    layer_group,
    new_bias,
    new_weight,
)
from megatron_frozen.layers.sharded_state import SavesShards
from megatron_frozen.layers.split_parameters import (
    ParametersSplit,
    add_parts,
    biases_of,
    described_parts,
    in_order_of_parts,
    joined_bias,
    multiply_parts,
    part_sizes,
    repack_parts_,
)
from megatron_frozen.main_grad import name_parameters
from megatron_frozen.params import set_tensor_model_parallel_attributes
from megatron_frozen.params.shards import InitMethod
from megatron_frozen.partition import divide


class ColumnParallelLinear(SavesShards):
    """Y = X W^T + b with W cut along its output features: each rank computes its slice of Y.

    weight: [output_size / ranks, input_size]; bias: [output_size / ranks]. Forward takes X [s, b, input_size] (with
    sequence parallelism the shard [s / ranks, b, input_size]) and returns ``(output, bias)``: output [s, b,
    output_size / ranks], or [s, b, output_size] if gathered; bias is the parameter with ``skip_bias_add``, else None.
    A frozen weight takes the frozen product, decided at each call. ``output_dtype``, wider than the operands', is the
    dtype of the output: fp32 logits of a bf16 head, for one, with no fp32 copy of either operand.

    Collectives: backward, an all-reduce of dX, or with sequence parallelism an all-gather of X forward and a
    reduce-scatter of dX backward, where a trainable weight gathers X again; with ``gather_output`` an all-gather of Y.
    ``disable_grad_reduce`` leaves the all-reduce to the caller; an expert layer under tensor or expert parallelism
    (``explicit_expert_comm``) communicates nothing itself.

    Arguments, attributes and returns are those of ``megatron.core.tensor_parallel.ColumnParallelLinear``. The full
    weight is the same at any number of ranks that enter with one CPU random state. ``parameters_split``, ours, keeps
    the weight and the bias as named parts, as ``Linear`` does; ``weight`` and ``bias`` are None then, a rank's output
    is its slice of each part in order, and a gathered one has the parts in order.

    Raises ConfigError where output_size or a part does not divide by the ranks and for options that exclude each
    other, LayoutError for a weight of another shape.
    """

    weight: torch.nn.Parameter | None
    bias: torch.nn.Parameter | None

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
        parameters_split: ParametersSplit = None,
    ) -> None:
        """Create the layer; tp_comm_buffer_name is taken and not used, name is what messages call the weight by."""
        super().__init__()
        self.input_size, self.output_size = input_size, output_size
        self.gather_output, self.skip_bias_add = gather_output, skip_bias_add
        self.embedding_activation_buffer, self.grad_output_buffer = embedding_activation_buffer, grad_output_buffer
        self.is_expert, self.expert_parallel = is_expert, config.expert_model_parallel_size > 1
        self.config, self.disable_grad_reduce = config, disable_grad_reduce
        self.output_dtype = output_dtype
        self.gradient_accumulation_fusion = config.gradient_accumulation_fusion
        self.tp_group = layer_group(tp_group, pg_collection)
        world_size = group_size(self.tp_group)
        self.explicit_expert_comm = is_expert and (world_size > 1 or self.expert_parallel)
        self.output_size_per_partition = divide(output_size, world_size, what="output_size")
        self.sequence_parallel = config.sequence_parallel and world_size > 1
        if config.sequence_parallel and world_size == 1:
            warnings.warn("sequence_parallel is on with one tensor-parallel rank; it is turned off", stacklevel=2)
        self.allreduce_dgrad = world_size > 1 and not self.sequence_parallel and not disable_grad_reduce
        self.weight, self.bias = None, None
        self._add_parameters(
            parameters_split,
            bias=bias,
            init_method=init_method,
            stride=stride,
            keeps_master=keep_master_weight_for_test,
            allocates=not skip_weight_param_allocation,
        )
        for param in self.parameters():
            param.allreduce = not (is_expert and self.expert_parallel)  # pyright: ignore[reportAttributeAccessIssue]
        if name is not None:
            name_parameters(self, prefix=name)
        self.register_load_state_dict_pre_hook(drop_extra_state)

    def _add_parameters(
        self,
        parameters_split: ParametersSplit,
        *,
        bias: bool,
        init_method: InitMethod,
        stride: int,
        keeps_master: bool,
        allocates: bool,
    ) -> None:
        if parameters_split is not None:
            if stride != 1 or keeps_master or not allocates or self.embedding_activation_buffer is not None:
                raise ConfigError(
                    "parameters_split is given beside a stride, keep_master_weight_for_test, "
                    "skip_weight_param_allocation or embedding_activation_buffer, which are about one whole weight; "
                    "leave those at their defaults"
                )
            sizes = part_sizes(parameters_split, out_features=self.output_size)
            add_parts(self, sizes, in_features=self.input_size, bias=bias, cut_dim=0, init_method=init_method)
            return
        self.weight_names, self.bias_names = ["weight"], ["bias"]
        self.parameter_split_sizes = [self.output_size_per_partition]
        if allocates:
            self.weight, master = new_weight(
                (self.output_size_per_partition, self.input_size),
                full_shape=(self.output_size, self.input_size),
                partition_dim=0,
                config=self.config,
                init_method=init_method,
                group=self.tp_group,
                stride=stride,
            )
            self.master_weight = master if keeps_master else None
        if bias:
            self.bias = new_bias(self.output_size_per_partition, config=self.config)
            set_tensor_model_parallel_attributes(self.bias, is_parallel=True, dim=0, stride=stride)

    def forward(
        self,
        input_: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,  # noqa: FBT001 - Megatron's signature
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return ``(output, bias)``; ``weight`` takes the place of the layer's own, which a tied head does not have."""
        communicates = not self.explicit_expert_comm
        options: dict[str, Any] = {
            "output_dtype": self.output_dtype,
            "allreduce_dgrad": self.allreduce_dgrad and communicates,
            "sequence_parallel": self.sequence_parallel and communicates,
        }
        if self._is_split(weight):
            output_parallel = multiply_parts(self, input_, with_bias=not self.skip_bias_add, **options)
            return self._leave(output_parallel, gather=runtime_gather_output)
        weight = self._chosen_weight(weight)
        put_off = deferral(self, weight)
        output_parallel = frozen_or_trainable_linear(
            input_,
            weight,
            None if self.skip_bias_add else self.bias,
            config=self.config,
            grad_output_buffer=put_off.grad_outputs,
            wgrad_deferral_limit=put_off.limit,
            tp_group=self.tp_group,
            **options,
        )
        put_off.keep(input_)
        return self._leave(output_parallel, gather=runtime_gather_output)

    def enter_parallel(self, input_: torch.Tensor) -> torch.Tensor:
        """Return the input that every rank multiplies, [s, b, input_size]; its gradient is summed over ranks, once.

        ``leave_parallel(multiply(enter_parallel(x)))`` is ``forward(x)``; an adapter adds its product between the
        steps, so that its input gradient shares the one all-reduce or reduce-scatter."""
        if self.explicit_expert_comm or not (self.sequence_parallel or self.allreduce_dgrad):
            return input_
        return enter_region(input_, sequence_parallel=self.sequence_parallel, config=self.config, group=self.tp_group)

    def multiply(self, input_parallel: torch.Tensor) -> torch.Tensor:
        """Return X W^T [s, b, output_size / ranks]: no bias, no communication in either direction."""
        options: dict[str, Any] = {
            "output_dtype": self.output_dtype,
            "allreduce_dgrad": False,
            "sequence_parallel": False,
        }
        if self._is_split(None):
            return multiply_parts(self, input_parallel, with_bias=False, **options)
        return frozen_or_trainable_linear(
            input_parallel, self._chosen_weight(None), None, config=self.config, **options
        )

    def leave_parallel(
        self, output_parallel: torch.Tensor, *, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Add the bias, gather if asked, and return ``(output, bias)`` as forward does."""
        bias = None if self.skip_bias_add else joined_bias(self)
        if bias is not None:
            output_parallel = output_parallel + bias.to(output_parallel.dtype)  # as F.linear under autocast
        return self._leave(output_parallel, gather=runtime_gather_output)

    def _leave(self, output_parallel: torch.Tensor, *, gather: bool | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        gather = self.gather_output if gather is None else gather
        if gather and self.tp_group is not None:
            gathered = gather_from_tensor_model_parallel_region(output_parallel, self.tp_group)
            output_parallel = in_order_of_parts(gathered, self)
        return output_parallel, joined_bias(self) if self.skip_bias_add else None

    def _is_split(self, given: torch.Tensor | None) -> bool:
        is_split = self.weight_names != ["weight"]
        if is_split and given is not None:
            raise ConfigError(
                "this ColumnParallelLinear was built with parameters_split and got a weight in forward; "
                "build it without a split to give it one"
            )
        return is_split

    def _chosen_weight(self, given: torch.Tensor | None) -> torch.Tensor:
        weight = self.weight if given is None else given
        if weight is None:
            raise ConfigError(
                "this ColumnParallelLinear was built with skip_weight_param_allocation and got no weight; "
                "pass weight= to forward"
            )
        expected = (self.output_size_per_partition, self.input_size)
        if tuple(weight.shape) != expected:
            raise LayoutError(
                f"the weight given to ColumnParallelLinear has shape {list(weight.shape)}; "
                f"give this rank's part, of shape {list(expected)}"
            )
        return weight

    def repack_(self) -> bool:
        """Make the parts adjoin in memory again, in place; return whether they do. See ``storage.repack_``."""
        return self.weight is not None or repack_parts_(self)

    def backward_dw(self) -> None:
        """Do nothing: weight gradients are computed in backward. Megatron's schedules call it."""

    def extra_repr(self) -> str:
        """Return the sizes for ``repr``."""
        return (
            f"in_features={self.input_size}, out_features={self.output_size}, bias={bool(biases_of(self))}, "
            f"TP={group_size(self.tp_group)}{described_parts(self)}"
        )
