"""Adapters on a whole model: add, select, switch off, start again, and list what trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch import nn

from megatron_frozen.comm import WORLD, together
from megatron_frozen.errors import ConfigError, nearest
from megatron_frozen.lora.config import LoraConfig
from megatron_frozen.lora.factors import Factors, FullFactors
from megatron_frozen.lora.init import init_lora_a, shared_seed
from megatron_frozen.lora.layer import LoraLinear
from megatron_frozen.lora.targets import find_targets, named_modules_around_adapters

FactorsOf: TypeAlias = Callable[[str, LoraLinear], FullFactors]
"""From a layer's path and the layer to its factors."""


def apply_lora(model: nn.Module, config: LoraConfig, *, adapter_name: str = "default", seed: int = 0) -> nn.Module:
    """Wrap the linears that ``config`` names in LoraLinear, in place, and return ``model`` with the new adapter active.

    Every parameter but the new factors is frozen. A starts from ``seed`` and the layer's path alone, equal on all
    tensor- and data-parallel ranks (rank 0's seed counts, whatever the others are given); B starts at zero, so the
    model's output is unchanged. A second call with another ``adapter_name`` adds a second adapter. Collectives: small
    object exchanges over the world.

    Raises:
        ConfigError: a target matches nothing or cannot carry an adapter, or the name is taken; nothing is changed then.
    """
    with together(group=WORLD, doing="adding a LoRA adapter"):
        check_new_name(model, adapter_name)
        find_targets(model, config)
    seed = shared_seed(seed)
    install(model, config, adapter_name=adapter_name, full_factors=_starting_factors(config, seed))
    return model


def install(model: nn.Module, config: LoraConfig, *, adapter_name: str, full_factors: FactorsOf) -> None:
    """Wrap where needed, add the adapter from its full factors, freeze all else, and make it active. No collective."""
    for name, module in find_targets(model, config).items():
        layer = module if isinstance(module, LoraLinear) else LoraLinear(module).train(module.training)
        full_A, full_B = full_factors(name, layer)
        layer.add_adapter(adapter_name, config, full_A=full_A, full_B=full_B)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer)
    model.requires_grad_(requires_grad=False)
    set_active_adapter(model, adapter_name)


def _starting_factors(config: LoraConfig, seed: int) -> FactorsOf:
    def factors(name: str, layer: LoraLinear) -> FullFactors:
        base = layer.base_layer
        full_A = init_lora_a(config.r, base.input_size, method=config.init_method, seed=seed, layer_name=name)
        return full_A, torch.zeros(base.output_size, config.r)

    return factors


def check_new_name(model: nn.Module, adapter_name: str) -> None:
    """Raise ConfigError unless ``adapter_name`` is free and can be part of a parameter's name."""
    if not adapter_name or "." in adapter_name or hasattr(Factors(), adapter_name):
        raise ConfigError(
            f"adapter_name {adapter_name!r} is empty, has a dot or is a word that torch's modules use themselves; give "
            "another word such as 'default'"
        )
    if adapter_name in adapter_names(model):
        raise ConfigError(
            f"adapter '{adapter_name}' is on the model already; give another adapter_name, or call reset_adapter"
        )


def named_lora_layers(model: nn.Module) -> Iterator[tuple[str, LoraLinear]]:
    """Yield (path, layer) of every LoraLinear; the path is the linear's in the bare model, so its Hugging Face name."""
    for name, module in named_modules_around_adapters(model):
        if isinstance(module, LoraLinear):
            yield name, module


def adapter_names(model: nn.Module) -> list[str]:
    """Return the names of all adapters on the model, in the order they were added."""
    return list(dict.fromkeys(name for _, layer in named_lora_layers(model) for name in layer.adapters))


def layers_of(model: nn.Module, adapter_name: str) -> dict[str, LoraLinear]:
    """Return {path: layer} of the layers that hold this adapter; raises ConfigError where there are none."""
    layers = {name: layer for name, layer in named_lora_layers(model) if adapter_name in layer.adapters}
    if not layers:
        names = adapter_names(model)
        raise ConfigError(
            f"adapter '{adapter_name}' is not on the model{nearest(adapter_name, names)}; it holds "
            f"{', '.join(names) or 'no adapter, so call apply_lora or load_adapter first'}"
        )
    return layers


def lora_parameters(model: nn.Module, *, adapter_name: str | None = None) -> list[nn.Parameter]:
    """Return every A and B of the active adapter, or of a named one, in the model's order: what the optimizer takes.

    Raises ConfigError where there are none.
    """
    if adapter_name is not None:
        pairs = [(adapter_name, layer) for layer in layers_of(model, adapter_name).values()]
    else:
        pairs = [(layer.active_adapter, layer) for _, layer in named_lora_layers(model) if layer.active_adapter]
    if not pairs:
        raise ConfigError(
            "the model has no active adapter, so nothing to train; call apply_lora or set_active_adapter; adapters on "
            "megatron-core's GPTModel are listed by megatron_frozen.gpt_lora.lora_parameters"
        )
    return [factors[name] for name, layer in pairs for factors in (layer.lora_A, layer.lora_B)]


def set_active_adapter(model: nn.Module, adapter_name: str | None) -> None:
    """Make one adapter the one that forward adds and that trains, or none. Layers without it run their base alone.

    To be called between a backward and the next forward: as in PEFT, an adapter that is not active when the backward
    runs gets no gradient, and a recomputed layer would compute with the one that is.

    Raises ConfigError where no layer has it.
    """
    if adapter_name is not None:
        layers_of(model, adapter_name)
    for _, layer in named_lora_layers(model):
        layer.active_adapter = adapter_name if adapter_name in layer.adapters else None
        for factors in (layer.lora_A, layer.lora_B):
            for name, factor in factors.items():
                factor.requires_grad_(name == adapter_name)


@contextmanager
def adapters_disabled(model: nn.Module) -> Iterator[None]:
    """Within this context the model is the base model: every LoraLinear runs its base alone.

    It must span the forward and the backward alike, as layers under activation checkpointing run again in the backward.
    """
    active = [(layer, layer.active_adapter) for _, layer in named_lora_layers(model)]
    for layer, _ in active:
        layer.active_adapter = None
    try:
        yield
    finally:
        for layer, name in active:
            layer.active_adapter = name


def reset_adapter(model: nn.Module, *, adapter_name: str = "default", seed: int = 0) -> None:
    """Start an adapter anew as apply_lora does: A drawn from rank 0's ``seed``, B zero.

    Gradients and optimizer state are the caller's. Collectives: small object exchanges over the world. Raises
    ConfigError where the adapter is not on the model.
    """
    with together(group=WORLD, doing="resetting a LoRA adapter"):
        layers = layers_of(model, adapter_name)
    seed = shared_seed(seed)
    for name, layer in layers.items():
        full_A, full_B = _starting_factors(layer.adapters[adapter_name], seed)(name, layer)
        layer.set_factors(adapter_name, full_A=full_A, full_B=full_B)
