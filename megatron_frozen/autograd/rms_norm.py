"""RMSNorm as transformers computes it: statistics in fp32, one rounding to the input's dtype, then the weight.

Shape suffixes: [...] any leading dims, [h] the normalised dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_frozen.autograd.grad_dtype import kept_grad_dtype
from megatron_frozen.autograd.once import once_differentiable
from megatron_frozen.kernels import passes


class RMSNormFunction(torch.autograd.Function):
    """RMSNorm with statistics in fp32 (fp64 for fp64 input).

    Shapes: input [..., h]; weight [h]; result [..., h].
    Forward: weight * round(input / sqrt(mean(input^2) + eps)), round being the cast to the input's dtype.
    Dgrad: r (g - x r^2 mean(g x)), with g = weight * grad and r the inverse root, summed in fp32.
    Wgrad: the sum over leading dims of grad * x r, only where the weight trains, in ``weight.grad_dtype``.
    Dbias: none.
    Collectives: none.
    Saved: input, weight, and r [..., 1].
    Why: plain autograd keeps two fp32 copies of the input and its backward takes six times as long on a CPU.
    """

    @staticmethod
    def forward(ctx: Any, input_: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.weight_grad_dtype = kept_grad_dtype(weight)
        if passes.takes(input_, weight):
            output, inverse_rms = passes.rms_norm(input_, weight, eps=eps)
        else:
            wide = input_.to(_wide(input_.dtype))
            inverse_rms = (_dot(wide, wide) / input_.shape[-1] + eps).rsqrt_()
            output = (wide * inverse_rms).to(input_.dtype) * weight
        ctx.save_for_backward(input_, weight, inverse_rms)
        return output

    @staticmethod
    @once_differentiable  # the saved root has no graph of its own, so a second derivative would be wrong
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        input_, weight, inverse_rms = ctx.saved_tensors
        (grad_output,), grad_input, grad_weight = grads, None, None
        if ctx.needs_input_grad[0]:
            takes = passes.takes(input_, weight, grad_output)
            input_grad = passes.rms_norm_backward if takes else _input_grad
            grad_input = input_grad(grad_output, input_, weight, inverse_rms)
        if ctx.needs_input_grad[1]:
            normalised = (input_.to(inverse_rms.dtype) * inverse_rms).to(input_.dtype)
            leading = tuple(range(input_.dim() - 1))
            factor = grad_output.to(torch.promote_types(grad_output.dtype, ctx.weight_grad_dtype))
            grad_weight = (factor * normalised).sum(leading, dtype=inverse_rms.dtype).to(ctx.weight_grad_dtype)
        return grad_input, grad_weight, None


def _input_grad(grad_output: Tensor, input_: Tensor, weight: Tensor, inverse_rms: Tensor) -> Tensor:
    wide, scaled = input_.to(inverse_rms.dtype), (grad_output * weight).to(inverse_rms.dtype)
    pull = _dot(scaled, wide) * inverse_rms.pow(3) / -input_.shape[-1]
    return (scaled * inverse_rms).addcmul_(wide, pull).to(input_.dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _dot(left: Tensor, right: Tensor) -> Tensor:
    return (left * right).sum(dim=-1, keepdim=True)
