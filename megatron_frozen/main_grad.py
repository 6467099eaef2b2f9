"""The only place that knows the attributes by which a wrapper asks for weight gradients in a buffer of its own."""

from __future__ import annotations

import torch

from megatron_frozen.errors import ConfigError
from megatron_frozen.gemm.wgrad_into import wgrad_into


def deliver_weight_gradient(
    weight: torch.nn.Parameter, grad_output: torch.Tensor, total_input: torch.Tensor
) -> torch.Tensor | None:
    """Accumulate dY^T X into ``weight.main_grad`` and return what backward must return for the weight.

    weight: the Parameter object itself [O, I] (a saved copy has no attributes); grad_output [..., O]; total_input
    [..., I]. Returns None where no wrapper looks; where ``grad_added_to_main_grad`` exists (Megatron's
    DistributedDataParallel) it is set True and a dummy of the weight's shape is returned, which must be zeros if
    ``zero_out_wgrad`` is set. No collectives.

    Raises ConfigError, before anything is written, where the weight has no buffer.
    """
    buffer = getattr(weight, "main_grad", None)
    if buffer is None:
        raise ConfigError(
            f"gradient_accumulation_fusion is on but a trainable weight of shape {list(weight.shape)} has no "
            f"main_grad; wrap the model so that each weight has a buffer, or turn the option off"
        )
    if hasattr(weight, "__fsdp_param__"):
        raise ConfigError(
            "gradient_accumulation_fusion is on under Megatron-FSDP, which this version does not write for; "
            "turn gradient_accumulation_fusion off"
        )
    wgrad_into(buffer, grad_output, total_input, accumulate=True)
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True  # pyright: ignore[reportAttributeAccessIssue]
    make = torch.zeros if getattr(weight, "zero_out_wgrad", False) else torch.empty
    return make(weight.shape, dtype=grad_output.dtype, device=grad_output.device)
