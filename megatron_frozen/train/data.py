"""Rows of a JSONL file, checked: chat, prompt/completion or text, each line on its own.

A line that cannot be meant as it stands (broken JSON, wrong types, an unknown role or form) is an error with its file
and line number, or is counted when skipping is chosen. A row with nothing to learn from (no answer, an empty one, a
null) is dropped and counted in either case. Nothing is left out in silence.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron_frozen.errors import DataError, nearest

ROLES = ("system", "developer", "user", "assistant", "tool")
FORMS = {"chat": ("messages",), "prompt/completion": ("prompt", "completion"), "text": ("text",)}
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatRow:
    """A conversation."""

    where: str
    """File and line, for messages."""
    messages: tuple[Mapping[str, Any], ...]
    """Each has a `role` of `ROLES` and a string `content`; other keys go to the chat template untouched."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptRow:
    """A text and what follows it."""

    where: str
    """File and line, for messages."""
    prompt: str
    """What is given."""
    completion: str
    """What is learnt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextRow:
    """A text learnt from its first to its last token."""

    where: str
    """File and line, for messages."""
    text: str
    """The text."""


Row = ChatRow | PromptRow | TextRow


@dataclass(frozen=True, kw_only=True, slots=True)
class DataReport:
    """What became of the rows of one source; `str()` is one line."""

    source: str
    """Where the rows come from."""
    kept: int
    """How many are used."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """How many are not, by reason."""
    truncated: int = 0
    """How many of those kept were cut to the row length."""

    def __str__(self) -> str:
        text = f"{self.source}: kept {self.kept}"
        if self.truncated:
            text += f" ({self.truncated} cut to seq_length)"
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self.dropped.items()))
        return f"{text}, dropped {sum(self.dropped.values())}" + (f" ({reasons})" if reasons else "")


class _BadLineError(Exception):
    """A line that is an error unless skipping is chosen: `reason` is counted, `detail` is told."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class _NothingToLearnError(Exception):
    """A sound row that is dropped for the reason given."""


def read_rows(path: str | Path, *, on_bad_line: Literal["error", "skip"] = "error") -> tuple[list[Row], DataReport]:
    """The rows of a JSONL file, in order, and what was left out.

    A byte order mark, blank lines, CRLF and a missing last newline are accepted. DataError if the file is not there, if
    a line is bad and `on_bad_line` is "error", or if no row is left.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"there is no data file {path}; give the path of a JSONL file")
    rows: list[Row] = []
    dropped: Counter[str] = Counter()
    for number, line in _lines(path):
        where = f"{path}, line {number}"
        try:
            rows.append(_parse(line, where=where))
        except _NothingToLearnError as nothing:
            dropped[str(nothing)] += 1
        except _BadLineError as bad:
            if on_bad_line == "error":
                raise DataError(
                    f"{where}: {bad}; mend the line, or set on_bad_line=skip to pass over such lines"
                ) from bad
            dropped[bad.reason] += 1
    report = DataReport(source=str(path), kept=len(rows), dropped=dict(dropped))
    if not rows:
        raise DataError(f"no usable row: {report}; each line needs one of {_forms()} with an answer that is not empty")
    return rows, report


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            line = line.removeprefix(_BOM).strip()
            if line:
                yield number, line


def _parse(line: bytes, *, where: str) -> Row:
    try:
        values = json.loads(line.decode("utf-8"), object_pairs_hook=_object)
        json.dumps(values, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise _BadLineError("not UTF-8", f"not valid UTF-8 at byte {error.start + 1} of the line") from error
    except UnicodeEncodeError as error:
        raise _BadLineError("not UTF-8", "a \\u escape stands for half a character (a lone surrogate)") from error
    except (ValueError, RecursionError) as error:
        raise _BadLineError("broken JSON", f"broken JSON ({error})") from error
    if not isinstance(values, dict):
        raise _BadLineError("wrong type", f"the line holds {_kind(values)}, a row is an object with one of {_forms()}")
    form = _form(values)
    if form == "chat":
        return ChatRow(where=where, messages=_messages(values["messages"]))
    if form == "prompt/completion":
        prompt, completion = _text(values["prompt"], name="prompt"), _text(values["completion"], name="completion")
        return PromptRow(where=where, prompt=prompt, completion=_answer(completion))
    return TextRow(where=where, text=_answer(_text(values["text"], name="text")))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        key = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise _BadLineError("a key twice", f"the key '{key}' is given twice in one object; keep one")
    return values


def _form(values: Mapping[str, Any]) -> str:
    fitting = [form for form, keys in FORMS.items() if all(key in values for key in keys)]
    if len(fitting) > 1:
        raise _BadLineError(
            "more than one form", f"the row fits {' and '.join(fitting)} at once; keep the keys of one form"
        )
    if not fitting:
        known = [key for keys in FORMS.values() for key in keys]
        hints = [nearest(key, known) for key in values if key not in known]
        hint = next((hint for hint in hints if hint), "")
        raise _BadLineError("unknown form", f"the row has the keys {sorted(values)}, a row has one of {_forms()}{hint}")
    return fitting[0]


def _messages(messages: object) -> tuple[Mapping[str, Any], ...]:
    if messages is None:
        raise _NothingToLearnError("null content")
    if not isinstance(messages, list):
        raise _BadLineError("wrong type", f"'messages' is {_kind(messages)}, it must be a list of role and content")
    checked = tuple(_message(message, number=number) for number, message in enumerate(messages, start=1))
    answers = [message for message in checked if message["role"] == "assistant"]
    if not answers:
        raise _NothingToLearnError("no answer")
    for message in answers:
        if not message.get("tool_calls"):
            _answer(message["content"])
    return checked


def _message(message: object, *, number: int) -> Mapping[str, Any]:
    if not isinstance(message, dict):
        raise _BadLineError("wrong type", f"message {number} is {_kind(message)}, it must be an object")
    role = message.get("role")
    if role not in ROLES:
        hint = nearest(role, ROLES) if isinstance(role, str) else ""
        raise _BadLineError(
            "unknown role", f"message {number} has the role {role!r}, allowed are {', '.join(ROLES)}{hint}"
        )
    if message.get("tool_calls") and message.get("content") is None:
        return {**message, "content": ""}
    if "content" not in message:
        raise _BadLineError("no content", f"message {number} has no 'content', only {sorted(message)}")
    return {**message, "content": _text(message["content"], name=f"the content of message {number}")}


def _text(value: object, *, name: str) -> str:
    if value is None:
        raise _NothingToLearnError("null content")
    if not isinstance(value, str):
        raise _BadLineError("wrong type", f"{name} is {_kind(value)}, it must be a string")
    return value


def _answer(text: str) -> str:
    if not text.strip():
        raise _NothingToLearnError("empty answer")
    return text


def _forms() -> str:
    return ", ".join("+".join(f"'{key}'" for key in keys) for keys in FORMS.values())


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
