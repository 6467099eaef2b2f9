"""What several functional tests say of results that every rank holds in full."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from megatron_frozen.comm import get_tensor_model_parallel_group
from megatron_frozen.comm.groups import group_size


def assert_equal_on_all_ranks(tensors: Mapping[str, torch.Tensor | None]) -> None:
    """Assert that each tensor has the same bits on all tensor-parallel ranks, or is None on this one."""
    group = get_tensor_model_parallel_group()
    for name, tensor in tensors.items():
        if tensor is None or group is None:
            continue
        copies = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(group_size(group))]
        dist.all_gather(copies, tensor.contiguous(), group=group)
        assert all(torch.equal(copy, tensor) for copy in copies), f"{name} differs between ranks"
