"""Generation: the likeliest tokens, the same at any tensor-parallel size and on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_frozen.checkpoint.hf_folder import load_hf_folder
from megatron_frozen.comm import initialize_model_parallel
from megatron_frozen.layers import ModelParallelConfig
from megatron_frozen.testing import run_ranks
from megatron_frozen.train.chat import encode_prompt
from megatron_frozen.train.data import ChatRow, PromptRow, TextRow
from megatron_frozen.train.generate import generate
from megatron_frozen.train.sample import answer, choose_sample, question_row
from megatron_frozen.train.tokenizer import load_tokenizer
from tests.unit.train_job_toy import SIZES, toy_model
from tests.unit.train_toy import toy_folder

PROMPT = [5, 70, 71, 9, 33]


def tokens(rank: int, world_size: int, folder: str, options: dict[str, Any]) -> list[int]:
    initialize_model_parallel(world_size)
    model = load_hf_folder(folder, parallel=ModelParallelConfig(sequence_parallel="sp" in options))
    torch.manual_seed(rank)  # generation must not depend on a rank's own random state
    model.train()
    result = generate(model, PROMPT, **{"max_new_tokens": 6, "stop_ids": (), **options.get("sp", options)})
    assert model.training
    return result


def likeliest(folder: str) -> list[int]:
    model = load_hf_folder(folder, parallel=ModelParallelConfig())
    ids = list(PROMPT)
    with torch.no_grad():
        for _ in range(6):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(PROMPT) :]


def test_answer_is_the_likeliest_one_at_any_size(tmp_path):
    folder = str(toy_model(tmp_path / "base", tie_word_embeddings=False))
    expected = likeliest(folder)
    assert len(set(expected)) > 1
    for world_size, options in ((1, {}), (2, {}), (2, {"sp": {}}), (3, {})):
        assert run_ranks(world_size, tokens, folder, options) == [expected] * world_size
    stopped = run_ranks(1, tokens, folder, {"stop_ids": {expected[3]}})[0]
    assert stopped == expected[: expected.index(expected[3])]
    assert run_ranks(1, tokens, folder, {"max_new_tokens": 2})[0] == expected[:2]


def test_temperature_draws_the_same_tokens_on_every_rank(tmp_path):
    folder = str(toy_model(tmp_path / "base"))
    options = {"temperature": 2.0, "seed": 1, "max_new_tokens": 8}
    first, second = run_ranks(2, tokens, folder, options)
    assert first == second == run_ranks(1, tokens, folder, options)[0]
    assert all(token < SIZES["vocab_size"] for token in first)
    assert first != run_ranks(1, tokens, folder, {**options, "seed": 2})[0]
    assert first[:6] != likeliest(folder)


def test_the_tiniest_temperature_is_the_likeliest_answer(tmp_path):
    folder = str(toy_model(tmp_path / "base"))
    for temperature in (1e-300, 5e-324):
        assert run_ranks(1, tokens, folder, {"temperature": temperature})[0] == likeliest(folder)


def test_sample_is_the_first_held_out_question(tmp_path):
    tokenizer = load_tokenizer(toy_folder(tmp_path / "chat"))
    chat = ChatRow(
        where="x",
        messages=tuple(
            {"role": role, "content": text}
            for role, text in (("user", "Hi"), ("assistant", "no"), ("user", "how?"), ("assistant", "yes"))
        ),
    )
    text, prompt = TextRow(where="x", text="the fox"), PromptRow(where="x", prompt="2+2=", completion="4")
    sample = choose_sample([text, chat, prompt], prompt=None, tokenizer=tokenizer)
    assert sample is not None
    assert (sample.question, sample.reference) == ("how?", "yes")
    assert list(sample.prompt_ids) == encode_prompt(chat, tokenizer)
    sample = choose_sample([prompt], prompt=None, tokenizer=tokenizer)
    assert sample is not None
    assert (sample.question, sample.reference) == ("2+2=", "4")
    assert choose_sample([text], prompt=None, tokenizer=tokenizer) is None
    given = choose_sample([chat], prompt="Answer:", tokenizer=tokenizer)
    assert given is not None
    assert (given.question, given.reference) == ("Answer:", None)
    assert "<|im_start|>user\nAnswer:" in tokenizer.decode(given.prompt_ids, skip_special_tokens=False)


def test_question_without_chat_template_is_a_bare_prompt(tmp_path):
    tokenizer = load_tokenizer(toy_folder(tmp_path / "bare", template=None))
    row = question_row("Hi there", tokenizer)
    assert tokenizer.decode(encode_prompt(row, tokenizer)) == "Hi there"


@pytest.mark.parametrize("length", [1, 3])
def test_answer_is_text(tmp_path, length):
    folder = toy_model(tmp_path / "base")
    tokenizer = load_tokenizer(folder)
    model = load_hf_folder(folder, parallel=ModelParallelConfig())
    sample = choose_sample((), prompt="Hi", tokenizer=tokenizer)
    assert sample is not None
    expected = generate(model, sample.prompt_ids, max_new_tokens=length, stop_ids=tokenizer.stop_ids)
    mark = f" [cut at {length} token{'s' if length > 1 else ''}]"
    shown = answer(model, sample, tokenizer=tokenizer, max_new_tokens=length)
    assert shown == tokenizer.decode(expected).strip() + mark
    tokenizer.stop_ids = frozenset({expected[-1]})
    assert "cut at" not in answer(model, sample, tokenizer=tokenizer, max_new_tokens=length)
