"""The one entry into the tensor-parallel region that several column-parallel layers with a common input share.

Each of Megatron's column layers reduces its own input gradient. Where three layers read the same input that is three
all-reduces of equal size; entering once, with the layers' own reduction off (``disable_grad_reduce``), makes it one.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from megatron_frozen.comm import Group
from megatron_frozen.layers import ModelParallelConfig
from megatron_frozen.layers.parts import enter_region


def column_config(parallel: ModelParallelConfig) -> ModelParallelConfig:
    """Return the config for column layers behind `enter_tensor_parallel`: they get the whole sequence."""
    return dataclasses.replace(parallel, sequence_parallel=False)


def enter_tensor_parallel(hidden: Tensor, *, parallel: ModelParallelConfig, group: Group) -> Tensor:
    """Return ``hidden`` as the whole sequence [s, b, h] on every rank; collectives: see ``enter_region``."""
    return enter_region(hidden, sequence_parallel=parallel.sequence_parallel, config=parallel, group=group)
