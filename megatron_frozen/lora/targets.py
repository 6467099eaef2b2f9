"""Which modules of a model an adapter goes on: names matched as PEFT matches them, and every name must match."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from torch import nn

from megatron_frozen.errors import ConfigError, nearest
from megatron_frozen.lora.config import LoraConfig
from megatron_frozen.lora.layer import LoraLinear, is_linear, unsupported

_LAYER_INDEX = re.compile(r"(?:.*?\.)??[^.]*\.(\d+)\.")
"""The first numbered part of a path, which PEFT takes as the layer number."""


def named_modules_around_adapters(module: nn.Module, *, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield (path, module) as `named_modules` does, each LoraLinear as one module: paths are the bare model's."""
    for name, child in module.named_children():
        path = f"{prefix}.{name}" if prefix else name
        yield path, child
        if not isinstance(child, LoraLinear):
            yield from named_modules_around_adapters(child, prefix=path)


def find_targets(model: nn.Module, config: LoraConfig) -> dict[str, nn.Module]:
    """Return {path: linear or LoraLinear} of the modules that `config` names, in the model's order; nothing is changed.

    Raises:
        ConfigError: a name or a layer number matches nothing, or a module that it matches cannot carry an adapter.
    """
    modules = dict(named_modules_around_adapters(model))
    matches = _match(config, list(modules))
    linears = {name: module for name, module in modules.items() if is_linear(module)}
    if not linears:
        raise ConfigError(
            "the model has no ColumnParallelLinear or RowParallelLinear of this package, and LoRA adapts nothing else; "
            "for megatron-core's GPTModel call megatron_frozen.gpt_lora.apply_lora"
        )
    one_text = isinstance(config.target_modules, str)
    _check_all_match(matches, linears=list(linears), tied=_head_is_tied(model), one_text=one_text)
    chosen = {name for names in matches.values() for name in names}
    if config.layers_to_transform is not None and not one_text:
        chosen = _in_layers(chosen, config.layers_to_transform)
    shared = _shared_weights(model)
    for name in sorted(chosen):
        module = modules[name]
        why_not = None if isinstance(module, LoraLinear) else unsupported(module)
        if name in shared or (why_not and _head_is_tied(model) and name.endswith(("lm_head", "embed_tokens"))):
            why_not = _TIED
        if why_not:
            raise ConfigError(f"LoRA target {name}: {why_not}")
    return {name: module for name, module in modules.items() if name in chosen}


_TIED = (
    "its weight is tied to another module, which an adapter merged here would change too; "
    "leave lm_head and embed_tokens out of target_modules"
)


def _match(config: LoraConfig, names: list[str]) -> dict[str, list[str]]:
    """Return {target: the paths it matches}."""
    targets = config.target_modules
    if isinstance(targets, str):
        return {targets: [name for name in names if re.fullmatch(targets, name)]}
    return {target: [name for name in names if f".{name}".endswith(f".{target}")] for target in targets}


def _check_all_match(matches: dict[str, list[str]], *, linears: list[str], tied: bool, one_text: bool) -> None:
    missing = [target for target, names in matches.items() if not names]
    if not missing:
        return
    if tied and "lm_head" in missing:
        raise ConfigError(f"LoRA target lm_head: {_TIED}")
    known = list(dict.fromkeys(name.rpartition(".")[2] for name in linears))
    if one_text:
        name = missing[0] if missing[0] in known else known[0]
        raise ConfigError(
            f"LoRA target_modules is one text, so a regular expression for whole paths, and '{missing[0]}' matches "
            f"none; give names as a list, as in [{name}]; the model's linears are {', '.join(known)}"
        )
    described = " or ".join(f"'{target}'{nearest(target, known)}" for target in missing)
    raise ConfigError(
        f"no module of the model matches LoRA target_modules {described}; its linears are {', '.join(known)}"
    )


def _in_layers(names: set[str], layers: Sequence[int]) -> set[str]:
    index_of = {name: int(match.group(1)) for name in names if (match := _LAYER_INDEX.match(name))}
    missing = sorted(set(layers) - set(index_of.values()))
    if missing:
        has = f"they are in layers 0 to {max(index_of.values())}" if index_of else "none of them is in a numbered layer"
        raise ConfigError(
            f"LoRA layers_to_transform asks for layers {missing}, which hold none of the target modules; {has}"
        )
    return {name for name, index in index_of.items() if index in layers}


def _head_is_tied(model: nn.Module) -> bool:
    return bool(getattr(getattr(model, "config", None), "tie_word_embeddings", False))


def _shared_weights(model: nn.Module) -> set[str]:
    """Return the paths of modules whose weight is also another module's."""
    owners: dict[int, list[str]] = {}
    for name, module in named_modules_around_adapters(model):
        weight = getattr(module, "weight", None)
        if weight is not None:
            owners.setdefault(id(weight), []).append(name)
    return {name for names in owners.values() if len(names) > 1 for name in names}
