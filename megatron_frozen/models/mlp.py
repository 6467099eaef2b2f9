"""The gated MLP: down(silu(gate(x)) * up(x)), its inner width cut over the tensor-parallel ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_frozen.autograd.once import once_differentiable
from megatron_frozen.comm import Group
from megatron_frozen.kernels import passes
from megatron_frozen.layers import ColumnParallelLinear, ModelParallelConfig, RowParallelLinear
from megatron_frozen.layers.joint_columns import HoldsJointColumns
from megatron_frozen.models.config import DecoderConfig
from megatron_frozen.models.entry import column_config, enter_tensor_parallel


class MLP(HoldsJointColumns):
    """SwiGLU. Input and output are [s, b, h] ([s / ranks, b, h] under sequence parallelism), as in Attention.

    Gate and up share one product where they can (see ``layers.joint_columns``).
    """

    joint_names = ("gate_proj", "up_proj")

    def __init__(self, config: DecoderConfig, *, parallel: ModelParallelConfig, tp_group: Group) -> None:
        super().__init__()
        self.parallel, self.tp_group = parallel, tp_group
        init_method = partial(nn.init.normal_, std=config.initializer_range)
        column = partial(
            ColumnParallelLinear,
            config.hidden_size,
            config.intermediate_size,
            config=column_config(parallel),
            init_method=init_method,
            bias=config.mlp_bias,
            disable_grad_reduce=True,  # enter_tensor_parallel does it once for both
            tp_group=tp_group,
        )
        self.gate_proj = column()
        self.up_proj = column()
        self.make_adjacent()
        self.down_proj = RowParallelLinear(
            config.intermediate_size,
            config.hidden_size,
            config=parallel,
            init_method=init_method,
            bias=config.mlp_bias,
            input_is_parallel=True,
            skip_bias_add=False,
            tp_group=tp_group,
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the MLP's output for ``hidden``; see the class for shapes."""
        entered = enter_tensor_parallel(hidden, parallel=self.parallel, group=self.tp_group)
        joint = self.multiply_jointly(entered)
        if joint is not None and not torch.compiler.is_compiling():
            return self.down_proj(_GateJoint.apply(joint))[0]
        if joint is not None:
            gate, up = joint.chunk(2, dim=-1)
        else:
            gate, up = self.gate_proj(entered)[0], self.up_proj(entered)[0]
        return self.down_proj(F.silu(gate) * up)[0]


class _GateJoint(torch.autograd.Function):
    """silu(gate) * up of the one product that made both.

    Shapes: joint [..., 2 f], gate first; the result [..., f].
    Forward: silu(gate), times up in place.
    Dgrad: both halves written into the columns of one gradient of joint's shape and memory order.
    Wgrad: none.
    Dbias: none.
    Collectives: none.
    Saved: joint; silu(gate) is computed again.
    Why: the gradient of the joint product is read by one product, and concatenating its halves would copy them.
    """

    @staticmethod
    def forward(ctx: Any, joint: Tensor) -> Tensor:
        ctx.save_for_backward(joint)
        if passes.takes(joint):
            return passes.gate(joint)
        gate, up = joint.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable  # it writes by out=, which autograd refuses where a graph is asked for
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (joint,) = ctx.saved_tensors
        if passes.takes(joint, grads[0]):
            return passes.gate_backward(grads[0], joint)
        gate, up = joint.chunk(2, dim=-1)
        grad = torch.empty_like(joint)
        grad_gate, grad_up = grad.chunk(2, dim=-1)
        torch.mul(F.silu(gate), grads[0], out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grads[0] * up, gate, grad_input=grad_gate)
        return grad
