"""One question whose answer is shown before and after training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_frozen.models import CausalLM
from megatron_frozen.train.chat import encode_prompt
from megatron_frozen.train.data import ChatRow, PromptRow, Row
from megatron_frozen.train.generate import generate
from megatron_frozen.train.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A question."""

    question: str
    """Its text."""
    prompt_ids: Sequence[int]
    """Its tokens, up to where the answer starts."""
    reference: str | None
    """The answer in the data, if it comes from there."""


def question_row(text: str, tokenizer: Tokenizer) -> Row:
    """`text` as a row without an answer: a chat where the tokenizer has a template, else a bare prompt."""
    if tokenizer.has_chat_template:
        return ChatRow(where="the prompt", messages=({"role": "user", "content": text},))
    return PromptRow(where="the prompt", prompt=text, completion="")


def choose_sample(rows: Sequence[Row], *, prompt: str | None, tokenizer: Tokenizer) -> Sample | None:
    """The sample for `prompt`, else for the first of the held-out `rows` that asks something; None without either."""
    if prompt is not None:
        return Sample(
            question=prompt, prompt_ids=encode_prompt(question_row(prompt, tokenizer), tokenizer), reference=None
        )
    for row in rows:
        question, reference = _question_and_answer(row)
        if question:
            return Sample(question=question, prompt_ids=encode_prompt(row, tokenizer), reference=reference)
    return None


def answer(model: CausalLM, sample: Sample, *, tokenizer: Tokenizer, max_new_tokens: int) -> str:
    """The model's likeliest answer, marked if `max_new_tokens` cut it. Every rank of the model calls it; see `generate`
    for collectives."""
    tokens = generate(model, sample.prompt_ids, max_new_tokens=max_new_tokens, stop_ids=tokenizer.stop_ids)
    mark = f" [cut at {max_new_tokens} token{'' if max_new_tokens == 1 else 's'}]"
    return tokenizer.decode(tokens).strip() + (mark if len(tokens) == max_new_tokens else "")


def _question_and_answer(row: Row) -> tuple[str, str]:
    if isinstance(row, PromptRow):
        return row.prompt, row.completion
    if isinstance(row, ChatRow):
        last = max(index for index, message in enumerate(row.messages) if message["role"] == "assistant")
        questions = [message["content"] for message in row.messages[:last] if message["role"] == "user"]
        return questions[-1] if questions else "", row.messages[last]["content"]
    return "", ""
