"""Several short examples in one row of fixed length, or one each, with the documents marked.

Labels move here from "this token is learnt" to "the token that this position must predict", document by document: the
last position of a document predicts nothing, so no document predicts its neighbour. Padding is a document of its own at
the end of the row, told by length and never by id (the padding id is often the end-of-text id).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_frozen.autograd.cross_entropy import IGNORED_TARGET as IGNORED
from megatron_frozen.errors import DataError


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
    """Rows filled one by one, the same ones for the same examples in the same order.

    Each row takes the longest example left, then those of the rest that fill the remaining room best (the "minimum bin
    slack" rule; best-fit-decreasing leaves 5 % of padding on the default data set, this 0.2 %). Rows come out in the
    order of their first example in the data. DataError if an example is longer than `seq_length`.
    """
    by_length: dict[int, list[int]] = {}
    for index in reversed(range(len(examples))):
        by_length.setdefault(len(examples[index].input_ids), []).append(index)
    rows = []
    while by_length:
        longest = max(by_length)
        row = [_take(by_length, longest)]
        row += [_take(by_length, length) for length in _best_fill(by_length, room=seq_length - longest)]
        rows.append(sorted(row))
    return [_row([examples[i] for i in row], seq_length=seq_length, pad_id=pad_id) for row in sorted(rows)]


def _take(by_length: dict[int, list[int]], length: int) -> int:
    index = by_length[length].pop()
    if not by_length[length]:
        del by_length[length]
    return index


def _best_fill(by_length: dict[int, list[int]], *, room: int) -> list[int]:
    """Lengths whose sum is the largest possible up to `room`: subset sums as the bits of one integer."""
    sums, steps = 1, []  # bit n of `sums`: some choice adds up to n; `steps`: a length, and the sums without it
    in_room = (1 << (room + 1)) - 1 if room > 0 else 1
    for length in sorted((length for length in by_length if length <= room), reverse=True):
        for _ in range(min(len(by_length[length]), room // length)):
            if sums >> room:
                break  # full to the last token
            steps.append((length, sums))
            sums = (sums | sums << length) & in_room
    total, chosen = sums.bit_length() - 1, []
    for length, sums_without in reversed(steps):
        if not sums_without >> total & 1:
            chosen.append(length)
            total -= length
    return chosen


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
