"""The shared entry into the tensor-parallel region: what it sends, and sums in fp32 where that is asked for."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from megatron_frozen.comm import get_tensor_model_parallel_group, initialize_model_parallel
from megatron_frozen.layers import ModelParallelConfig
from megatron_frozen.models.entry import enter_tensor_parallel
from megatron_frozen.testing import run_ranks

_SWITCH = "MEGATRON_TRUE_ON_POLICY_DGRAD_ALLREDUCE_FP32"


def _summed_gradient(rank: int, world_size: int, sequence_parallel: bool, where: str) -> Tensor:  # noqa: FBT001
    """The bf16 input gradient [3] where one rank holds 256 and the others 1, each element another rank."""
    initialize_model_parallel(world_size)
    if where == "environment":
        os.environ[_SWITCH] = "1"  # the pool restores the environment
    parallel = ModelParallelConfig(
        tensor_model_parallel_size=world_size,
        sequence_parallel=sequence_parallel,
        allreduce_dgrad_in_fp32=where == "config",
    )
    hidden = torch.zeros(1 if sequence_parallel else 3, 1, 3, dtype=torch.bfloat16, requires_grad=True)
    entered = enter_tensor_parallel(hidden, parallel=parallel, group=get_tensor_model_parallel_group())
    assert entered.shape == (3, 1, 3)
    entered.backward(torch.where(torch.arange(3) == rank, 256.0, 1.0).to(torch.bfloat16).expand(3, 1, 3))
    assert hidden.grad is not None
    return hidden.grad


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "tp and sp"])
def test_input_gradients_are_summed_in_fp32_if_asked(*, sequence_parallel: bool) -> None:
    """256 + 1 + 1 is 258 in fp32 and a number of bf16, where 256 + 1 is 256."""
    for where in ("config", "environment"):
        for gradient in run_ranks(3, _summed_gradient, sequence_parallel, where):
            assert gradient.eq(258).all()
    assert any(gradient.ne(258).any() for gradient in run_ranks(3, _summed_gradient, sequence_parallel, "nowhere"))
