"""The attention plan: which documents, positions and masks a batch has, and which lengths are refused."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from megatron_frozen.errors import LayoutError
from megatron_frozen.models.documents import AttentionPlan, document_positions, plan_attention


def _plan(document_lengths: Sequence[Sequence[int]] | None, *windows: int | None) -> AttentionPlan:
    return plan_attention(
        num_rows=2, seq_length=6, document_lengths=document_lengths, windows=windows, device=torch.device("cpu")
    )


def _positions(plan: AttentionPlan) -> list[list[int]]:
    return document_positions(plan, num_rows=2, seq_length=6, device=torch.device("cpu")).t().tolist()


@pytest.mark.parametrize("document_lengths", [None, [[6], [6]]])
def test_whole_rows_need_no_documents_and_share_positions(document_lengths: Sequence[Sequence[int]] | None) -> None:
    plan = _plan(document_lengths, None)
    assert plan.lengths is None
    assert plan.longest == 6
    assert _positions(plan) == [[0, 1, 2, 3, 4, 5]]


def test_documents_start_anew() -> None:
    plan = _plan([[2, 4], [3, 1, 2]], None)
    assert plan.lengths == (2, 4, 3, 1, 2)
    assert plan.longest == 4
    assert _positions(plan) == [[0, 1, 0, 1, 2, 3], [0, 1, 2, 0, 0, 1]]


def test_masks_exist_only_where_a_window_is_shorter_than_the_longest_document() -> None:
    plan = _plan([[2, 4], [3, 1, 2]], None, 4, 2)
    assert plan.masks.keys() == {2}
    assert plan.mask(window=None, length=4) is None
    assert plan.mask(window=2, length=2) is None
    mask = plan.mask(window=2, length=3)
    assert mask is not None
    assert mask.int().tolist() == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]


@pytest.mark.parametrize(
    ("document_lengths", "message"),
    [
        ([[6]], r"document_lengths has 1 rows and input_ids has 2; give one list per row"),
        ([[6], [2, 3]], r"lengths of row 1 are \[2, 3\]; they must be above 0 and sum to the row's 6 tokens, padding"),
        ([[6], [6, 0]], r"lengths of row 1 are \[6, 0\]; they must"),
        ([[], [6]], r"lengths of row 0 are \[\]; they must"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(document_lengths: Sequence[Sequence[int]], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        _plan(document_lengths)
