"""A data file as rows that are ready for the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


def load_dataset(path: str, tokenizer: Tokenizer, *, config: TrainConfig) -> Dataset:
    """Read, encode and pack the file `path`. DataError with file and line if that cannot be done."""
    rows, read_report = read_rows(path, on_bad_line=config.on_bad_line)
    examples, encode_report = encode_rows(
        rows, tokenizer, seq_length=config.seq_length, source=path, on_bad_line=config.on_bad_line
    )
    into_rows = pack if config.packing else one_per_row
    packed = into_rows(examples, seq_length=config.seq_length, pad_id=tokenizer.pad_id)
    reports = (f"read {read_report}", f"encoded {encode_report}, in {len(packed)} rows of {config.seq_length} tokens")
    return Dataset(rows=rows, packed=packed, reports=reports)
