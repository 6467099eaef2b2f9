"""The gated MLP: down(silu(gate(x)) * up(x)), its inner width cut over the tensor-parallel ranks."""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from megatron_frozen.comm import Group
from megatron_frozen.layers import ColumnParallelLinear, ModelParallelConfig, RowParallelLinear
from megatron_frozen.models.config import DecoderConfig
from megatron_frozen.models.entry import column_config, enter_tensor_parallel
from megatron_frozen.params import SharesGroups


class MLP(SharesGroups):
    """SwiGLU. Input and output are [s, b, h] ([s / ranks, b, h] under sequence parallelism), as in Attention."""

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
        return self.down_proj(F.silu(self.gate_proj(entered)[0]) * self.up_proj(entered)[0])[0]
