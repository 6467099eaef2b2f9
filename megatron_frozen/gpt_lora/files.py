"""A GPTModel's adapters in PEFT's files, under Hugging Face names, the same at any tensor-parallel size."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from megatron_frozen.comm import WORLD, together
from megatron_frozen.errors import CheckpointError, ConfigError
from megatron_frozen.gpt_lora.apply import check_new, checked_projections, install, named_adapters
from megatron_frozen.gpt_lora.layer import ProjectionAdapters
from megatron_frozen.gpt_lora.projections import Projection, find_projections
from megatron_frozen.io import read_safetensors
from megatron_frozen.lora.factors import FullFactors
from megatron_frozen.lora.peft_files import WEIGHTS_NAME, config_to_peft, peft_key, read_config, write_folder


def save_adapter(
    model: nn.Module, folder: str | Path, *, base_model_name: str | None = None, replace: bool = False
) -> None:
    """Write the adapters as PEFT does, from rank 0; every rank calls it.

    base_model_name is what PEFT shall load the adapter on. The folder appears complete or not at all; one that holds
    files already is an error unless ``replace``. Collectives: an all-gather of each sharded factor, and small object
    exchanges over the world.

    Raises:
        ConfigError: the model carries no adapter, or is one of several pipeline stages.
        CheckpointError: the folder cannot be written; the other ranks raise ParallelError then.
    """
    with together(group=WORLD, doing="saving an adapter"):
        adapters = named_adapters(model)
        _check_whole(model)
    tensors: dict[str, torch.Tensor] = {}
    for path, module in adapters.items():
        full_A, full_B = module.full_factors(path.rpartition(".")[2])
        tensors[peft_key(path, "lora_A")] = full_A.detach().float()
        tensors[peft_key(path, "lora_B")] = full_B.detach().float()
    config = config_to_peft(next(iter(adapters.values())).config, base_model_name=base_model_name)
    config["target_modules"] = _targets(adapters, model=model)
    write_folder(folder, tensors, config, replace=replace)


def _check_whole(model: nn.Module) -> None:
    layers = {int(at.path.split(".")[2]) for at in find_projections(model)}
    num_layers = next(at.linear.config.num_layers for at in find_projections(model))
    if len(layers) < num_layers:
        raise ConfigError(
            f"the model holds layers {min(layers)} to {max(layers)} of {num_layers}, and an adapter's file holds all; "
            f"save it from a run without pipeline parallelism"
        )


def _targets(adapters: dict[str, ProjectionAdapters], *, model: nn.Module) -> list[str]:
    """Return target_modules in Hugging Face's names: last parts where each stands for adapted projections alone."""
    names = list(dict.fromkeys(path.rpartition(".")[2] for path in adapters))
    config = next(iter(adapters.values())).config
    layers = config.layers_to_transform
    expected = {
        at.path
        for at in find_projections(model)
        if at.name in names and (layers is None or int(at.path.split(".")[2]) in layers)
    }
    return names if expected == set(adapters) else list(adapters)


def load_adapter(model: nn.Module, folder: str | Path, *, dtype: torch.dtype | None = torch.float32) -> nn.Module:
    """Read an adapter that PEFT, the decoder's or this ``save_adapter`` wrote into a GPTModel; every rank calls it.

    Where the model carries none it is applied as the folder says, in ``dtype`` (None: the base weight's); else its
    values are replaced, and it must be on the same projections with the same rank and scale. Collectives: small object
    exchanges over the world. Returns ``model``.

    Raises CheckpointError for a missing, unexpected or misshapen tensor or another adapter than the model's, and
    ConfigError for a target that does not fit. Nothing is changed then.
    """
    folder = Path(folder)
    with together(group=WORLD, doing=f"loading the adapter {folder}"):
        config = read_config(folder, dtype=dtype)
        chosen = checked_projections(model, config)
        factors = _read_factors(folder / WEIGHTS_NAME, chosen, r=config.r)
        is_new = not any(isinstance(module, ProjectionAdapters) for module in model.modules())
        if not is_new:
            present = named_adapters(model)
            mine = next(iter(present.values())).config
            if (mine.r, mine.scale, set(present)) != (config.r, config.scale, set(factors)):
                raise CheckpointError(
                    f"the GPTModel's adapter has r={mine.r} and scale {mine.scale:g} on {len(present)} projections, "
                    f"the folder's r={config.r} and scale {config.scale:g} on {len(factors)}; load it into a new model"
                )
    if is_new:
        check_new(model)
        install(model, config, chosen=chosen, full_factors=lambda projection: factors[projection.path])
        return model
    for path, adapters in named_adapters(model).items():
        adapters.set_factors(path.rpartition(".")[2], full_A=factors[path][0], full_B=factors[path][1])
    return model


def _read_factors(path: Path, chosen: list[Projection], *, r: int) -> dict[str, FullFactors]:
    """Return {path of a projection: (full A, full B)} after every key and shape was checked."""
    tensors = read_safetensors(path)
    shapes: dict[str, tuple[int, int]] = {}
    for at in chosen:
        shapes[peft_key(at.path, "lora_A")] = (r, at.linear.input_size)
        shapes[peft_key(at.path, "lora_B")] = (at.output_size, r)
    faults = [f"has no {key}" for key in shapes if key not in tensors]
    faults += [f"has {key}, which is none of the GPTModel's target projections" for key in tensors if key not in shapes]
    faults += [
        f"has {key} of shape {list(tensors[key].shape)} where the GPTModel needs {list(shape)}"
        for key, shape in shapes.items()
        if key in tensors and tuple(tensors[key].shape) != shape
    ]
    if faults:
        raise CheckpointError(f"{path} {', '.join(faults[:3])}; give an adapter that was trained on this base model")
    return {at.path: (tensors[peft_key(at.path, "lora_A")], tensors[peft_key(at.path, "lora_B")]) for at in chosen}
