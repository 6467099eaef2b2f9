"""A data file as rows that are ready for the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_frozen.errors import DataError
from megatron_frozen.io import read_json
from megatron_frozen.models import DecoderConfig
from megatron_frozen.train.chat import encode_rows
from megatron_frozen.train.config import TrainConfig
from megatron_frozen.train.data import Row, read_rows
from megatron_frozen.train.packing import PackedRow, one_per_row, pack
from megatron_frozen.train.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Dataset:
    """The rows of one file."""

    rows: Sequence[Row]
    """As they are in the file."""
    packed: Sequence[PackedRow]
    """As the model takes them."""
    reports: tuple[str, ...]
    """What was kept, cut and left out."""


def load_dataset(path: str, tokenizer: Tokenizer, *, config: TrainConfig, model_folder: Path) -> Dataset:
    """Read, encode and pack the file `path`, for the model in `model_folder`. DataError if that cannot be done, naming
    the file, and the line where it is one."""
    rows, read_report = read_rows(path, on_bad_line=config.on_bad_line)
    examples, encode_report = encode_rows(
        rows, tokenizer, seq_length=config.seq_length, source=path, on_bad_line=config.on_bad_line
    )
    into_rows = pack if config.packing else one_per_row
    packed = into_rows(examples, seq_length=config.seq_length, pad_id=tokenizer.pad_id)
    check_token_ids([max(row.input_ids) for row in packed], model_folder=model_folder, source=path)
    num_rows = "1 row" if len(packed) == 1 else f"{len(packed)} rows"
    reports = (f"read {read_report}", f"encoded {encode_report}, in {num_rows} of {config.seq_length} tokens")
    return Dataset(rows=rows, packed=packed, reports=reports)


def check_token_ids(token_ids: Sequence[int], *, model_folder: Path, source: str) -> None:
    """DataError if the model in `model_folder` has no embedding for one of `token_ids`, which are made of `source`."""
    vocab_size = DecoderConfig.from_hf(read_json(model_folder / "config.json")).vocab_size
    largest = max(token_ids, default=0)
    if largest >= vocab_size:
        raise DataError(
            f"{source} has the token id {largest} (padding included), and the model in {model_folder} takes ids below "
            f"{vocab_size}; put the tokenizer files there that came with its weights"
        )
