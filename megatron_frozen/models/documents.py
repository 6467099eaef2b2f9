"""Which tokens of a batch attend to which: whole rows or packed documents, with windows or without.

Shape suffixes: [s] sequence, [b] batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from megatron_frozen.errors import LayoutError

DocumentLengths = Sequence[Sequence[int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionPlan:
    """What all layers of one forward share about attention."""

    lengths: tuple[int, ...] | None
    """Lengths of all documents, row after row; None where each row is one document."""
    longest: int
    """The longest document."""
    bounds: Tensor
    """Where documents begin among the tokens of all rows, and where the last one ends: int64 on the CPU. A compiled
    graph reads them here, as it would be made anew for other ``lengths``."""
    masks: dict[int, Tensor]
    """Per window that is shorter than the longest document: which keys [longest] a query [longest] sees."""
    first_keys: dict[int | None, Tensor]
    """Per such window, and for None where rows are cut: the place in its row of the first key that a query sees, int32
    [b, s] on the CPU."""

    def mask(self, *, window: int | None, length: int) -> Tensor | None:
        """Return the mask [length, length] for one document, or None where plain causal attention is the same."""
        if window is None or window >= length:
            return None
        return self.masks[window][:length, :length]

    def first_key(self, window: int | None) -> Tensor | None:
        """Return the first key that each query sees, int32 [b, s], or None where that is the row's first for all."""
        return self.first_keys.get(window, self.first_keys.get(None))

    def longest_mask(self, window: int | None) -> Tensor | None:
        """Return the mask of the longest document, or None where no document is longer than the window.

        Unlike ``mask`` it compares no lengths: a graph would be made anew for each.
        """
        return None if window is None else self.masks.get(window)


def plan_attention(
    *,
    num_rows: int,
    seq_length: int,
    document_lengths: DocumentLengths | None,
    windows: Sequence[int | None],
    device: torch.device,
) -> AttentionPlan:
    """Check the document lengths against the batch and find what queries see: as masks for windows, and first keys.

    Raises LayoutError where the lengths are not one list per row of whole numbers above 0 that sum to the row.
    """
    lengths = _flat_lengths(document_lengths, num_rows=num_rows, seq_length=seq_length)
    longest = seq_length if lengths is None else max(lengths)
    bounds = torch.tensor([0, *accumulate(lengths or [seq_length] * num_rows)], device="cpu")
    narrow = {window for window in windows if window is not None and window < longest}
    masks = {
        window: torch.ones(longest, longest, dtype=torch.bool, device=device).tril_().triu_(1 - window)
        for window in narrow
    }
    first_keys = {
        window: first_keys_of(bounds, window=window, seq_length=seq_length)
        for window in ({None, *narrow} if lengths else narrow)
    }
    return AttentionPlan(lengths=lengths, longest=longest, bounds=bounds, masks=masks, first_keys=first_keys)


def first_keys_of(bounds: Tensor, *, window: int | None, seq_length: int) -> Tensor:
    """Return the place in its row of the first key that each token sees, int32 [b, s], from where documents begin."""
    starts = torch.repeat_interleave(bounds[:-1] % seq_length, bounds.diff()).view(-1, seq_length)
    if window is not None:
        starts = starts.maximum(torch.arange(1 - window, seq_length + 1 - window, device=bounds.device))
    return starts.to(torch.int32)


def document_positions(plan: AttentionPlan, *, num_rows: int, seq_length: int, device: torch.device) -> Tensor:
    """Return each token's place in its document: [s, 1] where all rows are alike, else [s, b]."""
    places = torch.arange(plan.longest, device=device)
    if plan.lengths is None:
        return places[:, None]
    return torch.cat([places[:length] for length in plan.lengths]).view(num_rows, seq_length).t()


def _flat_lengths(
    document_lengths: DocumentLengths | None, *, num_rows: int, seq_length: int
) -> tuple[int, ...] | None:
    if document_lengths is None:
        return None
    if len(document_lengths) != num_rows:
        raise LayoutError(
            f"document_lengths has {len(document_lengths)} rows and input_ids has {num_rows}; give one list per row"
        )
    for row, lengths in enumerate(document_lengths):
        if sum(lengths) != seq_length or min(lengths, default=0) < 1:
            raise LayoutError(
                f"the document lengths of row {row} are {list(lengths)}; they must be above 0 and sum to the row's "
                f"{seq_length} tokens, padding included"
            )
    if all(len(lengths) == 1 for lengths in document_lengths):
        return None
    return tuple(int(length) for lengths in document_lengths for length in lengths)
