"""Which projections a GPTModel's linears hold, what Hugging Face calls them, and which of them a config names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from megatron_frozen.comm.groups import group_size
from megatron_frozen.errors import ConfigError, nearest
from megatron_frozen.lora import LoraConfig
from megatron_frozen.partition import fused_qkv_rows

PROJECTIONS = {
    "self_attention.linear_qkv": {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj"},
    "self_attention.linear_proj": {"o": "self_attn.o_proj"},
    "mlp.linear_fc1": {"gate": "mlp.gate_proj", "up": "mlp.up_proj"},
    "mlp.linear_fc2": {"down": "mlp.down_proj"},
}
"""From the linears of a layer to its projections and their Hugging Face names. An ungated fc1 holds ``up`` alone."""

OTHER_NAMES = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"), "linear_proj": ("o_proj",), "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",), "linear_q": ("q_proj",), "linear_k": ("k_proj",), "linear_v": ("v_proj",),
    "linear_fc1_gate": ("gate_proj",), "linear_fc1_up": ("up_proj",),
}  # fmt: skip
"""Megatron's and Megatron-Bridge's names, which target_modules may hold too."""

_LINEAR = re.compile(rf"(?:.*\.)?decoder\.layers\.\d+\.({'|'.join(map(re.escape, PROJECTIONS))})")


@dataclass(frozen=True, kw_only=True, slots=True)
class Projection:
    """One projection of one linear."""

    name: str
    """The last part of its Hugging Face name, such as q_proj."""
    path: str
    """Its Hugging Face name, such as model.layers.0.self_attn.q_proj."""
    linear: Any
    """The linear of megatron-core that holds it."""
    rows: tuple[int, ...] | None
    """Its rows among this rank's rows of the linear's weight, in its own order; None for all of them."""
    output_size: int
    """Its rows on all ranks."""


def find_projections(model: nn.Module) -> Iterator[Projection]:
    """Yield the projections of every layer of the decoder, in the model's order.

    Layers count from 0 over all pipeline stages. Raises ConfigError for a fused projection of an unknown order.
    """
    module: Any
    for path, module in model.named_modules():
        match = _LINEAR.fullmatch(path)
        if match is None:
            continue
        layer: Any = model.get_submodule(path.removesuffix(f".{match.group(1)}"))
        names = PROJECTIONS[match.group(1)]
        for part, rows in _rows(module, kind=match.group(1)).items():
            per_rank = module.output_size // group_size(module.tp_group)
            yield Projection(
                name=names[part].rpartition(".")[2],
                path=f"model.layers.{int(layer.layer_number) - 1}.{names[part]}",
                linear=module,
                rows=rows,
                output_size=module.output_size if rows is None else module.output_size * len(rows) // per_rank,
            )


def _rows(linear: Any, *, kind: str) -> dict[str, tuple[int, ...] | None]:
    config, num_ranks = linear.config, group_size(linear.tp_group)
    if kind == "self_attention.linear_qkv":
        if getattr(config, "attention_output_gate", False) or config.num_query_groups < num_ranks:
            raise ConfigError(
                f"linear_qkv holds an output gate, or {config.num_query_groups} query groups for {num_ranks} ranks, "
                f"whose order of rows is not known here; use as many ranks as groups or fewer, and no gate"
            )
        rows = fused_qkv_rows(
            num_heads=config.num_attention_heads // num_ranks,
            num_groups=config.num_query_groups // num_ranks,
            head_dim=config.kv_channels,
        )
        return {part: tuple(found) for part, found in rows.items()}
    if kind == "mlp.linear_fc1" and not config.gated_linear_unit:
        return {"up": None}
    if kind == "mlp.linear_fc1":
        half = linear.output_size // num_ranks // 2
        return {"gate": tuple(range(half)), "up": tuple(range(half, 2 * half))}
    return dict.fromkeys(PROJECTIONS[kind])


def chosen_projections(model: nn.Module, config: LoraConfig) -> list[Projection]:
    """Return the projections that ``config`` names; nothing is changed.

    target_modules are Hugging Face's names or those of OTHER_NAMES, whole paths or their last parts, or one regular
    expression for whole Hugging Face paths. Raises ConfigError where one of them, or a layer number, matches nothing.
    """
    found = list(find_projections(model))
    if not found:
        raise ConfigError(
            "the model has no decoder layer with linear_qkv, linear_proj, linear_fc1 or linear_fc2; "
            "give megatron-core's GPTModel, or a wrapper around it"
        )
    targets = config.target_modules
    if isinstance(targets, str):
        chosen = [at for at in found if re.fullmatch(targets, at.path)]
        missing = [] if chosen else [targets]
    else:
        names = [name for target in targets for name in OTHER_NAMES.get(target, (target,))]
        missing = [name for name in names if not any(_is_named(at, name) for at in found)]
        chosen = [at for at in found if any(_is_named(at, name) for name in names)]
    if missing:
        known = list(dict.fromkeys(at.name for at in found))
        raise ConfigError(
            f"no projection of the GPTModel matches LoRA target_modules '{missing[0]}'{nearest(missing[0], known)}; "
            f"it has {', '.join(known)}"
        )
    layers = config.layers_to_transform
    if layers is None or isinstance(targets, str):
        return chosen
    absent = sorted(set(layers) - {_layer_of(at) for at in chosen})
    if absent:
        raise ConfigError(
            f"LoRA layers_to_transform names layers {absent}, which hold no target projection; "
            f"this model has layers {sorted({_layer_of(at) for at in chosen})}"
        )
    return [at for at in chosen if _layer_of(at) in layers]


def _is_named(projection: Projection, name: str) -> bool:
    return f".{projection.path}".endswith(f".{name}")


def _layer_of(projection: Projection) -> int:
    return int(projection.path.split(".")[2])
