"""Which rows make up which step, and rows as tensors.

Shapes: B rows of a micro-batch, S tokens of its longest row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_frozen.train.packing import IGNORED, PackedRow


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One micro-batch."""

    input_ids: Tensor
    """Token ids [B, S], int64."""
    labels: Tensor
    """The token that each position must predict [B, S], int64; -100 = not trained."""
    document_lengths: list[list[int]]
    """For each row the lengths of its documents; they sum to S."""


class RowOrder:
    """An endless order of `num_rows` rows: each epoch is a new permutation that depends on the seed alone.

    A position in it says everything about how far a run has come, at any number of ranks.
    """

    def __init__(self, num_rows: int, *, seed: int) -> None:
        self._num_rows, self._seed = num_rows, seed
        self._epoch, self._permutation = -1, torch.empty(0)

    def rows(self, position: int, *, count: int) -> list[int]:
        """The row numbers at `position`, `position + 1`, ... (`count` of them)."""
        return [self._row(place) for place in range(position, position + count)]

    def _row(self, place: int) -> int:
        epoch, index = divmod(place, self._num_rows)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            self._epoch, self._permutation = epoch, torch.randperm(self._num_rows, generator=generator)
        return int(self._permutation[index])


def num_labels(rows: Sequence[PackedRow]) -> int:
    """How many tokens of `rows` are trained on."""
    return sum(1 for row in rows for label in row.labels if label != IGNORED)


def unlabelled(row: PackedRow) -> PackedRow:
    """`row` without anything to train on or to count."""
    return dataclasses.replace(row, labels=[IGNORED] * len(row.labels))


def collate(rows: Sequence[PackedRow], *, multiple_of: int, device: torch.device) -> Batch:
    """`rows` as one batch, cut after the last labelled position (in a causal model nothing later has any effect).

    The length is rounded up to `multiple_of`, which sequence parallelism needs.
    """
    longest = max(_used_length(row.labels) for row in rows)
    length = -(-longest // multiple_of) * multiple_of
    return Batch(
        input_ids=torch.tensor([_fit(row.input_ids, length, 0) for row in rows], device=device),
        labels=torch.tensor([_fit(row.labels, length, IGNORED) for row in rows], device=device),
        document_lengths=[_fit_documents(row.document_lengths, length) for row in rows],
    )


def collate_all(rows: Sequence[PackedRow], *, size: int, multiple_of: int, device: torch.device) -> list[Batch]:
    """`rows` as batches of `size` rows each; the last one may be smaller."""
    return [
        collate(rows[start : start + size], multiple_of=multiple_of, device=device)
        for start in range(0, len(rows), size)
    ]


def _used_length(labels: Sequence[int]) -> int:
    return max((index + 1 for index, label in enumerate(labels) if label != IGNORED), default=1)


def _fit(values: Sequence[int], length: int, filler: int) -> list[int]:
    return [*values[:length], *[filler] * (length - len(values))]


def _fit_documents(document_lengths: Sequence[int], length: int) -> list[int]:
    fitted, left = [], length
    for document in document_lengths:
        fitted.append(min(document, left))
        left -= fitted[-1]
        if not left:
            return fitted
    return [*fitted, left]
