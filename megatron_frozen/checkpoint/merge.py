"""An adapter merged into its base, as a Hugging Face folder that needs no adapter any more."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from megatron_frozen.checkpoint.hf_folder import Weight, write_hf_folder
from megatron_frozen.errors import ConfigError
from megatron_frozen.lora import LoraLinear, adapter_delta, named_lora_layers
from megatron_frozen.models import CausalLM
from megatron_frozen.params import whole


def merge_adapter(
    model: CausalLM, folder: str | Path, *, source_folder: str | Path | None = None, dtype: torch.dtype | None = None
) -> None:
    """Write W + scale * B A of the active adapter, and all else as it is, as a Hugging Face folder; the model stays.

    Product and sum are in fp32 (fp64 for an fp64 base) and rounded once to `dtype`, None being each weight's own. A
    change below half a step of a bf16 weight is lost in that rounding; `dtype=torch.float32` keeps it. The rest is as
    in save_hf_folder: `source_folder` lends config.json and tokenizer files, every rank calls it, one all-gather per
    sharded tensor.

    Raises ConfigError if no adapter is active or `source_folder` is of another model, CheckpointError if the folder is
    in use.
    """
    layers = dict(named_lora_layers(model))
    if not any(layer.active_adapter for layer in layers.values()):
        raise ConfigError("the model has no active LoRA adapter to merge; load one with load_adapter")
    weights = []
    for name, parameter in model.named_parameters():
        path, _, own = name.partition(".base_layer.")
        if not own and any(name.startswith(f"{layer}.lora_") for layer in layers):
            continue
        layer = layers[path] if own == "weight" else None
        target = dtype or parameter.dtype
        weights.append(
            Weight(
                key=f"{path}.{own}" if own else name,
                parameter=parameter,
                shard=lambda p=parameter, a=layer, t=target: merged(p, a, dtype=t),
                dtype=target,
            )
        )
    write_hf_folder(model, folder, weights=weights, source_folder=source_folder)


def merged(parameter: nn.Parameter, layer: LoraLinear | None, *, dtype: torch.dtype) -> Tensor:
    """This rank's shard of a parameter, plus its layer's active adapter, if it has one, in `dtype`.

    Collectives: none, but one all-gather where FSDP cut the parameter."""
    shard = whole(parameter.detach())
    if layer is not None and layer.active_adapter:
        shard = shard + adapter_delta(layer)  # which is fp32 or wider
    return shard.to(dtype)
