"""The stack of decoder layers, from token ids to the final normalised hidden states.

Shape suffixes: [s] sequence, [b] batch, [h] hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_frozen.comm import Group, group_size
from megatron_frozen.layers import ModelParallelConfig, VocabParallelEmbedding
from megatron_frozen.layers.norm import RMSNorm
from megatron_frozen.models.attention import Attention
from megatron_frozen.models.config import DecoderConfig
from megatron_frozen.models.documents import AttentionPlan, document_positions
from megatron_frozen.models.mlp import MLP
from megatron_frozen.models.rope import RotaryTables, join_tables, rotary_tables
from megatron_frozen.partition import padded_vocab_size

_MAX_GRAPHS = 64  # torch's own limit of 8, at which it fails, is near where layers have windows of several widths


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind an RMSNorm and added to the residual stream [s, b, h]."""

    def __init__(
        self, config: DecoderConfig, *, layer_index: int, parallel: ModelParallelConfig, tp_group: Group
    ) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer_index=layer_index, parallel=parallel, tp_group=tp_group)
        self.mlp = MLP(config, parallel=parallel, tp_group=tp_group)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, parallel=parallel)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, parallel=parallel)

    def forward(self, hidden: Tensor, tables: RotaryTables, plan: AttentionPlan) -> Tensor:
        """Return the residual stream after this layer."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), tables, plan)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


def _run_layer(layer: nn.Module, hidden: Tensor, tables: RotaryTables, plan: AttentionPlan) -> Tensor:
    return layer(hidden, tables, plan)


_RunLayer: TypeAlias = Callable[[nn.Module, Tensor, RotaryTables, AttentionPlan], Tensor]


class Decoder(nn.Module):
    """Embedding, layers and final norm.

    Without sequence parallelism the hidden states are [s, b, h] views of [b, s, h] memory all the way, so that batches
    go into attention and come out as logits [b, s, V] without one transpose; the layers fold either order as it is.
    """

    def __init__(self, config: DecoderConfig, *, parallel: ModelParallelConfig, tp_group: Group) -> None:
        super().__init__()
        self.config, self.parallel = config, parallel
        self.embed_tokens = VocabParallelEmbedding(
            padded_vocab_size(config.vocab_size, world_size=group_size(tp_group)),
            config.hidden_size,
            init_method=partial(nn.init.normal_, std=config.initializer_range),
            config=parallel,
            reduce_scatter_embeddings=parallel.sequence_parallel,
            tp_group=tp_group,
        )
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer_index=index, parallel=parallel, tp_group=tp_group)
            for index in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, parallel=parallel)
        self._run_layer: _RunLayer = _run_layer
        self._is_compiled = False

    def compile_layers(self, *, backend: str = "inductor") -> None:
        """Run each decoder layer as one graph of torch.compile (fullgraph), made when it is first needed.

        All layers share their graphs: one for a first layer whose input has no gradient, one for the others, one for
        passes without gradients; these three serve every length, number of rows above 1 and cut into documents, and
        three more serve batches of one row. The layers' collectives run in the graphs. Values and gradients are those
        of eager code up to rounding, but dropout draws other random numbers.
        """
        compiled = torch.compile(_run_layer, fullgraph=True, dynamic=True, backend=backend)

        def _run_compiled(layer: nn.Module, hidden: Tensor, tables: RotaryTables, plan: AttentionPlan) -> Tensor:
            with torch._dynamo.config.patch(recompile_limit=_MAX_GRAPHS):
                return compiled(layer, hidden, tables, plan)

        self._run_layer, self._is_compiled = _run_compiled, True

    def forward(
        self, input_ids: Tensor, plan: AttentionPlan, *, position_ids: Tensor | None, activation_checkpointing: bool
    ) -> Tensor:
        """Return the hidden states [s, b, h] ([s / ranks, b, h] under sequence parallelism) of ``input_ids`` [b, s]."""
        hidden = self.embed_tokens(input_ids)
        if not self.parallel.sequence_parallel:
            hidden = hidden.transpose(0, 1)
        if self._is_compiled:
            hidden = _uniform(hidden)
            torch._dynamo.maybe_mark_dynamic(plan.bounds, 0)
        tables = self._tables(input_ids, plan, position_ids, dtype=hidden.dtype)
        recompute = activation_checkpointing and torch.is_grad_enabled()
        for layer in self.layers:
            if recompute:
                hidden = checkpoint(self._run_layer, layer, hidden, tables, plan, use_reentrant=False)
            else:
                hidden = self._run_layer(layer, hidden, tables, plan)
        return self.norm(hidden)

    def _tables(
        self, input_ids: Tensor, plan: AttentionPlan, position_ids: Tensor | None, *, dtype: torch.dtype
    ) -> RotaryTables:
        num_rows, seq_length = input_ids.shape
        tables = partial(
            rotary_tables,
            rope=self.config.rope,
            head_dim=self.config.head_dim,
            max_position_embeddings=self.config.max_position_embeddings,
            dtype=dtype,
        )
        is_dynamic = self.config.rope.rope_type == "dynamic"
        if position_ids is not None:
            # Only the type that asks for it is told, as asking stops an accelerator.
            return tables(position_ids.t(), num_positions=int(position_ids.max()) + 1 if is_dynamic else 0)
        if is_dynamic and plan.lengths is not None:  # each document stretches by its own length
            places = torch.arange(plan.longest, device=input_ids.device)[:, None]
            by_length = {length: tables(places[:length], num_positions=length) for length in set(plan.lengths)}
            return join_tables([by_length[length] for length in plan.lengths], num_rows=num_rows)
        positions = document_positions(plan, num_rows=num_rows, seq_length=seq_length, device=input_ids.device)
        if self._is_compiled and positions.shape[1] < num_rows:  # one graph for whole and for packed rows
            positions = positions.t().expand(num_rows, seq_length).contiguous().t()
        return tables(positions, num_positions=plan.longest)


def _uniform(hidden: Tensor) -> Tensor:
    """Return the first layer's input [s, b, h] as the other layers get theirs, for one graph to serve all.

    Graphs tell a view from a tensor of its own, and strides of one row apart that mean the same.
    """
    return (hidden.squeeze(1).unsqueeze(1) if hidden.shape[1] == 1 else hidden).clone()
