"""Several short examples in one row of fixed length, or one each, with the documents marked.

Labels move here from "this token is learnt" to "the token that this position must predict", document by document: the
last position of a document predicts nothing, so no document predicts its neighbour. Padding is a document of its own at
the end of the row, told by length and never by id (the padding id is often the end-of-text id).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_frozen.errors import DataError

IGNORED = -100


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One document."""

    input_ids: Sequence[int]
    """Its tokens."""
    labels: Sequence[int]
    """The same tokens where they are learnt, -100 elsewhere. Not shifted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedRow:
    """One row of `seq_length` tokens."""

    input_ids: Sequence[int]
    """Tokens, padding last."""
    labels: Sequence[int]
    """For each position the token it must predict, -100 = none. Shifted, as Megatron's labels are."""
    document_lengths: tuple[int, ...]
    """Lengths of the documents in order; they sum to `seq_length`. Padding, where there is any, is the last one."""


def pack(examples: Sequence[Example], *, seq_length: int, pad_id: int) -> list[PackedRow]:
    """As few rows as best-fit-decreasing finds, the same ones for the same examples in the same order.

    Each example, longest first, goes to the row with the least room that still holds it. Rows come out in the order of
    their first example in the data. DataError if an example is longer than `seq_length`.
    """
    by_length = sorted(range(len(examples)), key=lambda index: -len(examples[index].input_ids))
    rows: list[list[int]] = []
    rows_with_room: dict[int, list[int]] = {}
    rooms = 0  # bit r is set where some row has room for r tokens: the best fit is the lowest set bit from `length` up
    for index in by_length:
        length = len(examples[index].input_ids)
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = rows_with_room[room].pop()
            if not rows_with_room[room]:
                rooms &= ~(1 << room)
        else:
            room, row = seq_length, len(rows)
            rows.append([])
        rows[row].append(index)
        if room > length:
            rows_with_room.setdefault(room - length, []).append(row)
            rooms |= 1 << (room - length)
    in_data_order = sorted(sorted(row) for row in rows)
    return [_row([examples[i] for i in row], seq_length=seq_length, pad_id=pad_id) for row in in_data_order]


def one_per_row(examples: Sequence[Example], *, seq_length: int, pad_id: int) -> list[PackedRow]:
    """Packing off: each example padded to `seq_length`. DataError if one is longer."""
    return [_row([example], seq_length=seq_length, pad_id=pad_id) for example in examples]


def _row(documents: Iterable[Example], *, seq_length: int, pad_id: int) -> PackedRow:
    input_ids, labels, lengths = array("i"), array("i"), []
    for document in documents:
        input_ids.extend(document.input_ids)
        labels.extend(document.labels[1:])
        labels.append(IGNORED)
        lengths.append(len(document.input_ids))
    padding = seq_length - len(input_ids)
    if padding < 0:
        raise DataError(f"an example has {len(input_ids)} tokens, a row holds {seq_length}; cut it when encoding")
    if padding:
        input_ids.extend([pad_id] * padding)
        labels.extend([IGNORED] * padding)
        lengths.append(padding)
    return PackedRow(input_ids=input_ids, labels=labels, document_lengths=tuple(lengths))
