"""A Hugging Face checkpoint folder into a sharded CausalLM, each rank reading its slices, and back into one."""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron_frozen.checkpoint.shared_folder import shared_folder
from megatron_frozen.comm import (
    WORLD,
    Group,
    chosen_group,
    get_data_parallel_group,
    get_tensor_model_parallel_group,
    group_rank,
    group_size,
    on_first_rank,
    together,
)
from megatron_frozen.comm.groups import AnyGroup
from megatron_frozen.errors import CheckpointError, ConfigError
from megatron_frozen.io import SafetensorsFolder, read_json, write_json, write_safetensors
from megatron_frozen.io.safetensors_folder import INDEX_NAME, WEIGHTS_NAME
from megatron_frozen.layers import ModelParallelConfig
from megatron_frozen.lora import named_lora_layers
from megatron_frozen.models import CausalLM, DecoderConfig, check_tensor_parallel
from megatron_frozen.params import gather_full, is_sharded, set_tensor_model_parallel_attributes, whole

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Tensors of older checkpoints that the configuration says again.
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)
_DTYPES = ("BF16", "F16", "F32", "F64")
_SIDE_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
_MAX_FILE_BYTES = 5 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Weight:
    """One tensor of a folder to write."""

    key: str
    """Its name in the folder."""
    parameter: nn.Parameter
    """The parameter that says how it is sharded."""
    shard: Callable[[], Tensor]
    """Makes this rank's part, in `dtype`."""
    dtype: torch.dtype
    """What is written."""


def load_hf_folder(
    folder: str | Path,
    *,
    parallel: ModelParallelConfig,
    tp_group: Group = None,
    cut: Callable[[CausalLM], None] | None = None,
) -> CausalLM:
    """The model of a Hugging Face folder, cast to `parallel.params_dtype`. Each rank reads its own slices only.

    `tp_group=None` means the group of initialize_model_parallel. Rows that pad the vocabulary are zero. Every rank of
    the group calls it (of all groups, with data parallelism), and if one fails, all raise.

    `cut` gets the model while its parameters are on the meta device, shards them by FSDP2 and allocates what is left;
    only that is read then, so a rank never holds more than its parts and one tensor being read.

    Raises ConfigError if config.json describes a model that this package does not run, or that the group's size does
    not divide, before a weight is read; CheckpointError if the folder is no checkpoint, a file is broken, or tensors
    are missing, unexpected or of another shape, with their names. Collectives: a few small objects.
    """
    group = chosen_group(tp_group)
    doing = f"loading {folder}"
    with together(group=_replicas(group), doing=doing), together(group=group, doing=doing):
        return _load(Path(folder), parallel=parallel, group=group, cut=cut)


def save_hf_folder(
    model: CausalLM, folder: str | Path, *, source_folder: str | Path | None = None, dtype: torch.dtype | None = None
) -> None:
    """Write the model, gathered, as a Hugging Face folder: the same files at any TP size, without vocabulary padding.

    `source_folder`, where the model came from, lends its config.json and tokenizer files; without it config.json is
    made from the model and there is no tokenizer. `dtype=None` keeps the parameters' own. The folder appears when it is
    complete; it must be new or empty. Every rank calls it. Collectives: one all-gather per sharded tensor.

    Raises ConfigError if the model carries adapters or `source_folder` is of another model, CheckpointError if the
    folder is in use.
    """
    if any(named_lora_layers(model)):
        raise ConfigError(
            "the model carries LoRA adapters; save those with save_adapter, or the whole with merge_adapter"
        )
    weights = []
    for key, parameter in model.named_parameters():
        target = dtype or parameter.dtype
        weights.append(
            Weight(key=key, parameter=parameter, shard=lambda p=parameter, t=target: p.detach().to(t), dtype=target)
        )
    write_hf_folder(model, folder, weights=weights, source_folder=source_folder)


def write_hf_folder(
    model: CausalLM,
    folder: str | Path,
    *,
    weights: list[Weight],
    source_folder: str | Path | None,
    max_file_bytes: int = _MAX_FILE_BYTES,
) -> None:
    """Write `weights` and what belongs beside them; see save_hf_folder. Rank 0 holds one file's tensors at a time.

    Where FSDP cut the parameters, every rank of the world brings its part."""
    write = partial(
        _write, model, Path(folder), weights=weights, source_folder=source_folder, max_file_bytes=max_file_bytes
    )
    if any(isinstance(weight.parameter, DTensor) for weight in weights):
        write(writers=WORLD)
        return
    replicas = _replicas(model.tp_group)
    # Data-parallel copies are equal: the first writes, and the others learn whether it could.
    with together(group=replicas, doing=f"writing {folder}"):
        if group_rank(replicas) == 0:
            write(writers=model.tp_group)


def _replicas(tp_group: Group) -> Group:
    """The data-parallel group that goes with a tensor-parallel group; none goes with a group of the caller's own."""
    return get_data_parallel_group() if tp_group is get_tensor_model_parallel_group() else None


def _load(
    folder: Path, *, parallel: ModelParallelConfig, group: Group, cut: Callable[[CausalLM], None] | None
) -> CausalLM:
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} holds no config.json; give a Hugging Face checkpoint folder")
    config = DecoderConfig.from_hf(read_json(folder / "config.json"))
    check_tensor_parallel(config, group_size(group))
    files = SafetensorsFolder(folder)
    parallel = dataclasses.replace(parallel, perform_initialization=False)
    # First without memory, which sizes that are wrong in config.json may ask for beyond any machine.
    with torch.device("meta"):  # which the layers take with use_cpu_initialization
        model = CausalLM(config, parallel=dataclasses.replace(parallel, use_cpu_initialization=True), tp_group=group)
    problems = list(_misfits(files, dict(model.named_parameters()), config=config, group=group))
    if problems:
        shown = "; ".join(problems[:4]) + (f"; and {len(problems) - 4} more" if len(problems) > 4 else "")
        raise CheckpointError(
            f"{folder} does not fit its config.json: {shown}; take weights and config.json from the same checkpoint"
        )
    if cut:
        cut(model)
    else:
        model = CausalLM(config, parallel=parallel, tp_group=group)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            _read_into(parameter, files, key=key, group=group)
    model.source_folder = str(folder)
    return model


def _misfits(
    files: SafetensorsFolder, parameters: dict[str, nn.Parameter], *, config: DecoderConfig, group: Group
) -> Iterator[str]:
    present = {key for key in files.keys() if not key.endswith(_IGNORED_SUFFIXES)}  # noqa: SIM118 (no dict)
    for key in parameters.keys() - present:
        hint = " (which only tie_word_embeddings true does without)" if key == _HEAD else ""
        yield f"{key} is missing{hint}"
    for key in sorted(present - parameters.keys()):
        if key != _HEAD or not config.tie_word_embeddings:
            yield f"the model has no {key}"
        elif not _same_rows(files, parameters[_EMBEDDING], group=group):
            yield f"{_HEAD} differs from {_EMBEDDING} although tie_word_embeddings is true"
    for key in parameters.keys() & present:
        found, expected = (
            files.shape(key),
            _full_shape(parameters[key], key=key, vocab_size=config.vocab_size, group=group),
        )
        if found != expected:
            yield f"{key} has shape {list(found)} instead of {list(expected)}"
        if files.dtype(key) not in _DTYPES:
            yield f"{key} is stored as {files.dtype(key)}, and only {', '.join(_DTYPES)} can be read"


def _full_shape(parameter: nn.Parameter, *, key: str, vocab_size: int, group: Group) -> tuple[int, ...]:
    """The parameter's shape in the folder: gathered, and without the rows that pad the vocabulary."""
    shape = list(parameter.shape)
    dim = _partition_dim(parameter)
    if dim is not None:
        shape[dim] *= group_size(group)
    if key in (_EMBEDDING, _HEAD):
        shape[0] = vocab_size
    return tuple(shape)


def _partition_dim(parameter: Any) -> int | None:
    """The dim that a parameter is cut along, in one piece per rank; None if each rank holds all of it."""
    return parameter.partition_dim if is_sharded(parameter) else None


def _read_into(parameter: nn.Parameter, files: SafetensorsFolder, *, key: str, group: Group) -> None:
    """Fill this rank's shard from the folder; rows past the folder's last one pad the vocabulary and become zero."""
    dim = _partition_dim(parameter)
    if isinstance(parameter, DTensor):
        _read_rows_into(
            parameter, files, key=key, offset=0 if dim is None else group_rank(group) * parameter.shape[dim]
        )
        return
    if dim is None:
        parameter.copy_(files.read(key))
        return
    start = min(group_rank(group) * parameter.shape[dim], files.shape(key)[dim])
    stop = min(start + parameter.shape[dim], files.shape(key)[dim])
    parameter.narrow(dim, 0, stop - start).copy_(files.read(key, start=start, stop=stop, dim=dim))
    parameter.narrow(dim, stop - start, parameter.shape[dim] - (stop - start)).zero_()


def _read_rows_into(parameter: DTensor, files: SafetensorsFolder, *, key: str, offset: int) -> None:
    """Fill the rows that FSDP left this rank of its tensor-parallel shard, which starts at `offset`."""
    local, dim, num_rows = parameter.to_local(), _partition_dim(parameter), files.shape(key)[0]
    rows_per_rank = -(-parameter.shape[0] // parameter.device_mesh.size())
    start = parameter.device_mesh.get_local_rank() * rows_per_rank + (offset if dim == 0 else 0)
    start = min(start, num_rows)
    stop = min(start + local.shape[0], num_rows)
    rows = files.read(key, start=start, stop=stop)
    local[: stop - start].copy_(rows.narrow(1, offset, local.shape[1]) if dim == 1 else rows)
    local[stop - start :].zero_()


def _same_rows(files: SafetensorsFolder, embedding: nn.Parameter, *, group: Group) -> bool:
    """Whether the output layer that a tied checkpoint holds as well is the embedding, in this rank's rows."""
    if files.shape(_HEAD) != files.shape(_EMBEDDING):
        return False
    start = group_rank(group) * embedding.shape[0]
    head, rows = (files.read(key, start=start, stop=start + embedding.shape[0]) for key in (_HEAD, _EMBEDDING))
    return torch.equal(head, rows)


def _write(
    model: CausalLM,
    folder: Path,
    *,
    weights: list[Weight],
    source_folder: str | Path | None,
    max_file_bytes: int,
    writers: AnyGroup,
) -> None:
    """Gather onto the first of `writers` and write there; all of them call it."""
    group, doing = model.tp_group, f"writing {folder}"
    sizes = {weight.key: _written_bytes(weight, vocab_size=model.config.vocab_size, group=group) for weight in weights}
    plan = _split(weights, sizes=sizes, max_file_bytes=max_file_bytes)
    make_config = partial(_config_to_write, model.config, source_folder, dtype=weights[0].dtype)
    config = on_first_rank(make_config, group=writers, doing=doing)
    with shared_folder(folder, group=writers) as temporary:
        for name, part in plan.items():
            tensors = _gather(part, vocab_size=model.config.vocab_size, group=group, keep=group_rank(writers) == 0)
            write = partial(write_safetensors, temporary / name, tensors)
            on_first_rank(write, group=writers, doing=doing)

        def finish() -> None:
            write_json(temporary / "config.json", config)
            if len(plan) > 1:
                weight_map = {weight.key: name for name, part in plan.items() for weight in part}
                index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
                write_json(temporary / INDEX_NAME, index)
            for name in _SIDE_FILES:
                if source_folder is not None and Path(source_folder, name).is_file():
                    shutil.copyfile(Path(source_folder, name), temporary / name)

        on_first_rank(finish, group=writers, doing=doing)


def _split(weights: list[Weight], *, sizes: dict[str, int], max_file_bytes: int) -> dict[str, list[Weight]]:
    """File names and what goes in them, in order, none larger than the limit (a tensor that is, gets its own)."""
    parts: list[list[Weight]] = [[]]
    room = max_file_bytes
    for weight in weights:
        if sizes[weight.key] > room and parts[-1]:
            parts.append([])
            room = max_file_bytes
        parts[-1].append(weight)
        room -= sizes[weight.key]
    if len(parts) == 1:
        return {WEIGHTS_NAME: parts[0]}
    return {f"model-{i:05}-of-{len(parts):05}.safetensors": part for i, part in enumerate(parts, start=1)}


def _written_bytes(weight: Weight, *, vocab_size: int, group: Group) -> int:
    return (
        math.prod(_full_shape(weight.parameter, key=weight.key, vocab_size=vocab_size, group=group))
        * weight.dtype.itemsize
    )


def _gather(weights: list[Weight], *, vocab_size: int, group: Group, keep: bool) -> dict[str, Tensor]:
    """The tensors to write, on the CPU of the rank that is to `keep` them; empty on the others. One all-gather per
    sharded tensor, and one more where FSDP cut it too."""
    tensors = {}
    for weight in weights:
        shard, dim = whole(weight.shard()), _partition_dim(weight.parameter)
        if dim is not None:
            set_tensor_model_parallel_attributes(shard, is_parallel=True, dim=dim, stride=1)
        full = gather_full(shard, group=group)
        if keep:
            tensors[weight.key] = (full[:vocab_size] if weight.key in (_EMBEDDING, _HEAD) else full).cpu()
    return tensors


def _config_to_write(config: DecoderConfig, source_folder: str | Path | None, *, dtype: torch.dtype) -> dict[str, Any]:
    """config.json of `source_folder`, or one made from `config`, with the dtype that is written."""
    written = config.to_hf()
    if source_folder is not None:
        written = read_json(Path(source_folder, "config.json"))
        if DecoderConfig.from_hf(written) != config:
            raise ConfigError(f"{source_folder} holds another model than this one; give the folder it was loaded from")
    # transformers 5 writes `dtype` and reads both, transformers 4 only the longer name.
    written.pop("dtype", None)
    return {**written, "torch_dtype": str(dtype).removeprefix("torch.")}
