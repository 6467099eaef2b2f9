"""Grouped-query attention over this rank's heads, document by document.

Shape suffixes: [s] sequence, [b] batch, [h] hidden, [n] query heads and [k] key and value heads of this rank, [d] head
dim.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_frozen.comm import Group, group_size
from megatron_frozen.layers import ColumnParallelLinear, ModelParallelConfig, RowParallelLinear
from megatron_frozen.layers.joint_columns import HoldsJointColumns
from megatron_frozen.layers.norm import RMSNorm
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
        return self.o_proj(_attend(query, key, value, plan=plan, window=self.window))[0]

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


def _attend(query: Tensor, key: Tensor, value: Tensor, *, plan: AttentionPlan, window: int | None) -> Tensor:
    """Return the context [s, b, n d] of query [s, b, n, d] over key and value [s, b, k, d].

    Each document is one call, so no score between documents is computed and no mask needed. Splitting and joining are
    one copy each way at most, and none for a batch of whole rows: the result lies in memory as [b, s, n d], which the
    output projection folds as it is.
    """
    seq_length, num_rows = query.shape[:2]
    if plan.lengths is None:
        rows = _attend_one(*(heads.transpose(0, 1) for heads in (query, key, value)), plan=plan, window=window)
    else:
        documents = (
            heads.transpose(0, 1).flatten(0, 1).unsqueeze(0).split_with_sizes(list(plan.lengths), dim=1)
            for heads in (query, key, value)
        )
        rows = torch.cat(
            [_attend_one(*parts, plan=plan, window=window) for parts in zip(*documents, strict=True)], dim=1
        )
    return rows.reshape(num_rows, seq_length, -1).transpose(0, 1)


def _attend_one(query: Tensor, key: Tensor, value: Tensor, *, plan: AttentionPlan, window: int | None) -> Tensor:
    """Return the context [b, s, n, d] of one document per row: query [b, s, n, d], key and value [b, s, k, d]."""
    mask = plan.mask(window=window, length=query.shape[1])
    num_groups = query.shape[2] // key.shape[2]
    if mask is not None and num_groups > 1:  # a mask and shared keys together leave a GPU without a fused kernel
        key, value = (heads.repeat_interleave(num_groups, dim=2) for heads in (key, value))
    context = F.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=query.shape[2] != key.shape[2],
    )
    return context.transpose(1, 2)
