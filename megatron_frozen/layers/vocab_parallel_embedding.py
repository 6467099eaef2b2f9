"""The embedding whose vocabulary is cut over tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from megatron_frozen.autograd.grad_dtype import kept_grad_dtype
from megatron_frozen.autograd.wide_embedding import EmbeddingWithWideGradient
from megatron_frozen.comm import reduce_from_tensor_model_parallel_region, reduce_scatter_to_sequence_parallel_region
from megatron_frozen.comm.groups import Group, chosen_group, group_rank, group_size
from megatron_frozen.errors import ConfigError, LayoutError
from megatron_frozen.layers.parts import drop_extra_state, new_weight
from megatron_frozen.layers.sharded_state import SavesShards
from megatron_frozen.params.shards import InitMethod
from megatron_frozen.partition import divide, shard_range


class VocabParallelEmbedding(SavesShards):
    """Rows of a table [num_embeddings, embedding_dim] whose rows are cut over ranks.

    weight: [num_embeddings / ranks, embedding_dim]. Forward takes global ids [b, s] (int64) and returns [b, s,
    embedding_dim]; with ``reduce_scatter_embeddings`` the sequence shard [s / ranks, b, embedding_dim].

    Collectives: forward, one all-reduce or reduce-scatter; backward, none or one all-gather. Arguments and attributes
    are those of ``megatron.core.tensor_parallel.VocabParallelEmbedding``; ``padding_idx``, a global id (negative:
    from the end) whose row gets no gradient, is ours.

    Raises ConfigError where num_embeddings does not divide by the ranks or padding_idx is out of range; LayoutError
    for ids out of range, on the CPU (on a GPU looking would stall it, and an id out of range gives zeros)."""

    has_extra_state, may_be_padded = False, True

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        init_method: InitMethod,
        reduce_scatter_embeddings: bool = False,
        config: Any,
        tp_group: Group = None,
        padding_idx: int | None = None,
    ) -> None:
        """Create the table."""
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.reduce_scatter_embeddings = reduce_scatter_embeddings
        self.tp_group = chosen_group(tp_group)
        self.deterministic_mode = config.deterministic_mode
        rank, world_size = group_rank(self.tp_group), group_size(self.tp_group)
        self.num_embeddings_per_partition = divide(num_embeddings, world_size, what="num_embeddings")
        self.vocab_start_index, self.vocab_end_index = shard_range(num_embeddings, rank=rank, world_size=world_size)
        self.padding_idx = self._global_padding(padding_idx)
        self.weight, _ = new_weight(
            (self.num_embeddings_per_partition, embedding_dim),
            full_shape=(num_embeddings, embedding_dim),
            partition_dim=0,
            config=config,
            init_method=init_method,
            group=self.tp_group,
        )
        self.register_load_state_dict_pre_hook(drop_extra_state)

    def _global_padding(self, padding_idx: int | None) -> int | None:
        if padding_idx is None:
            return None
        if not -self.num_embeddings <= padding_idx < self.num_embeddings:
            raise ConfigError(
                f"padding_idx is {padding_idx} in a vocabulary of {self.num_embeddings}; give an id in that range"
            )
        return padding_idx % self.num_embeddings

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """Return the rows of ``input_``; see the class."""
        if input_.device.type == "cpu" and input_.numel() and not torch.compiler.is_compiling():
            low, high = input_.aminmax()
            if low < 0 or high >= self.num_embeddings:
                raise LayoutError(
                    f"an embedding of {self.num_embeddings} rows got ids from {int(low)} to {int(high)}; "
                    f"ids go from 0 to {self.num_embeddings - 1}, so use the tokenizer of this checkpoint"
                )
        local = input_ - self.vocab_start_index
        is_elsewhere = (local < 0) | (local >= self.num_embeddings_per_partition)
        rows = self._look_up(local.masked_fill(is_elsewhere, 0)).masked_fill_(is_elsewhere.unsqueeze(-1), 0)
        if self.reduce_scatter_embeddings:
            rows = rows.transpose(0, 1)
        if self.tp_group is None:
            return rows
        if self.reduce_scatter_embeddings:
            return reduce_scatter_to_sequence_parallel_region(rows, self.tp_group)
        return reduce_from_tensor_model_parallel_region(rows, self.tp_group)

    def _look_up(self, local: torch.Tensor) -> torch.Tensor:
        if self.deterministic_mode and self.padding_idx is None:
            return self.weight[local]
        padding = None if self.padding_idx is None else self.padding_idx - self.vocab_start_index
        if padding is not None and not 0 <= padding < self.num_embeddings_per_partition:
            padding = None  # another rank holds that row
        if kept_grad_dtype(self.weight) != self.weight.dtype:
            return EmbeddingWithWideGradient.apply(self.weight, local, padding)
        return F.embedding(local, self.weight, padding_idx=padding)

    def extra_repr(self) -> str:
        """Return the sizes for ``repr``."""
        return f"{self.num_embeddings}, {self.embedding_dim}, TP={group_size(self.tp_group)}"
