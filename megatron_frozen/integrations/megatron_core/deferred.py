"""The deferred weight gradient of the output layer, which pipeline parallelism computes after the last backward."""

from __future__ import annotations

from typing import Any

import torch

from megatron_frozen.comm import all_gather
from megatron_frozen.main_grad import deliver_weight_gradient


def drain_embedding_wgrad_compute(
    config: Any,
    embedding_activation_buffer: list[torch.Tensor],
    grad_output_buffer: list[torch.Tensor],
    weight: torch.Tensor,
    tp_group: Any,
) -> None:
    """Add dY^T X of each pair in the two lists to ``weight.main_grad`` by our backends, and empty the lists.

    Arguments are those of ``megatron.core.utils``' function of this name; each X is [s, b, I], or its shard under
    sequence parallelism, which is gathered over ``tp_group`` while the product before it runs.
    """
    assert len(embedding_activation_buffer) == len(grad_output_buffer)
    gathers = config.sequence_parallel and tp_group.size() > 1
    ahead: list[tuple[torch.Tensor, Any]] = []
    while grad_output_buffer:
        while embedding_activation_buffer and len(ahead) < 2:
            input_ = embedding_activation_buffer.pop(0)
            ahead.append(all_gather(input_, group=tp_group, async_op=True) if gathers else (input_, None))
        total_input, work = ahead.pop(0)
        if work is not None:
            work.wait()
        grad_output = grad_output_buffer.pop(0)
        if config.gradient_accumulation_fusion:  # upstream's, too, adds nothing without
            deliver_weight_gradient(weight, grad_output, total_input)
