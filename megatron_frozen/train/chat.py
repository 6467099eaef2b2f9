"""Rows as token ids with labels on the answer only.

An answer is learnt in the context that generation will give it: after exactly the tokens of the generation prompt, up
to and with the token that ends the turn. Where an answer begins and ends is found by rendering, not by searching text:
the conversation up to a turn with the generation prompt, and the same with the turn, must nest. `{% generation %}`
blocks are honoured where a template has them, but clipped to the same bounds, so labels do not depend on having them.

A template may rewrite history (drop earlier reasoning): then a turn as it was generated is no longer part of the later
rendering. Such a row becomes several examples, each turn learnt once, in the rendering that really holds it.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megatron_frozen.errors import DataError
from megatron_frozen.train.data import ChatRow, DataReport, PromptRow, Row
from megatron_frozen.train.packing import IGNORED, Example
from megatron_frozen.train.tokenizer import Tokenizer

_Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rendered:
    text: str
    learnt: _Spans


def encode_rows(
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    *,
    seq_length: int,
    source: str,
    on_bad_line: Literal["error", "skip"] = "error",
) -> tuple[list[Example], DataReport]:
    """All examples of `rows`, cut to `seq_length` tokens, and what was cut and dropped (`source` names them).

    An example with no label left is dropped and counted. A row that the chat template refuses is an error with its
    line, or counted if `on_bad_line` is "skip". DataError if nothing is left.
    """
    examples: list[Example] = []
    truncated = 0
    dropped: Counter[str] = Counter()
    for row in rows:
        try:
            whole = encode_row(row, tokenizer)
        except DataError:
            if on_bad_line == "error":
                raise
            dropped["refused by the chat template"] += 1
            continue
        for example in whole:
            cut = Example(input_ids=example.input_ids[:seq_length], labels=example.labels[:seq_length])
            if all(label == IGNORED for label in cut.labels[1:]):  # nothing predicts the first token
                dropped["no labelled tokens"] += 1
                continue
            truncated += len(example.input_ids) > seq_length
            examples.append(cut)
    report = DataReport(source=source, kept=len(examples), dropped=dict(dropped), truncated=truncated)
    if not examples:
        raise DataError(f"nothing to train on: {report}; raise seq_length ({seq_length}) or shorten the prompts")
    return examples, report


def encode_row(row: Row, tokenizer: Tokenizer) -> list[Example]:
    """The examples of one row, uncut: one, or several where the template rewrites history.

    DataError with the file and line if the answer cannot be told from the prompt, or the template refuses the row.
    """
    if isinstance(row, ChatRow):
        try:
            renderings = _renderings(row.messages, tokenizer)
        except DataError as error:
            raise DataError(f"{row.where}: {error}") from error
        return [_chat_example(rendering, tokenizer) for rendering in renderings]
    text, start = (row.prompt + row.completion, len(row.prompt)) if isinstance(row, PromptRow) else (row.text, 0)
    ids, labels = _encode(_Rendered(text=text, learnt=((start, len(text)),)), tokenizer)
    prefix = list(tokenizer.prefix_ids)
    return [_example([*prefix, *ids, tokenizer.eos_id], [*[IGNORED] * len(prefix), *labels, tokenizer.eos_id])]


def encode_prompt(row: Row, tokenizer: Tokenizer) -> list[int]:
    """The tokens after which generation answers `row`: a chat up to its last answer, a prompt, or a whole text."""
    if isinstance(row, ChatRow):
        turns = _assistant_turns(row.messages)
        return tokenizer.encode(generation_prompt(row.messages[: turns[-1]] if turns else row.messages, tokenizer))
    return [*tokenizer.prefix_ids, *tokenizer.encode(row.prompt if isinstance(row, PromptRow) else row.text)]


def generation_prompt(messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer) -> str:
    """`messages` as text, up to where an answer starts.

    For a template that knows no `add_generation_prompt` the header of an answer is what two different answers share.
    """
    prompt = tokenizer.render_chat(messages, add_generation_prompt=True).text
    if prompt != tokenizer.render_chat(messages).text:
        return prompt
    one, other = (tokenizer.render_chat([*messages, {"role": "assistant", "content": text}]).text for text in "xy")
    shared = one[: _num_shared(one, other)]
    # White space before an answer is tokenised with its first word, so it belongs to the answer.
    return shared if shared.startswith(prompt) and shared[len(prompt) :].strip() else prompt


def _assistant_turns(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    return [index for index, message in enumerate(messages) if message["role"] == "assistant"]


def _renderings(messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer) -> list[_Rendered]:
    """As few renderings as hold every assistant turn as it was generated, each turn marked in exactly one."""
    turns = [_turn(messages[: index + 1], tokenizer) for index in _assistant_turns(messages)]
    renderings = []
    while turns:
        text = turns[-1].text
        inside = [turn for turn in turns if text.startswith(turn.text)]
        turns = [turn for turn in turns if not text.startswith(turn.text)]
        renderings.append(_Rendered(text=text, learnt=tuple(span for turn in inside for span in turn.learnt)))
    return renderings[::-1]


def _turn(messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer) -> _Rendered:
    """`messages`, whose last one is an answer, and where in the text that answer is."""
    rendering = tokenizer.render_chat(messages)
    prompt = generation_prompt(messages[:-1], tokenizer)
    text = rendering.text
    nests = text.startswith(prompt)
    end = _end_of_turn(text, tokenizer)
    if not tokenizer.has_generation_blocks:
        if not nests or end <= len(prompt):
            raise DataError(
                f"message {len(messages)} is rendered in a way that does not continue its generation prompt, so the "
                "answer cannot be told from the prompt; mark it in the chat template with {% generation %}"
            )
        return _Rendered(text=text, learnt=((len(prompt), end),))
    shared = _num_shared(prompt, text)
    clip = len(prompt) if nests else 0
    blocks = [(max(start, clip), min(stop, end)) for start, stop in rendering.generated if stop > shared]
    learnt = _joined([(start, stop) for start, stop in blocks if start < stop])
    if not learnt:
        raise DataError(
            f"message {len(messages)} has no text in a {{% generation %}} block of the chat template; mend the template"
        )
    start, stop = learnt[-1]
    if text[stop:end].strip() in tokenizer.special_tokens:  # the block leaves out the token that ends the turn
        learnt[-1] = start, end
    return _Rendered(text=text, learnt=tuple(learnt))


def _end_of_turn(text: str, tokenizer: Tokenizer) -> int:
    """Where the last special token ends, if only white space follows it; else the end of the text."""
    stripped = text.rstrip()
    return len(stripped) if stripped.endswith(tokenizer.special_tokens) else len(text)


def _joined(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, stop in spans:
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        else:
            joined.append((start, stop))
    return joined


def _chat_example(rendering: _Rendered, tokenizer: Tokenizer) -> Example:
    """The tokens up to the last learnt one; an end-of-text token is added where the template ends a turn with none."""
    text = rendering.text[: rendering.learnt[-1][1]]
    ids, labels = _encode(_Rendered(text=text, learnt=rendering.learnt), tokenizer)
    if not text.endswith(tokenizer.special_tokens):
        ids, labels = [*ids, tokenizer.eos_id], [*labels, tokenizer.eos_id]
    return _example(ids, labels)


def _encode(rendered: _Rendered, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Ids of the text and labels. The ids before a learnt span are those of the text before it, as generation has them.

    The text is tokenised once, and anew from the start of a span only where a token would reach across that start: what
    follows then stands after the answer's own tokens, as it does in a conversation that goes on from generated tokens.
    """
    text = rendered.text
    ids, labels = tokenizer.encode(text), []
    char = token = 0  # the text from `char` on is tokenised on its own, into the ids from `token` on
    for start, stop in rendered.learnt:
        before = tokenizer.encode(text[char:start])
        first = token + len(before)
        if ids[token:first] != before:
            ids[token:] = before + tokenizer.encode(text[start:])
            char, token = start, first
        last = token + _num_shared(ids[token:], tokenizer.encode(text[char:stop]))
        labels += [IGNORED] * (first - len(labels)) + ids[first:last]
    return ids, labels + [IGNORED] * (len(ids) - len(labels))


def _num_shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many leading items are equal."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))


def _example(ids: Sequence[int], labels: Sequence[int]) -> Example:
    return Example(input_ids=array("i", ids), labels=array("i", labels))
