"""This package's own layers beside megatron-core's: under its config objects and in its distributed checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megatron_frozen as mf
from megatron_frozen.integrations import megatron_core as integration
from megatron_frozen.integrations.megatron_core.sharded_state import complete
from tests.functional.megatron_cpu import child_processes, gpt_config, megatron_on_cpu

VOCAB, HIDDEN, WIDE, SEQUENCE, BATCH = 24, 8, 12, 4, 2


class Stack(nn.Module):
    """An embedding, a gated column layer and a row layer, of this package or of megatron-core."""

    def __init__(self, config: Any, *, ours: bool) -> None:
        super().__init__()
        from megatron.core import parallel_state, tensor_parallel

        library: Any = mf if ours else tensor_parallel
        torch.manual_seed(5)
        given: dict[str, Any] = {
            "config": config,
            "init_method": nn.init.xavier_normal_,
            "tp_group": parallel_state.get_tensor_model_parallel_group(),
        }
        self.embedding: Any = library.VocabParallelEmbedding(
            VOCAB, HIDDEN, reduce_scatter_embeddings=config.sequence_parallel, **given
        )
        self.column: Any = library.ColumnParallelLinear(HIDDEN, WIDE, stride=2, **given)
        self.row: Any = library.RowParallelLinear(
            WIDE, HIDDEN, bias=True, input_is_parallel=True, skip_bias_add=False, **given
        )

    def forward(self, ids: Tensor) -> Tensor:
        """Return [s, b, h], or its shard under sequence parallelism, of ids [b, s]."""
        hidden = self.embedding(ids)
        if not self.embedding.reduce_scatter_embeddings:
            hidden = hidden.transpose(0, 1)
        return self.row(torch.tanh(self.column(hidden)[0]))[0]

    def sharded_state_dict(self) -> dict[str, Any]:
        """Return the shards of the three layers."""
        state: dict[str, Any] = {}
        for name, layer in self.named_children():
            metadata = integration.upstream.core("transformer.utils").ensure_metadata_has_dp_cp_group(None)
            state |= layer.sharded_state_dict(f"{name}.", (), metadata)  # pyright: ignore[reportCallIssue]
        return state


def both(rank: int, world_size: int, options: dict[str, Any]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return pairs (ours, megatron-core's) of the output and the gradients under one TransformerConfig."""
    found = []
    with megatron_on_cpu(tp=world_size):
        config = gpt_config(tensor_model_parallel_size=world_size, **options)
        for ours in (True, False):
            stack = Stack(config, ours=ours)
            ids = torch.arange(SEQUENCE * BATCH).view(BATCH, SEQUENCE) * 3
            output = stack(ids)
            output.square().sum().backward()
            grads = {f"d {name}": parameter.grad for name, parameter in stack.named_parameters()}
            found.append({"y": output.detach(), **grads})
    assert found[0].keys() == found[1].keys()
    return {name: (found[0][name], found[1][name]) for name in found[0]}


def interchange(rank: int, world_size: int, folder: str, *, ours: bool) -> dict[str, float]:
    """Save one library's layers as a distributed checkpoint, load it into the other's; return the differences."""
    from megatron.core import dist_checkpointing

    with megatron_on_cpu(tp=world_size):
        config = gpt_config(tensor_model_parallel_size=world_size)
        saved, loaded = Stack(config, ours=ours), Stack(config, ours=not ours)
        with torch.no_grad():
            for parameter in loaded.parameters():
                parameter.fill_(7.0)
        if rank == 0:
            Path(folder).mkdir(parents=True, exist_ok=True)
        torch.distributed.barrier()
        with child_processes():
            dist_checkpointing.save(saved.sharded_state_dict(), folder)
        state: Any = dist_checkpointing.load(loaded.sharded_state_dict(), folder)
        loaded.load_state_dict(state)
        theirs = dict(loaded.named_parameters())
        return {name: (p - theirs[name]).abs().max().item() for name, p in saved.named_parameters()}


def ours_into_upstreams(rank: int, world_size: int, folder: str) -> dict[str, float]:
    """From this package's layers to megatron-core's."""
    return interchange(rank, world_size, folder, ours=True)


def upstreams_into_ours(rank: int, world_size: int, folder: str) -> dict[str, float]:
    """From megatron-core's layers to this package's."""
    return interchange(rank, world_size, folder, ours=False)


def global_shapes(rank: int, world_size: int) -> dict[str, tuple[Any, ...]]:
    """Return the global shapes in the sharded state of a layer with split parameters, asked for without metadata."""
    with megatron_on_cpu(tp=world_size):
        from megatron.core import parallel_state

        config = gpt_config(tensor_model_parallel_size=world_size)
        group: Any = parallel_state.get_tensor_model_parallel_group()
        layer = mf.ColumnParallelLinear(
            HIDDEN, WIDE, config=config, init_method=nn.init.ones_, tp_group=group, parameters_split={"q": 8, "k": 4}
        )
        whole = mf.RowParallelLinear(
            4, 4, config=gpt_config(), init_method=nn.init.ones_, bias=True, input_is_parallel=True, skip_bias_add=False
        )
        shards = layer.sharded_state_dict("c.") | whole.sharded_state_dict("r.")
        split: dict[str, Any] = {"tp_group": group, "parameters_split": {"q": 8, "k": 4}}
        shards |= mf.LayerNormLinear(HIDDEN, WIDE, parallel_mode="column", **split).sharded_state_dict("n.")
        shards |= mf.Linear(HIDDEN, WIDE, parallel_mode="row", **split).sharded_state_dict("l.")
        return {key: getattr(value, "global_shape", ()) for key, value in shards.items()}


def global_shapes_in_older_releases(rank: int, world_size: int) -> dict[str, tuple[Any, ...]]:
    """The same where megatron-core's function takes what it took in 0.14 and 0.15, which knew one set of groups."""
    from megatron.core import parallel_state
    from megatron.core.transformer import utils

    make = utils.make_sharded_tensors_for_checkpoint

    def make_of_old(
        state_dict: Any, prefix: str, tensor_parallel_layers_axis_map: Any = None, sharded_offsets: Any = ()
    ) -> Any:
        groups = {
            "tp_group": parallel_state.get_tensor_model_parallel_group(),
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        }
        return make(state_dict, prefix, tensor_parallel_layers_axis_map, sharded_offsets, **groups)

    with pytest.MonkeyPatch.context() as old:
        old.setattr(utils, "make_sharded_tensors_for_checkpoint", make_of_old)
        old.delattr(utils, "ensure_metadata_has_dp_cp_group")
        assert complete(None) is None  # their layers ask for none
        return global_shapes(rank, world_size)
