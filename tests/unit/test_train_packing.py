"""Packing: every token once, documents apart, labels shifted inside a document, padding by length."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_frozen.errors import DataError
from megatron_frozen.train.packing import IGNORED, Example, PackedRow, one_per_row, pack

SEQ_LENGTH = 12
examples_strategy = st.lists(
    st.lists(st.tuples(st.integers(0, 99), st.booleans()), min_size=1, max_size=SEQ_LENGTH), min_size=1, max_size=40
).map(
    lambda documents: [
        Example(
            input_ids=[token for token, _ in document],
            labels=[token if learnt else IGNORED for token, learnt in document],
        )
        for document in documents
    ]
)


def documents(row: PackedRow) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Ids and labels of each document of a row, padding included."""
    found, start = [], 0
    for length in row.document_lengths:
        found.append((tuple(row.input_ids[start : start + length]), tuple(row.labels[start : start + length])))
        start += length
    return found


def shifted(example: Example) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(example.input_ids), (*example.labels[1:], IGNORED)


@given(examples_strategy)
def test_every_document_is_there_once_and_whole(examples: list[Example]) -> None:
    rows = pack(examples, seq_length=SEQ_LENGTH, pad_id=7)
    found: Counter = Counter()
    for row in rows:
        assert len(row.input_ids) == len(row.labels) == sum(row.document_lengths) == SEQ_LENGTH
        assert min(row.document_lengths) > 0
        found.update(documents(row))
    found.subtract(shifted(example) for example in examples)
    for (ids, labels), count in found.items():
        assert count == 0 or (count > 0 and set(ids) == {7} and set(labels) == {IGNORED})  # padding only


@given(examples_strategy)
def test_packing_is_tight_and_the_same_each_time(examples: list[Example]) -> None:
    rows = pack(examples, seq_length=SEQ_LENGTH, pad_id=7)
    num_tokens = sum(len(example.input_ids) for example in examples)
    assert len(rows) <= 2 * -(-num_tokens // SEQ_LENGTH)  # at most one row is half empty
    assert rows == pack(examples, seq_length=SEQ_LENGTH, pad_id=7)


def test_rows_are_filled_where_a_greedy_choice_would_leave_room() -> None:
    """Longest first would put 6 with 5 and leave 1 unused; 6 + 4 + 2 and 5 + 4 + 3 use all of it."""
    examples = [Example(input_ids=[n] * n, labels=[n] * n) for n in (5, 2, 4, 6, 3, 4)]
    rows = pack(examples, seq_length=12, pad_id=0)
    assert [row.document_lengths for row in rows] == [(5, 3, 4), (2, 4, 6)]


@given(st.lists(st.integers(1, SEQ_LENGTH), min_size=1, max_size=9))
def test_each_row_is_the_best_fill_for_its_longest_example(lengths: list[int]) -> None:
    examples = [Example(input_ids=[n] * n, labels=[n] * n) for n in lengths]
    rows = pack(examples, seq_length=SEQ_LENGTH, pad_id=0)
    filled = [Counter(token for token in row.input_ids if token) for row in rows]
    left = Counter(lengths)
    for row in sorted(filled, key=lambda row: (-max(row), -row.total())):
        counts = Counter({length: tokens // length for length, tokens in row.items()})
        assert max(row) == max(left)
        rest = list((left - Counter([max(left)])).elements())
        sums = {sum(part) for size in range(len(rest) + 1) for part in itertools.combinations(rest, size)}
        assert row.total() == max(left) + max(total for total in sums if max(left) + total <= SEQ_LENGTH)
        left -= counts


def test_labels_are_targets_of_the_same_position_and_stay_in_their_document() -> None:
    examples = [
        Example(input_ids=[5, 6, 7, 2], labels=[IGNORED, IGNORED, 7, 2]),
        Example(input_ids=[8, 9, 2], labels=[8, 9, 2]),
    ]
    (row,) = pack(examples, seq_length=9, pad_id=0)
    assert list(row.input_ids) == [5, 6, 7, 2, 8, 9, 2, 0, 0]
    assert list(row.labels) == [IGNORED, 7, 2, IGNORED, 9, 2, IGNORED, IGNORED, IGNORED]
    assert row.document_lengths == (4, 3, 2)


def test_padding_with_the_eos_id_masks_by_length() -> None:
    """Case 44: eos = pad = 2; the true EOS stays labelled."""
    example = Example(input_ids=[5, 6, 2], labels=[5, 6, 2])
    (row,) = one_per_row([example], seq_length=5, pad_id=2)
    assert list(row.input_ids) == [5, 6, 2, 2, 2]
    assert list(row.labels) == [6, 2, IGNORED, IGNORED, IGNORED]  # labels [5, 6, 2, -100, -100], shifted
    assert row.document_lengths == (3, 2)
    assert pack([example], seq_length=5, pad_id=2) == [row]


def test_packing_off_keeps_one_example_per_row_in_order() -> None:
    examples = [Example(input_ids=[n] * n, labels=[n] * n) for n in (2, 4, 1)]
    rows = one_per_row(examples, seq_length=4, pad_id=0)
    assert [row.document_lengths for row in rows] == [(2, 2), (4,), (1, 3)]
    assert [row.input_ids[0] for row in rows] == [2, 4, 1]


@pytest.mark.parametrize("arrange", [pack, one_per_row])
def test_an_example_that_does_not_fit(arrange) -> None:
    example = Example(input_ids=[1] * 5, labels=[1] * 5)
    with pytest.raises(DataError, match="an example has 5 tokens, a row holds 4; cut it when encoding"):
        arrange([example], seq_length=4, pad_id=0)
