"""What each rank of `bench comm` does: one decoder layer per scheme, its collectives counted in both directions.

Shape suffixes: [s] sequence, [b] batch, [h] hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_frozen.bench.bridge_lora import BridgeLora
from megatron_frozen.bench.runner import Row
from megatron_frozen.comm import (
    Group,
    get_tensor_model_parallel_group,
    group_rank,
    group_size,
    initialize_model_parallel,
)
from megatron_frozen.diagnostics import Recorder
from megatron_frozen.layers import ColumnParallelLinear, ModelParallelConfig, RowParallelLinear
from megatron_frozen.layers.norm import RMSNorm
from megatron_frozen.lora import LoraConfig, apply_lora
from megatron_frozen.lora.layer import LoraLinear
from megatron_frozen.models.config import DecoderConfig
from megatron_frozen.models.decoder import DecoderLayer
from megatron_frozen.models.documents import plan_attention
from megatron_frozen.models.rope import rotary_tables
from megatron_frozen.params import sum_partial_grads
from megatron_frozen.testing import relative_error

NONE, OURS, BRIDGE = "no adapters", "ours", "Megatron-Bridge's scheme"
MEGATRON_LAYER, DECODER_LAYER = "Megatron's layer", "this package's layer"
FORWARD, BACKWARD, STEP = "forward", "backward", "once a step"
KINDS = ("all_reduce", "all_gather", "reduce_scatter")
NUM_HEADS = 8
_SCALE = 2.0

Layer = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class SizesConfig:
    """Sizes of the layer and of what goes through it."""

    sequence: int = 256
    """Tokens of a row."""
    batch: int = 1
    """Rows."""
    hidden: int = 512
    """Width of the residual stream."""
    intermediate: int = 1408
    """Width inside the MLP."""
    rank: int = 16
    """Rank of the adapters."""
    dtype: torch.dtype = torch.bfloat16
    """Of weights, factors and activations."""


class MegatronLayer(nn.Module):
    """A decoder layer as Megatron-core cuts it: one product for q, k and v, and one for gate and up; no rotation.

    Each column layer sums its own input gradient. Input and output are [s, b, h] ([s / ranks, b, h] under sequence
    parallelism)."""

    adapted = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")

    def __init__(self, sizes: SizesConfig, *, parallel: ModelParallelConfig, group: Group) -> None:
        super().__init__()
        h, f = sizes.hidden, sizes.intermediate
        options = {"config": parallel, "init_method": partial(nn.init.normal_, std=0.02), "bias": False}
        column = partial(ColumnParallelLinear, tp_group=group, **options)
        row = partial(RowParallelLinear, input_is_parallel=True, skip_bias_add=False, tp_group=group, **options)
        self.linear_qkv, self.linear_proj = column(h, 3 * h), row(h, h)
        self.linear_fc1, self.linear_fc2 = column(h, 2 * f), row(f, h)
        self.attention_norm, self.mlp_norm = (RMSNorm(h, eps=1e-6, parallel=parallel) for _ in range(2))
        self.num_heads = NUM_HEADS // group_size(group)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the residual stream after this layer."""
        joint = self.linear_qkv(self.attention_norm(hidden))[0]
        heads = joint.unflatten(-1, (3, self.num_heads, -1)).permute(2, 1, 3, 0, 4)  # [3, b, n, s, d]
        context = F.scaled_dot_product_attention(*heads, is_causal=True)
        hidden = hidden + self.linear_proj(context.permute(2, 0, 1, 3).flatten(2))[0]
        gate, up = self.linear_fc1(self.mlp_norm(hidden))[0].chunk(2, dim=-1)
        return hidden + self.linear_fc2(F.silu(gate) * up)[0]


def count(rank: int, world_size: int, *, sizes: SizesConfig) -> list[Row]:
    """Return a row for each layer, scheme and phase, with sequence parallelism off and on."""
    initialize_model_parallel(world_size)
    group = get_tensor_model_parallel_group()
    rows: list[Row] = []
    for sequence_parallel in (False, True):
        parallel = ModelParallelConfig(
            tensor_model_parallel_size=world_size, sequence_parallel=sequence_parallel, params_dtype=sizes.dtype
        )
        results = {}
        for kind, scheme in (
            *((MEGATRON_LAYER, scheme) for scheme in (NONE, OURS, BRIDGE)),
            *((DECODER_LAYER, scheme) for scheme in (NONE, OURS)),
        ):
            torch.manual_seed(0)
            module, layer = _built(kind, scheme, sizes=sizes, parallel=parallel, group=group)
            results[kind, scheme], phases = _passes(module, layer, sizes=sizes, parallel=parallel, group=group)
            same: Row = {"threads": torch.get_num_threads(), "layer": kind, "ranks": world_size}
            same |= {"sequence_parallel": sequence_parallel, "scheme": scheme}
            rows += [same | {"phase": phase} | _counted(seen, world_size) for phase, seen in phases.items()]
        ours, bridge = results[MEGATRON_LAYER, OURS], results[MEGATRON_LAYER, BRIDGE]
        difference = max(relative_error(*pair) for pair in zip(bridge, ours, strict=True))
        for row in rows:
            if row["scheme"] == BRIDGE and row["sequence_parallel"] == sequence_parallel:
                row["difference_from_ours"] = difference
    return rows


def _built(
    kind: str, scheme: str, *, sizes: SizesConfig, parallel: ModelParallelConfig, group: Group
) -> tuple[nn.Module, Layer]:
    if kind == DECODER_LAYER:
        return _decoder_layer(sizes, scheme=scheme, parallel=parallel, group=group)
    layer = MegatronLayer(sizes, parallel=parallel, group=group).requires_grad_(requires_grad=False)
    if scheme != NONE:
        generator = torch.Generator().manual_seed(1)
        for name in layer.adapted:
            _adapt(layer, name, scheme=scheme, rank=sizes.rank, generator=generator)
    return layer, layer


def _adapt(layer: nn.Module, name: str, *, scheme: str, rank: int, generator: torch.Generator) -> None:
    base = getattr(layer, name)
    full_A = torch.randn(rank, base.input_size, generator=generator) * base.input_size**-0.5
    full_B = torch.randn(base.output_size, rank, generator=generator) * 0.1
    if scheme == BRIDGE:
        setattr(layer, name, BridgeLora(base, full_A, full_B, scale=_SCALE))
        return
    adapted = LoraLinear(base)
    adapted.add_adapter("default", LoraConfig(r=rank, alpha=_SCALE * rank, dtype=None), full_A=full_A, full_B=full_B)
    adapted.active_adapter = "default"
    setattr(layer, name, adapted)


def _decoder_layer(
    sizes: SizesConfig, *, scheme: str, parallel: ModelParallelConfig, group: Group
) -> tuple[nn.Module, Layer]:
    config = DecoderConfig(
        model_type="llama",
        vocab_size=8,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_hidden_layers=1,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_HEADS,
        head_dim=sizes.hidden // NUM_HEADS,
        max_position_embeddings=sizes.sequence,
        layer_windows=(None,),
    )
    module = DecoderLayer(config, layer_index=0, parallel=parallel, tp_group=group).requires_grad_(requires_grad=False)
    if scheme == OURS:
        apply_lora(module, LoraConfig(r=sizes.rank, alpha=_SCALE * sizes.rank, dtype=None))
    plan = plan_attention(
        num_rows=sizes.batch,
        seq_length=sizes.sequence,
        document_lengths=None,
        windows=config.layer_windows,
        device=torch.device("cpu"),
    )
    tables = rotary_tables(
        torch.arange(sizes.sequence)[:, None],
        rope=config.rope,
        head_dim=config.head_dim,
        num_positions=sizes.sequence,
        max_position_embeddings=sizes.sequence,
        dtype=sizes.dtype,
    )
    return module, lambda hidden: module(hidden, tables, plan)


def _passes(
    module: nn.Module, layer: Layer, *, sizes: SizesConfig, parallel: ModelParallelConfig, group: Group
) -> tuple[list[Tensor], dict[str, Recorder]]:
    """Return output and input gradient, and what ran in each phase."""
    generator = torch.Generator().manual_seed(2)
    shape = (sizes.sequence, sizes.batch, sizes.hidden)
    whole = [torch.randn(shape, generator=generator).to(sizes.dtype) for _ in range(2)]
    if parallel.sequence_parallel:
        whole = [tensor.chunk(group_size(group))[group_rank(group)] for tensor in whole]
    hidden, grad_output = whole[0].clone().requires_grad_(), whole[1]
    phases = {phase: Recorder() for phase in (FORWARD, BACKWARD, STEP)}
    with phases[FORWARD]:
        output = layer(hidden)
    with phases[BACKWARD]:
        output.backward(grad_output)
    with phases[STEP]:
        sum_partial_grads(module.parameters(), group=group)
    assert hidden.grad is not None
    return [output.detach(), hidden.grad], phases


def _counted(seen: Recorder, num_ranks: int) -> Row:
    calls, payload = seen.collectives(), seen.payload_bytes()
    rings = sum(payload[kind] * (2 if kind == "all_reduce" else 1) for kind in KINDS)
    return {
        **{kind: calls[kind] for kind in KINDS},
        "collectives": sum(calls.values()),
        "payload_bytes": sum(payload.values()),
        "sent_bytes": rings * (num_ranks - 1) // num_ranks,
    }
