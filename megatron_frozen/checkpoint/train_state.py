"""Checkpoints of a running job: all that the next step depends on, in full tensors, so any number of ranks can resume.

One checkpoint is a folder `step_00000010` with

| entry | what it holds |
|---|---|
| `adapter/` or `model/` | the trainable parameters: a PEFT adapter, or with full fine-tuning a Hugging Face folder |
| `optimizer.safetensors` | AdamW's moments (full tensors) and step counters by parameter name |
| `random.safetensors` | the state of torch's generators, per data-parallel rank: tensor-parallel ones have the same |
| `state.json` | step, place in the data, and whatever else the job wants to know again |
| `complete.json` | the size of every other file; written last |

The folder gets its name when all of it is on disk. It counts as complete only if its files have the sizes in the mark.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from megatron_frozen.checkpoint.shared_folder import shared_folder
from megatron_frozen.comm import (
    Group,
    gather_objects,
    get_data_parallel_rank,
    get_data_parallel_world_size,
    group_rank,
    group_size,
    on_first_rank,
)
from megatron_frozen.errors import CheckpointError
from megatron_frozen.io import read_json, read_safetensors, write_json, write_safetensors
from megatron_frozen.params import gather_full, is_sharded, set_tensor_model_parallel_attributes, shard_of, whole

COMPLETE_MARK = "complete.json"
_OPTIMIZER, _RANDOM, _STATE = "optimizer.safetensors", "random.safetensors", "state.json"
_MOMENTS = ("exp_avg", "exp_avg_sq")


def checkpoint_name(step: int) -> str:
    """The folder name of the checkpoint after `step` optimizer steps."""
    return f"step_{step:08d}"


def save_checkpoint(
    folder: Path,
    *,
    save_model: Callable[[Path], None],
    parameters: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    group: Group,
    state: Mapping[str, Any],
) -> None:
    """Write the checkpoint `folder`, replacing a partial or older one of that name. Every rank of the job calls it.

    `save_model(folder)` writes the parameters, on all ranks together; `group` is the tensor-parallel group; `state` is
    JSON. Raises on every rank if any rank fails, and then leaves nothing. Collectives: one gather per moment, those of
    `save_model`, and small objects.
    """
    moments = _gather_optimizer(parameters, optimizer, group=group)
    random_states: dict[str, Tensor] = {}
    for rank, kinds in gather_objects((get_data_parallel_rank(), _random_state())):
        random_states.update({f"rank_{rank}.{kind}": value for kind, value in kinds.items()})
    with shared_folder(folder, replace=True) as temporary:
        save_model(temporary)

        def write_rest() -> None:
            write_safetensors(temporary / _OPTIMIZER, moments)
            write_safetensors(temporary / _RANDOM, random_states)
            write_json(temporary / _STATE, dict(state))
            write_json(temporary / COMPLETE_MARK, _sizes(temporary))

        on_first_rank(write_rest, doing=f"saving the checkpoint {folder}")


def newest_complete(checkpoints: Path) -> tuple[Path | None, list[Path]]:
    """The complete checkpoint of the highest step in `checkpoints`, and the newer ones that are not complete."""
    incomplete = []
    for folder in _by_step(checkpoints):
        if is_complete(folder):
            return folder, incomplete
        incomplete.append(folder)
    return None, incomplete


def is_complete(folder: Path) -> bool:
    """Whether the checkpoint has its mark and every file that the mark names, in its full size."""
    try:
        marked = read_json(folder / COMPLETE_MARK)
    except CheckpointError:
        return False
    # Not equality: a file that somebody laid beside them does no harm.
    return bool(marked) and marked.items() <= _sizes(folder).items()


def prune(checkpoints: Path, *, keep: int) -> None:
    """Delete all but the `keep` newest complete checkpoints in the folder `checkpoints`. One rank calls it.

    A folder that is not complete counts for nothing: one with a high number must not push out those that can be used.
    """
    folders = _by_step(checkpoints)
    complete = [folder for folder in folders if is_complete(folder)]
    if len(complete) < keep:
        return
    for folder in folders[folders.index(complete[keep - 1]) + 1 :]:
        (folder / COMPLETE_MARK).unlink(missing_ok=True)  # first, so that half a deletion is no checkpoint
        shutil.rmtree(folder)


def load_state(folder: Path) -> dict[str, Any]:
    """The `state` that was given to `save_checkpoint`. Raises CheckpointError if the checkpoint is not complete."""
    if not is_complete(folder):
        raise CheckpointError(
            f"{folder} is no complete checkpoint; give a folder step_NNNNNNNN that holds {COMPLETE_MARK}"
        )
    with saying_what_to_remove(folder):
        return read_json(folder / _STATE)


@contextmanager
def saying_what_to_remove(folder: Path | None) -> Iterator[None]:
    """Add to a CheckpointError about a file in the checkpoint `folder` how to go on; None: there is no checkpoint."""
    try:
        yield
    except CheckpointError as error:
        if folder is None or str(folder) not in str(error):
            raise
        raise CheckpointError(f"{error}; to go on from an older checkpoint, remove the folder {folder}") from error


def load_optimizer(
    folder: Path, *, parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, group: Group
) -> None:
    """Give `optimizer` its moments and step counters back, this rank's parts of them. No collectives.

    Raises CheckpointError, before anything is changed, where a parameter is missing or has another shape.
    """
    saved = read_safetensors(folder / _OPTIMIZER)
    states = {}
    for name, param in parameters.items():
        missing = [f"{name}.{part}" for part in ("step", *_MOMENTS) if f"{name}.{part}" not in saved]
        if missing:
            raise CheckpointError(f"{folder / _OPTIMIZER} lacks {missing[0]}; it belongs to another model or adapter")
        states[param] = {"step": saved[f"{name}.step"]}
        for part in _MOMENTS:
            full = saved[f"{name}.{part}"]
            states[param][part] = _part_of(full, param, group=group, what=f"{name}.{part} in {folder / _OPTIMIZER}")
    optimizer.state.update(states)


def load_random_state(folder: Path) -> bool:
    """Restore this rank's random state; False, and nothing done, if it is of another number of data-parallel ranks."""
    saved = read_safetensors(folder / _RANDOM)
    if len(saved) != get_data_parallel_world_size() * len(_random_state()):
        return False
    rank = get_data_parallel_rank()
    torch.set_rng_state(saved[f"rank_{rank}.cpu"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(saved[f"rank_{rank}.cuda"])
    return True


def _gather_optimizer(
    parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, *, group: Group
) -> dict[str, Tensor]:
    """Moments in full and step counters, on the first rank of `group`; nothing on the others."""
    tensors = {}
    for name, param in parameters.items():
        state = optimizer.state[param]
        gathered = {part: _full(state[part], like=param, group=group) for part in _MOMENTS}
        if group_rank(group) == 0:
            tensors.update(
                {f"{name}.{part}": value.cpu() for part, value in {**gathered, "step": state["step"]}.items()}
            )
    return tensors


def _full(moment: Tensor, *, like: Tensor, group: Group) -> Tensor:
    """The full tensor of a moment, which is sharded as its parameter is, over either kind of ranks."""
    sharded = whole(moment.detach())
    if is_sharded(like):
        dim, stride = like.partition_dim, like.partition_stride  # pyright: ignore[reportAttributeAccessIssue]
        set_tensor_model_parallel_attributes(sharded, True, dim, stride)  # noqa: FBT003 (Megatron's signature)
    return gather_full(sharded, group=group)


def _part_of(full: Tensor, param: Tensor, *, group: Group, what: str) -> Tensor:
    """This rank's part of a full moment. Rows that only pad the vocabulary (all zero) are cut or added as needed."""
    sharded, shape = is_sharded(param), list(param.shape)
    dim, stride = (param.partition_dim, param.partition_stride) if sharded else (0, 1)  # pyright: ignore[reportAttributeAccessIssue]
    shape[dim] *= group_size(group) if sharded else 1
    if sharded:
        num_extra = full.shape[dim] - shape[dim]
        if num_extra > 0 and not full.narrow(dim, shape[dim], num_extra).any():
            full = full.narrow(dim, 0, shape[dim])
        elif num_extra < 0:
            padding = [*full.shape[:dim], -num_extra, *full.shape[dim + 1 :]]
            full = torch.cat([full, full.new_zeros(padding)], dim=dim)
    if list(full.shape) != shape:
        raise CheckpointError(f"{what} has shape {list(full.shape)} instead of {shape}; it belongs to another model")
    part = shard_of(full, partition_dim=dim, group=group, stride=stride) if sharded else full
    part = part.to(param.device)
    if not isinstance(param, DTensor):
        return part
    # A copy, as the slice would keep the rest alive.
    return distribute_tensor(part, param.device_mesh, param.placements, src_data_rank=None).clone()


def _random_state() -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _sizes(folder: Path) -> dict[str, Any]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != COMPLETE_MARK]
    return {str(path.relative_to(folder)): path.stat().st_size for path in files}


def _by_step(checkpoints: Path) -> list[Path]:
    folders = [path for path in checkpoints.glob("step_*") if path.is_dir() and path.name[5:].isdecimal()]
    return sorted(folders, key=lambda path: int(path.name[5:]), reverse=True)
