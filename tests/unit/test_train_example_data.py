"""The question-and-answer set that ships, and the script that makes it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from examples.make_stdlib_qa import answer_from, collect, split, to_jsonl
from megatron_frozen.train.data import ChatRow, read_rows

DATA = Path(__file__).parents[2] / "examples" / "data"


def shipped(name: str) -> list[tuple[str, str]]:
    rows, report = read_rows(DATA / f"stdlib_qa_{name}.jsonl")
    assert not report.dropped
    pairs = []
    for row in rows:
        assert isinstance(row, ChatRow)
        assert [message["role"] for message in row.messages] == ["user", "assistant"]
        pairs.append((row.messages[0]["content"], row.messages[1]["content"]))
    return pairs


def test_the_two_files_share_no_question_and_no_answer() -> None:
    train, held_out = shipped("train"), shipped("eval")
    assert (len(train), len(held_out)) == (800, 64)
    both = train + held_out
    assert len({question for question, _ in both}) == len({answer for _, answer in both}) == len(both)
    for _, answer in held_out:
        words = set(answer.lower().split())
        for _, other in train:
            assert len(words & set(other.lower().split())) <= len(words | set(other.lower().split())) / 2


def test_rows_read_as_prose_and_name_no_machine() -> None:
    for question, answer in shipped("train") + shipped("eval"):
        assert re.fullmatch(r"What (is|does) [a-zA-Z][\w.]*( do)? in Python\?", question)
        assert re.fullmatch(r"[A-Z][\x20-\x7e]*\.", answer)
        assert 10 <= len(answer.split()) <= 55
        assert not re.search(r"(^|\s)/\w|\w/\w|\\|`|https?", answer)
    assert sum(path.stat().st_size for path in DATA.glob("*.jsonl")) < 500_000


def test_the_script_makes_the_same_rows_again() -> None:
    pairs = collect(["heapq", "bisect", "textwrap"])
    assert pairs == collect(["heapq", "bisect", "textwrap"])
    assert (
        "What does textwrap.fill do in Python?",
        "Fill a single paragraph of text, returning a new string.",
    ) in pairs
    train, held_out = split(pairs, num_train=6, num_eval=2)
    assert (len(train), len(held_out)) == (6, 2)
    assert not set(train) & set(held_out)
    first = json.loads(to_jsonl(train).splitlines()[0])
    assert [message["content"] for message in first["messages"]] == list(train[0])


@pytest.mark.parametrize(
    ("docstring", "answer"),
    [
        (
            "f(x) -> y\n\nReturn the  :class:`~a.Thing` that\nbelongs to ``x``, or None if there is none.\n\nX.",
            "Return the a.Thing that belongs to x, or None if there is none.",
        ),
        ("Return a thing.", None),
        ("Return the value that is found at the place :\n  * one\n  * two and another one.", None),
        ("Look in /etc/hosts for the name of this machine and return what it says.", None),
        ("return the value that is at the place which is given by the index.", None),
        ("Return the value that is at the place which is given by the index", None),
    ],
)
def test_only_plain_sentences_become_answers(docstring: str, answer: str | None) -> None:
    assert answer_from(docstring) == answer
