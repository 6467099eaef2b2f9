"""Adapters in PEFT's files: adapter_config.json and adapter_model.safetensors, the same at any tensor-parallel size.

The files hold full factors in fp32, A (r, in) and B (out, r), under Hugging Face names. The maps between our names and
PEFT's are the tables below; both directions are read from them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from megatron_frozen.comm import WORLD, Group, group_size, on_first_rank, together
from megatron_frozen.errors import CheckpointError
from megatron_frozen.io import atomic_folder, read_json, read_safetensors, write_json, write_safetensors
from megatron_frozen.lora.apply import adapter_names, check_new_name, install, layers_of, set_active_adapter
from megatron_frozen.lora.config import LoraConfig
from megatron_frozen.lora.layer import LoraLinear, base_of
from megatron_frozen.lora.targets import find_targets, named_modules_around_adapters
from megatron_frozen.params import shard_of

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"

KEY_PREFIX = "base_model.model."

CONFIG_FIELDS = {
    "r": "r",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "target_modules": "target_modules",
    "use_rslora": "use_rslora",
    "layers_to_transform": "layers_to_transform",
}
"""From LoraConfig's fields to PEFT's."""

CONSTANT_FIELDS: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "auto_mapping": None,
    "revision": None,
    "inference_mode": True,
    "bias": "none",
    "fan_in_fan_out": False,
    "init_lora_weights": True,
    "modules_to_save": None,
    "layers_pattern": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "use_dora": False,
}
"""What else the written config says: fields that every PEFT version since rsLoRA knows."""

PASSED_OVER = {
    "task_type", "auto_mapping", "revision", "inference_mode", "base_model_name_or_path", "peft_version",
    "megatron_core", "qalora_group_size", "eva_config",
}  # fmt: skip
"""Fields that do not change what an adapter computes. Any other one that we read must be empty or as listed next."""

ALLOWED_VALUES: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "layers_pattern": ("layers", ["layers"]),
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal"),  # the others change the base weights as well
}


def peft_key(layer_name: str, factor: str) -> str:
    """Return PEFT's key for the ``factor`` (lora_A or lora_B) of the linear at ``layer_name``."""
    return f"{KEY_PREFIX}{layer_name}.{factor}.weight"


def config_to_peft(config: LoraConfig, *, base_model_name: str | None) -> dict[str, Any]:
    """Return the content of adapter_config.json."""
    values = {theirs: getattr(config, ours) for ours, theirs in CONFIG_FIELDS.items()}
    values = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
    if config.alpha == int(config.alpha):
        values["lora_alpha"] = int(config.alpha)  # PEFT's type
    return dict(sorted({**CONSTANT_FIELDS, **values, "base_model_name_or_path": base_model_name}.items()))


def config_from_peft(values: dict[str, Any], *, dtype: torch.dtype | None = torch.float32) -> LoraConfig:
    """Return the LoraConfig that the content of an adapter_config.json stands for.

    Raises:
        CheckpointError: it asks for something that would compute another function than LoRA as implemented here.
    """
    known = PASSED_OVER | set(CONFIG_FIELDS.values())
    for field, value in values.items():
        if field in known or value in ALLOWED_VALUES.get(field, ()) or (not value and field != "peft_type"):
            continue
        allowed = " or ".join(map(repr, ALLOWED_VALUES.get(field, ()))) or "empty"
        raise CheckpointError(
            f"{CONFIG_NAME} sets {field} to {value!r}, and only {allowed} is supported; "
            f"train or convert the adapter without it"
        )
    missing = [field for field in ("peft_type", "r", "lora_alpha", "target_modules") if values.get(field) is None]
    if missing:
        raise CheckpointError(
            f"{CONFIG_NAME} has no {', '.join(missing)}; give a folder that PEFT or save_adapter wrote"
        )
    given = {ours: values[theirs] for ours, theirs in CONFIG_FIELDS.items() if values.get(theirs) is not None}
    layers = given.get("layers_to_transform")
    given["layers_to_transform"] = [layers] if isinstance(layers, int) else (layers or None)
    return LoraConfig(**given, dtype=dtype)


def save_adapter(
    model: nn.Module,
    folder: str | Path,
    *,
    adapter_name: str = "default",
    base_model_name: str | None = None,
    replace: bool = False,
) -> None:
    """Write an adapter as PEFT does, from rank 0, whatever the tensor-parallel size; every rank calls it.

    base_model_name is what PEFT shall load the adapter on (a path or hub name); None means the model's source_folder.
    The folder appears complete or not at all; one that holds files already is an error unless ``replace``. Collectives:
    an all-gather of each sharded factor, and small object exchanges over the world.

    Raises:
        ConfigError: the adapter is not on the model.
        CheckpointError: the folder cannot be written; the other ranks raise ParallelError then.
    """
    with together(group=WORLD, doing="saving an adapter"):
        layers = layers_of(model, adapter_name)
    tensors: dict[str, torch.Tensor] = {}
    for name, layer in layers.items():
        full_A, full_B = layer.full_factors(adapter_name)
        tensors[peft_key(name, "lora_A")] = full_A.detach().float()
        tensors[peft_key(name, "lora_B")] = full_B.detach().float()[: _out_features(layer, name=name, model=model)]
    if base_model_name is None:
        base_model_name = getattr(model, "source_folder", None)
    config = config_to_peft(next(iter(layers.values())).adapters[adapter_name], base_model_name=base_model_name)

    write_folder(folder, tensors, config, replace=replace)


def write_folder(
    folder: str | Path, tensors: dict[str, torch.Tensor], config: dict[str, Any], *, replace: bool
) -> None:
    """Write PEFT's two files from rank 0; every rank calls it. Collectives and errors: as ``save_adapter``."""

    def write() -> None:
        if not replace and Path(folder).is_dir() and any(Path(folder).iterdir()):
            raise CheckpointError(
                f"{folder} already holds files; give a new or empty folder, or replace=True to overwrite it"
            )
        with atomic_folder(folder, replace=replace) as temporary:
            write_safetensors(temporary / WEIGHTS_NAME, tensors)
            write_json(temporary / CONFIG_NAME, config)

    on_first_rank(write, group=WORLD, doing=f"saving the adapter to {folder}")


def load_adapter(
    model: nn.Module, folder: str | Path, *, adapter_name: str = "default", dtype: torch.dtype | None = torch.float32
) -> nn.Module:
    """Read an adapter that save_adapter or PEFT wrote into ``model`` and make it the active one; every rank calls it.

    If ``adapter_name`` is on the model its values are replaced, in their dtype, and its rank, scale and layers must be
    those of the folder; else it is applied as the folder says, in ``dtype`` whatever the file's (None: the base
    weight's). Each rank keeps its parts. Collectives: small object exchanges over the world. Returns ``model``.

    Raises:
        CheckpointError: a file is missing or broken, a key is missing, unexpected or of another shape, or the config
            asks for what is not plain LoRA.
        ConfigError: a target does not fit the model. In either case nothing is changed.
    """
    folder = Path(folder)
    with together(group=WORLD, doing=f"loading the adapter {folder}"):
        config = read_config(folder, dtype=dtype)
        is_new = adapter_name not in adapter_names(model)
        if is_new:
            check_new_name(model, adapter_name)
        targets = find_targets(model, config)
        if not is_new:
            _check_same(config, targets=targets, layers=layers_of(model, adapter_name), adapter_name=adapter_name)
        factors = _read_factors(folder / WEIGHTS_NAME, model=model, targets=targets, r=config.r)
    if is_new:
        install(model, config, adapter_name=adapter_name, full_factors=lambda name, _layer: factors[name])
        return model
    for name, layer in layers_of(model, adapter_name).items():
        layer.set_factors(adapter_name, full_A=factors[name][0], full_B=factors[name][1])
    set_active_adapter(model, adapter_name)
    return model


def read_config(folder: Path, *, dtype: torch.dtype | None) -> LoraConfig:
    """Return the config in an adapter's folder. Raises CheckpointError where a file is missing or asks for more."""
    if not (folder / CONFIG_NAME).is_file():
        raise CheckpointError(f"{folder} holds no {CONFIG_NAME}; give a folder that PEFT or save_adapter wrote")
    if not (folder / WEIGHTS_NAME).is_file():
        raise CheckpointError(
            f"{folder} holds no {WEIGHTS_NAME}; save the adapter again with PEFT's safe_serialization=True"
        )
    return config_from_peft(read_json(folder / CONFIG_NAME), dtype=dtype)


def _check_same(
    config: LoraConfig, *, targets: dict[str, nn.Module], layers: dict[str, LoraLinear], adapter_name: str
) -> None:
    present = next(iter(layers.values())).adapters[adapter_name]
    if (present.r, present.scale, set(layers)) != (config.r, config.scale, set(targets)):
        raise CheckpointError(
            f"adapter '{adapter_name}' has r={present.r} and scale {present.scale:g} on {len(layers)} layers here, "
            f"and r={config.r} and scale {config.scale:g} on {len(targets)} in the folder; load it under another name"
        )


def _read_factors(
    path: Path, *, model: nn.Module, targets: dict[str, nn.Module], r: int
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return {path: (full A, full B)} with B padded to the layer's rows, after every key and shape was checked."""
    tensors = read_safetensors(path)
    shapes: dict[str, tuple[int, int]] = {}
    for name, module in targets.items():
        shapes[peft_key(name, "lora_A")] = (r, base_of(module).input_size)
        shapes[peft_key(name, "lora_B")] = (_out_features(module, name=name, model=model), r)
    faults = [f"has no {key}" for key in shapes if key not in tensors]
    faults += [
        f"has {key}, which is neither a target module's nor a copy of the base model's weight"
        for key, tensor in tensors.items()
        if key not in shapes and not _is_base_weight(tensor, key=key, model=model)
    ]
    faults += [
        f"has {key} of shape {list(tensors[key].shape)} where the model needs {list(shape)}"
        for key, shape in shapes.items()
        if key in tensors and tuple(tensors[key].shape) != shape
    ]
    if faults:
        more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise CheckpointError(
            f"{path} {', '.join(faults[:3])}{more}; give an adapter that was trained on this base model"
        )
    factors = {}
    for name, module in targets.items():
        full_B = tensors[peft_key(name, "lora_B")]
        full_B = nn.functional.pad(full_B, (0, 0, 0, base_of(module).output_size - full_B.shape[0]))
        factors[name] = tensors[peft_key(name, "lora_A")], full_B
    return factors


def _is_base_weight(tensor: torch.Tensor, *, key: str, model: nn.Module) -> bool:
    """Return whether a file's tensor is the weight of an embedding or output layer, which PEFT at times adds."""
    path = key.removeprefix(KEY_PREFIX).removesuffix(".weight").removesuffix(".base_layer")
    module = dict(named_modules_around_adapters(model)).get(path)
    weight = getattr(module, "weight", None)
    if module is None or weight is None or getattr(weight, "partition_dim", None) != 0:
        return False
    group = cast("Group", module.tp_group)
    num_padding = weight.shape[0] * group_size(group) - tensor.shape[0]
    if num_padding < 0 or tensor.shape[1:] != weight.shape[1:]:
        return False
    full = nn.functional.pad(tensor, (0, 0, 0, num_padding))
    shard = shard_of(full, partition_dim=0, group=group).to(weight.device)
    narrower = min(tensor.dtype, weight.dtype, key=lambda dtype: dtype.itemsize)
    return torch.equal(shard.to(narrower), weight.to(narrower))


def _out_features(linear: nn.Module, *, name: str, model: nn.Module) -> int:
    """Return the rows of B in a file: those of the layer, less the padding of a vocabulary."""
    vocab_size = getattr(getattr(model, "config", None), "vocab_size", None)
    return vocab_size if name.rpartition(".")[2] == "lm_head" and vocab_size else base_of(linear).output_size
