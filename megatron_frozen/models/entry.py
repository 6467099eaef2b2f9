"""The one entry into the tensor-parallel region that several column-parallel layers with a common input share.

Each of Megatron's column layers reduces its own input gradient. Where three layers read the same input that is three
all-reduces of equal size; entering once, with the layers' own reduction off (``disable_grad_reduce``), makes it one.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from megatron_frozen import environment
from megatron_frozen.comm import Group, copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron_frozen.layers import ModelParallelConfig


def column_config(parallel: ModelParallelConfig) -> ModelParallelConfig:
    """Return the config for column layers behind `enter_tensor_parallel`: they get the whole sequence."""
    return dataclasses.replace(parallel, sequence_parallel=False)


def enter_tensor_parallel(hidden: Tensor, *, parallel: ModelParallelConfig, group: Group) -> Tensor:
    """Return ``hidden`` as the whole sequence [s, b, h] on every rank, for layers that each give a part of the output.

    Under sequence parallelism: all-gather forward, reduce-scatter backward; else nothing forward, all-reduce backward.
    """
    in_fp32 = parallel.allreduce_dgrad_in_fp32 or environment.switch(environment.DGRAD_ALLREDUCE_FP32)
    if parallel.sequence_parallel:
        return gather_from_sequence_parallel_region(hidden, group=group, reduce_in_fp32=in_fp32)
    return copy_to_tensor_model_parallel_region(hidden, group, reduce_in_fp32=in_fp32)
