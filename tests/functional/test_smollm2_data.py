"""The shipped question-and-answer set through the demo model's own tokenizer and chat template."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from megatron_frozen.checkpoint.demo_model import fetch_demo_model
from megatron_frozen.train.chat import encode_prompt, encode_row, encode_rows
from megatron_frozen.train.data import ChatRow, read_rows
from megatron_frozen.train.packing import IGNORED, pack
from megatron_frozen.train.tokenizer import load_tokenizer

DATA = Path(__file__).parents[2] / "examples" / "data"


@pytest.mark.parametrize("name", ["stdlib_qa_train.jsonl", "stdlib_qa_eval.jsonl"])
def test_ids_are_those_of_transformers_and_labels_the_answers(name: str) -> None:
    folder = fetch_demo_model()
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    rows, _ = read_rows(DATA / name)
    for row in rows:
        assert isinstance(row, ChatRow)
        (example,) = encode_row(row, ours)
        messages = [dict(message) for message in row.messages]
        whole = theirs.apply_chat_template(messages, return_dict=False)
        prompt = theirs.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=False)
        newline = theirs.encode("\n", add_special_tokens=False)
        assert [*example.input_ids, *newline] == whole
        assert encode_prompt(row, ours) == prompt == list(example.input_ids[: len(prompt)])
        assert [label != IGNORED for label in example.labels] == [
            index >= len(prompt) for index in range(len(example.labels))
        ]
        assert ours.decode(example.labels[len(prompt) :], skip_special_tokens=False) == (
            messages[1]["content"] + "<|im_end|>"
        )


def test_the_set_packs_tightly() -> None:
    tokenizer = load_tokenizer(fetch_demo_model())
    assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.stop_ids) == (2, 2, {2})
    rows, _ = read_rows(DATA / "stdlib_qa_train.jsonl")
    examples, report = encode_rows(rows, tokenizer, seq_length=512, source="train")
    assert str(report) == "train: kept 800, dropped 0"
    num_tokens = sum(len(example.input_ids) for example in examples)
    packed = pack(examples, seq_length=512, pad_id=tokenizer.pad_id)
    assert num_tokens / (512 * len(packed)) > 0.97
