"""Safetensors: a checkpoint folder read slice by slice, and single files. The only file that imports safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from megatron_frozen.errors import CheckpointError, nearest
from megatron_frozen.io.atomic import atomic_write
from megatron_frozen.io.json_files import read_json

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"


class SafetensorsFolder:
    """The tensors of a Hugging Face checkpoint folder: `model.safetensors`, or an index file and its shards.

    Opening reads the headers only, and raises CheckpointError if a file is missing, cut short or contradicts the index.
    Files are memory-mapped: `read` touches only the pages of its slice and returns a copy of it that owns its memory.
    Do not shorten the files while the object lives: reading a page that is gone ends the process.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise CheckpointError(f"{folder} is not a folder; give a Hugging Face checkpoint folder")
        weights, index = self.folder / WEIGHTS_NAME, self.folder / INDEX_NAME
        if weights.is_file():
            self._file_of_key, names = {}, [WEIGHTS_NAME]
        elif index.is_file():
            self._file_of_key = _read_index(index)
            names = sorted(set(self._file_of_key.values()))
        else:
            raise CheckpointError(
                f"{folder} holds no {WEIGHTS_NAME} and no {INDEX_NAME}; give a Hugging Face checkpoint folder"
            )
        self._files: dict[str, Any] = {}
        found: dict[str, str] = {}
        for name in names:
            self._files[name] = _open(self.folder / name, named_by=None if name == WEIGHTS_NAME else index)
            for key in self._files[name].keys():  # noqa: SIM118 (a safetensors handle is no dict)
                if key in found:
                    raise CheckpointError(
                        f"{self.folder} holds {key} in both {found[key]} and {name}; keep one of them"
                    )
                found[key] = name
        for key, name in self._file_of_key.items():
            if found.get(key) != name:
                raise CheckpointError(
                    f"{index} says that {name} holds {key}, and it does not; copy or download the checkpoint again"
                )
        self._file_of_key = found

    def keys(self) -> list[str]:
        """The names of all tensors, sorted."""
        return sorted(self._file_of_key)

    def shape(self, key: str) -> tuple[int, ...]:
        """The full shape of a tensor, from its header."""
        return tuple(self._slice(key).get_shape())

    def dtype(self, key: str) -> str:
        """The dtype of a tensor as its header spells it: "BF16", "F16", "F32", ..."""
        return self._slice(key).get_dtype()

    def read(self, key: str, *, start: int | None = None, stop: int | None = None, dim: int = 0) -> torch.Tensor:
        """A contiguous CPU tensor in the file's dtype: all of `key`, or `[start:stop]` of its dimension `dim`."""
        if start is None and stop is None:
            # Not `[:]`, which safetensors refuses for a tensor without dimensions.
            return self._file(key).get_tensor(key).clone()
        view = self._slice(key)[(slice(None),) * dim + (slice(start, stop),)]
        # safetensors returns a view of the whole mapped file: the clone keeps the slice and lets the file go.
        return view.clone(memory_format=torch.contiguous_format)

    def _slice(self, key: str) -> Any:
        return self._file(key).get_slice(key)

    def _file(self, key: str) -> Any:
        if key not in self._file_of_key:
            raise CheckpointError(f"{self.folder} holds no tensor {key}{nearest(key, self._file_of_key)}")
        return self._files[self._file_of_key[key]]


def read_safetensors(path: str | Path) -> dict[str, torch.Tensor]:
    """All tensors of one file, on the CPU. Raises CheckpointError, naming the file, if it is missing or cut short."""
    _open(Path(path), named_by=None)
    return load_file(path)


def write_safetensors(path: str | Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write `tensors` to one file, atomically; any device and strides."""
    # The "pt" mark is what transformers and peft look for before they load a file.
    dense = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
    with atomic_write(path) as temporary:
        try:
            save_file(dense, temporary, metadata={"format": "pt"})
        except SafetensorError as error:
            raise CheckpointError(f"cannot write {path} ({error}); free some space or give another folder") from error


def _read_index(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f"{index} has no weight_map from tensor names to file names; copy or download it again")
    for name in weight_map.values():
        if Path(name).name != name:
            raise CheckpointError(
                f"{index} names {name}, and shards must lie in the same folder; give a plain file name"
            )
    return weight_map


def _open(path: Path, *, named_by: Path | None) -> Any:
    if not path.is_file():
        source = f"{named_by} names it" if named_by else "it was asked for"
        raise CheckpointError(f"{path} is missing, and {source}; copy or download the checkpoint again")
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise CheckpointError(
            f"{path} ({path.stat().st_size} bytes) is not a whole safetensors file ({error}); copy or download it again"
        ) from error
