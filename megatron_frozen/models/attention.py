"""Grouped-query attention over this rank's heads: projections, rotary positions, output.

Shape suffixes: [s] sequence, [b] batch, [h] hidden, [n] query heads and [k] key and value heads of this rank, [d] head
dim.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from megatron_frozen.comm import Group, group_size
from megatron_frozen.layers import ColumnParallelLinear, ModelParallelConfig, RowParallelLinear
from megatron_frozen.layers.joint_columns import HoldsJointColumns
from megatron_frozen.layers.norm import RMSNorm
from megatron_frozen.models.attend import attend
from megatron_frozen.models.config import DecoderConfig
from megatron_frozen.models.documents import AttentionPlan
from megatron_frozen.models.entry import column_config, enter_tensor_parallel
from megatron_frozen.models.joint_heads import rotate_joint
from megatron_frozen.models.rope import RotaryTables, rotate


class Attention(HoldsJointColumns):
    """Causal self-attention with rotary positions; heads are cut over the tensor-parallel ranks.

    Input and output are [s, b, h] ([s / ranks, b, h] under sequence parallelism). Collectives: one
    all-reduce (or gather and reduce-scatter) forward, its mirror backward, which the three projections share. They
    share one product, too, where they can (see ``layers.joint_columns``).
    """

    joint_names = ("q_proj", "k_proj", "v_proj")

    def __init__(
        self, config: DecoderConfig, *, layer_index: int, parallel: ModelParallelConfig, tp_group: Group
    ) -> None:
        super().__init__()
        self.parallel, self.tp_group = parallel, tp_group
        self.head_dim = config.head_dim
        self.num_kv_heads = config.num_key_value_heads // group_size(tp_group)
        self.window = config.layer_windows[layer_index]
        column = partial(
            ColumnParallelLinear,
            config.hidden_size,
            config=column_config(parallel),
            init_method=partial(nn.init.normal_, std=config.initializer_range),
            bias=config.qkv_bias,
            disable_grad_reduce=True,  # enter_tensor_parallel does it once for the three
            tp_group=tp_group,
        )
        self.q_proj = column(config.num_attention_heads * config.head_dim)
        self.k_proj = column(config.num_key_value_heads * config.head_dim)
        self.v_proj = column(config.num_key_value_heads * config.head_dim)
        self.make_adjacent()
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * config.head_dim,
            config.hidden_size,
            config=parallel,
            init_method=partial(nn.init.normal_, std=config.initializer_range),
            bias=config.output_bias,
            input_is_parallel=True,
            skip_bias_add=False,
            tp_group=tp_group,
        )
        self.q_norm = self._head_norm(config)
        self.k_norm = self._head_norm(config)

    def _head_norm(self, config: DecoderConfig) -> RMSNorm | None:
        if not config.qk_norm:
            return None
        return RMSNorm(
            config.head_dim, eps=config.rms_norm_eps, parallel=self.parallel, over_shards=group_size(self.tp_group) > 1
        )

    def forward(self, hidden: Tensor, tables: RotaryTables, plan: AttentionPlan) -> Tensor:
        """Attend within each document of ``plan``; see the class for shapes."""
        entered = enter_tensor_parallel(hidden, parallel=self.parallel, group=self.tp_group)
        query, key, value = self._heads(entered, tables)
        return self.o_proj(attend(query, key, value, plan=plan, window=self.window))[0]

    def _heads(self, entered: Tensor, tables: RotaryTables) -> tuple[Tensor, ...]:
        """Return query [s, b, n, d] and key [s, b, k, d], normalised and rotated, and value [s, b, k, d]."""
        joint = self.multiply_jointly(entered)
        if joint is not None and self.q_norm is self.k_norm is None and not torch.compiler.is_compiling():
            return rotate_joint(joint, tables, head_dim=self.head_dim, num_kv_heads=self.num_kv_heads)
        if joint is not None:
            num_heads = joint.shape[-1] // self.head_dim - 2 * self.num_kv_heads
            widths = [count * self.head_dim for count in (num_heads, self.num_kv_heads, self.num_kv_heads)]
            projected = joint.split(widths, dim=-1)
        else:
            projected = [projection(entered)[0] for projection in self.joint_columns()]
        query, key, value = (part.unflatten(-1, (-1, self.head_dim)) for part in projected)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        return rotate(query, tables), rotate(key, tables), value
