"""Rows of a JSONL file: what is accepted, what is dropped and counted, what is an error with its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_frozen.errors import DataError
from megatron_frozen.train.data import ChatRow, DataReport, PromptRow, TextRow, read_rows


def chat(*contents: Any, first: str = "user") -> dict[str, Any]:
    roles = ("user", "assistant") if first == "user" else ("assistant", "user")
    return {"messages": [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]}


def write(folder: Path, *lines: object) -> Path:
    """A JSONL file of `lines`: bytes and str as they are, the rest as JSON."""
    path = folder / "rows.jsonl"
    parts = [line if isinstance(line, bytes | str) else json.dumps(line) for line in lines]
    path.write_bytes(b"\n".join(part if isinstance(part, bytes) else part.encode() for part in parts))
    return path


def case_45(folder: Path) -> Path:
    good = [json.dumps(chat(f"question {n}", f"answer {n}")).encode() for n in (1, 3, 7)]
    return write(
        folder, b"\xef\xbb\xbf" + good[0], b"", good[1] + b"\r", chat("question", ""), chat("question", None),
        b'{"messages": [{"role": ', good[2],
    )  # fmt: skip


def test_case_45_a_broken_line_is_an_error_with_file_and_number(tmp_path: Path) -> None:
    path = case_45(tmp_path)
    with pytest.raises(DataError, match=rf"{path}, line 6: broken JSON \(.*\); mend the line, or set on_bad_line=skip"):
        read_rows(path)


def test_case_45_skipping_counts_by_reason(tmp_path: Path) -> None:
    path = case_45(tmp_path)
    rows, report = read_rows(path, on_bad_line="skip")
    assert [row.where for row in rows] == [f"{path}, line {number}" for number in (1, 3, 7)]
    answers = [row.messages[1] for row in rows if isinstance(row, ChatRow)]
    assert answers == [{"role": "assistant", "content": f"answer {n}"} for n in (1, 3, 7)]
    assert report == DataReport(
        source=str(path), kept=3, dropped={"empty answer": 1, "null content": 1, "broken JSON": 1}
    )
    assert str(report) == f"{path}: kept 3, dropped 3 (1 broken JSON, 1 empty answer, 1 null content)"


def test_the_three_forms_may_share_a_file(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        chat("q", "a"),
        {"prompt": "", "completion": " yes ", "id": 3},
        {"text": "once\u2028upon", "source": None},
    )
    rows, report = read_rows(path)
    chat_row, prompt_row, text_row = rows
    assert isinstance(chat_row, ChatRow)
    assert prompt_row == PromptRow(where=f"{path}, line 2", prompt="", completion=" yes ")
    assert text_row == TextRow(where=f"{path}, line 3", text="once\u2028upon")
    assert str(report) == f"{path}: kept 3, dropped 0"


def test_a_line_separator_inside_a_string_ends_no_line(tmp_path: Path) -> None:
    path = write(tmp_path, '{"text": "a\u2028b\u0085c"}', {"text": "d"})
    assert [row.text for row in read_rows(path)[0] if isinstance(row, TextRow)] == ["a\u2028b\u0085c", "d"]


def test_concatenated_files_keep_their_marks_inside(tmp_path: Path) -> None:
    path = write(tmp_path, {"text": "a"}, b'\xef\xbb\xbf{"text": "b"}', b" \t ")
    assert len(read_rows(path)[0]) == 2


def test_extra_keys_of_a_message_are_kept_and_tool_calls_need_no_content(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    answer = {"role": "assistant", "content": "4", "reasoning_content": "2 and 2"}
    messages = [{"role": "user", "content": "q"}, call, {"role": "tool", "content": "4"}, answer]
    (row,), _ = read_rows(write(tmp_path, {"messages": messages}))
    assert isinstance(row, ChatRow)
    assert row.messages == (messages[0], {**call, "content": ""}, messages[2], answer)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (chat("q", " \n"), "empty answer"),
        (chat("q", "a", "q", ""), "empty answer"),
        (chat("q", None), "null content"),
        (chat(None, "a"), "null content"),
        (chat("q"), "no answer"),
        ({"messages": []}, "no answer"),
        ({"messages": None}, "null content"),
        ({"prompt": "p", "completion": ""}, "empty answer"),
        ({"prompt": None, "completion": "c"}, "null content"),
        ({"prompt": "p", "completion": None}, "null content"),
        ({"text": ""}, "empty answer"),
        ({"text": None}, "null content"),
    ],
)
def test_rows_with_nothing_to_learn_are_dropped_and_counted(tmp_path: Path, row: dict, reason: str) -> None:
    rows, report = read_rows(write(tmp_path, {"text": "good"}, row))
    assert (len(rows), report.dropped) == (1, {reason: 1})


@pytest.mark.parametrize(
    ("line", "message", "reason"),
    [
        (b'{"text": "a"', "broken JSON", "broken JSON"),
        (
            b'{"prompt": "a", "prompt": "b", "completion": "c"}',
            "the key 'prompt' is given twice in one object; keep one",
            "a key twice",
        ),
        (b"[" * 100_000, "broken JSON", "broken JSON"),
        (b'{"text": "\xff"}', "not valid UTF-8 at byte 11 of the line", "not UTF-8"),
        (b'{"text": "\\ud800"}', "stands for half a character .a lone surrogate", "not UTF-8"),
        ([chat("q", "a")], "the line holds a list, a row is an object with one of 'messages'", "wrong type"),
        (3, "the line holds a number", "wrong type"),
        (None, "the line holds null", "wrong type"),
        ({"prompt": "p", "response": "r"}, r"has the keys \['prompt', 'response'\], a row has one of", "unknown form"),
        ({"message": []}, "did you mean 'messages'", "unknown form"),
        (
            {"text": "t", **chat("q", "a")},
            "fits chat and text at once; keep the keys of one form",
            "more than one form",
        ),
        ({"messages": {"role": "user"}}, "'messages' is an object, it must be a list of role and", "wrong type"),
        ({"messages": ["hello"]}, "message 1 is a string, it must be an object", "wrong type"),
        (chat("q", ["a"]), "the content of message 2 is a list, it must be a string", "wrong type"),
        ({"text": True}, "text is true or false, it must be a string", "wrong type"),
        ({"prompt": 1, "completion": "c"}, "prompt is a number, it must be a string", "wrong type"),
        ({"messages": [{"role": "user", "text": "q"}]}, "message 1 has no 'content', only", "no content"),
        (
            {"messages": [{"role": "usr", "content": "q"}]},
            "message 1 has the role 'usr', .*did you mean 'user'",
            "unknown role",
        ),
        ({"messages": [{"role": ["x"], "content": "q"}]}, r"the role \['x'\], allowed are system", "unknown role"),
    ],
)
def test_bad_lines(tmp_path: Path, line: object, message: str, reason: str) -> None:
    path = write(tmp_path, {"text": "good"}, line, {"text": "good"})
    with pytest.raises(DataError, match=rf"{path}, line 2: .*{message}"):
        read_rows(path)
    rows, report = read_rows(path, on_bad_line="skip")
    assert (len(rows), report.dropped) == (2, {reason: 1})


def test_no_row_left_and_no_file(tmp_path: Path) -> None:
    path = write(tmp_path, {"text": ""}, b"{")
    with pytest.raises(DataError, match=r"no usable row: .*kept 0, dropped 2 \(1 broken JSON, 1 empty answer\); each"):
        read_rows(path, on_bad_line="skip")
    with pytest.raises(DataError, match=r"no usable row: .*kept 0, dropped 0; each line needs one of"):
        read_rows(write(tmp_path, b""))
    with pytest.raises(DataError, match=r"there is no data file .*absent.jsonl; give the path of a JSONL file"):
        read_rows(tmp_path / "absent.jsonl")
