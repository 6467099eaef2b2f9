"""Labels on the answer only, in the context that generation gives, whatever the chat template looks like."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_frozen.errors import CheckpointError, DataError
from megatron_frozen.train.chat import encode_prompt, encode_row, encode_rows
from megatron_frozen.train.data import ChatRow, PromptRow, Row, TextRow
from megatron_frozen.train.packing import IGNORED, Example
from megatron_frozen.train.tokenizer import Tokenizer, load_tokenizer
from tests.unit.train_toy import (
    CHAT_ML,
    REASONING,
    REASONING_TAGGED,
    TAGGED,
    add_around,
    chat_ml,
    toy_backend,
    toy_folder,
)

NO_PROMPT = "{% for m in messages %}{{ '<|im_start|>' + m.role + ': ' + m.content + '<|im_end|>' }}{% endfor %}"
LLAMA_2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<s>[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + '</s>' }}{% endif %}{% endfor %}"
)
THINK_PROMPT = chat_ml("{{ '<|im_start|>assistant\\n<think>' + m['content'] + '<|im_end|>\\n' }}").replace(
    "<|im_start|>assistant\\n' }}", "<|im_start|>assistant\\n<think>' }}"
)
NO_END = "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"  # noqa: E501


def row(*contents: str) -> ChatRow:
    roles = ("user", "assistant")
    messages = tuple({"role": roles[i % 2], "content": content} for i, content in enumerate(contents))
    return ChatRow(where="rows.jsonl, line 3", messages=messages)


def learnt(example: Example, tokenizer: Tokenizer) -> list[str]:
    """The text of each unbroken run of labels."""
    runs: list[list[int]] = [[]]
    for token, label in zip(example.input_ids, example.labels, strict=True):
        assert label in (token, IGNORED)
        if label == IGNORED:
            runs.append([])
        else:
            runs[-1].append(token)
    return [tokenizer.decode(run, skip_special_tokens=False) for run in runs if run]


def context(example: Example) -> list[int]:
    """The tokens before the last run of labels."""
    labelled = [index for index, label in enumerate(example.labels) if label != IGNORED]
    while labelled[-1] - 1 in labelled:
        labelled.pop()
    return list(example.input_ids[: labelled[-1]])


def tokenizer_for(folder: Path, template: str | None) -> Tokenizer:
    return load_tokenizer(toy_folder(folder, template=template))


TWO_TURNS = row("Hi", "I am fine.", "the quick?", "\nbrown fox ")


@pytest.mark.parametrize("template", [CHAT_ML, *TAGGED.values()])
def test_case_42_equal_labels_with_and_without_generation_tags(tmp_path: Path, template: str) -> None:
    tokenizer = tokenizer_for(tmp_path, template)
    (example,) = encode_row(TWO_TURNS, tokenizer)
    assert learnt(example, tokenizer) == ["I am fine.<|im_end|>", "\nbrown fox <|im_end|>"]
    (plain,) = encode_row(TWO_TURNS, tokenizer_for(tmp_path / "plain", CHAT_ML))
    assert example == plain
    assert context(example) == encode_prompt(TWO_TURNS, tokenizer)


@pytest.mark.parametrize("template", [REASONING, REASONING_TAGGED])
def test_case_42_a_template_that_drops_earlier_reasoning(tmp_path: Path, template: str) -> None:
    """Each answer is learnt once, with its reasoning, in the rendering that holds it."""
    tokenizer = tokenizer_for(tmp_path, template)
    chat = row("Hi", "<think>2</think>I am fine.", "the quick?", "<think>4</think>yes")
    first, second = encode_row(chat, tokenizer)
    assert learnt(first, tokenizer) == ["<think>2</think>I am fine.<|im_end|>"]
    assert learnt(second, tokenizer) == ["<think>4</think>yes<|im_end|>"]
    assert "I am fine." in tokenizer.decode(second.input_ids)
    assert tokenizer.decode(second.input_ids).count("<think>") == 1
    assert context(first) == encode_prompt(row("Hi", "x"), tokenizer)
    assert context(second) == encode_prompt(chat, tokenizer)


def test_answers_without_reasoning_stay_one_example(tmp_path: Path) -> None:
    tokenizer = tokenizer_for(tmp_path, REASONING)
    (example,) = encode_row(TWO_TURNS, tokenizer)
    assert len(learnt(example, tokenizer)) == 2


@pytest.mark.parametrize("tagged", [False, True], ids=["plain", "tagged"])
def test_a_template_without_generation_prompt(tmp_path: Path, *, tagged: bool) -> None:
    """The header of an answer is no part of it, in training and in generation alike."""
    template = NO_PROMPT
    if tagged:
        body = "{% generation %}{{ m.content }}{% endgeneration %}{{ '<|im_end|>' }}"
        template = template.replace(" + m.content + '<|im_end|>' }}", " }}" + body)
    tokenizer = tokenizer_for(tmp_path, template)
    chat = row("Hi", "yes", "no", "fine")
    (example,) = encode_row(chat, tokenizer)
    assert learnt(example, tokenizer) == ["yes<|im_end|>", "fine<|im_end|>"]
    (example,) = encode_row(row("Hi", "yes"), tokenizer)
    assert tokenizer.decode(context(example), skip_special_tokens=False).endswith("<|im_start|>assistant: ")
    assert context(example) == encode_prompt(row("Hi", "yes"), tokenizer)


def test_the_space_before_an_answer_stays_with_its_first_word(tmp_path: Path) -> None:
    tokenizer = tokenizer_for(tmp_path, LLAMA_2)
    chat = row("Hi", "yes", "no", "fine")
    (example,) = encode_row(chat, tokenizer)
    assert learnt(example, tokenizer) == [" yes</s>", " fine</s>"]
    assert context(example) == encode_prompt(chat, tokenizer)


def test_a_template_with_no_token_that_ends_a_turn_gets_the_eos(tmp_path: Path) -> None:
    tokenizer = tokenizer_for(tmp_path, NO_END)
    (example,) = encode_row(row("Hi", "yes"), tokenizer)
    assert learnt(example, tokenizer) == ["yes\n</s>"]


def test_what_the_generation_prompt_supplies_is_not_learnt(tmp_path: Path) -> None:
    tokenizer = tokenizer_for(tmp_path, THINK_PROMPT)
    (example,) = encode_row(row("Hi", "yes"), tokenizer)
    assert learnt(example, tokenizer) == ["yes<|im_end|>"]


def test_an_answer_that_cannot_be_told_from_the_prompt_is_an_error(tmp_path: Path) -> None:
    prompt_only = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>' }}{% endif %}"
    untagged = CHAT_ML[: CHAT_ML.index("{% if add_generation_prompt")] + prompt_only
    message = (
        r"rows.jsonl, line 3: message 2 is rendered in a way that does not continue its generation prompt.*generation"
    )
    with pytest.raises(DataError, match=message):
        encode_row(row("Hi", "yes"), tokenizer_for(tmp_path / "a", untagged))
    tagged = TAGGED["content"][: TAGGED["content"].index("{% if add_generation_prompt")] + prompt_only
    tokenizer = tokenizer_for(tmp_path / "b", tagged)
    (example,) = encode_row(row("Hi", "yes"), tokenizer)
    assert learnt(example, tokenizer) == ["yes<|im_end|>"]


def test_generation_tags_around_nothing_are_an_error(tmp_path: Path) -> None:
    template = CHAT_ML + "{% if false %}{% generation %}{% endgeneration %}{% endif %}"
    with pytest.raises(
        DataError, match=r"line 3: message 2 has no text in a {% generation %} block.*mend the template"
    ):
        encode_row(row("Hi", "yes"), tokenizer_for(tmp_path, template))


def test_a_trailing_question_is_left_out(tmp_path: Path) -> None:
    tokenizer = tokenizer_for(tmp_path, CHAT_ML)
    assert encode_row(row("Hi", "yes", "no"), tokenizer) == encode_row(row("Hi", "yes"), tokenizer)


text = st.text(alphabet="Hi 2+=.\n\t\u00e9\U0001f600 ", min_size=1, max_size=12).filter(str.strip)


@settings(max_examples=60)
@given(turns=st.lists(st.tuples(text, text), min_size=1, max_size=3))
def test_any_chat_learns_exactly_its_answers(tmp_path_factory: pytest.TempPathFactory, turns: list) -> None:
    tokenizer = tokenizer_for(tmp_path_factory.mktemp("toy"), CHAT_ML)
    chat = row(*(content for turn in turns for content in turn))
    (example,) = encode_row(chat, tokenizer)
    assert learnt(example, tokenizer) == [f"{answer}<|im_end|>" for _, answer in turns]
    assert list(example.input_ids[: example.labels.index(next(x for x in example.labels if x != IGNORED))]) == (
        encode_prompt(row(turns[0][0]), tokenizer)
    )


@pytest.mark.parametrize(
    ("prompt", "completion"),
    [("Answer: ", "yes"), ("2+2=", "4"), ("Hi\n", "\nyes"), ("", "yes"), ("Hi there", ", you")],
)
def test_prompt_and_completion(tmp_path: Path, prompt: str, completion: str) -> None:
    """The prompt's tokens are those of the prompt alone, even where a token would reach across its end."""
    backend = toy_backend()
    add_around(backend, bos=True, eos=False)
    tokenizer = load_tokenizer(toy_folder(tmp_path, template=None, backend=backend))
    pair = PromptRow(where="x", prompt=prompt, completion=completion)
    (example,) = encode_row(pair, tokenizer)
    head = encode_prompt(pair, tokenizer)
    assert head == [0, *tokenizer.encode(prompt)]
    assert list(example.input_ids[: len(head)]) == head
    assert list(example.labels[: len(head)]) == [IGNORED] * len(head)
    assert learnt(example, tokenizer) == [completion + "</s>"]
    assert tokenizer.decode(example.input_ids, skip_special_tokens=False) == f"<s>{prompt}{completion}</s>"


def test_a_text_is_learnt_whole(tmp_path: Path) -> None:
    tokenizer = tokenizer_for(tmp_path, None)
    (example,) = encode_row(TextRow(where="x", text="the quick brown fox"), tokenizer)
    assert learnt(example, tokenizer) == ["the quick brown fox</s>"]
    assert example.input_ids == example.labels


def test_truncation_is_counted_and_examples_without_labels_are_dropped(tmp_path: Path) -> None:
    tokenizer = tokenizer_for(tmp_path, CHAT_ML)
    rows: list[Row] = [row("Hi", "yes"), row("Hi", "the quick brown fox " * 9), row("Hi " * 50, "no")]
    examples, report = encode_rows(rows, tokenizer, seq_length=24, source="rows.jsonl")
    assert [len(example.input_ids) for example in examples][1:] == [24]
    assert str(report) == "rows.jsonl: kept 2 (1 cut to seq_length), dropped 1 (1 no labelled tokens)"
    message = r"nothing to train on: rows.jsonl: kept 0, dropped 1 \(1 no labelled tokens\); raise seq_length \(24\)"
    with pytest.raises(DataError, match=message):
        encode_rows(rows[2:], tokenizer, seq_length=24, source="rows.jsonl")


def test_a_label_on_the_first_token_alone_teaches_nothing(tmp_path: Path) -> None:
    tokenizer = tokenizer_for(tmp_path, None)
    rows = [TextRow(where="x", text="the quick"), TextRow(where="x", text="brown fox")]
    with pytest.raises(DataError, match="nothing to train on"):
        encode_rows(rows, tokenizer, seq_length=1, source="rows.jsonl")


def test_a_row_that_the_template_refuses(tmp_path: Path) -> None:
    template = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}" + CHAT_ML
    tokenizer = tokenizer_for(tmp_path, template)
    answer_only = ChatRow(where="rows.jsonl, line 4", messages=({"role": "assistant", "content": "a"},))
    with pytest.raises(
        DataError, match=r"rows.jsonl, line 4: the chat template of .* refuses the messages \(user first"
    ):
        encode_rows([row("Hi", "yes"), answer_only], tokenizer, seq_length=64, source="rows.jsonl")
    _, report = encode_rows(
        [row("Hi", "yes"), answer_only], tokenizer, seq_length=64, source="rows.jsonl", on_bad_line="skip"
    )
    assert str(report) == "rows.jsonl: kept 1, dropped 1 (1 refused by the chat template)"


def test_chat_rows_without_a_template_stop_the_run_even_when_skipping(tmp_path: Path) -> None:
    tokenizer = tokenizer_for(tmp_path, None)
    with pytest.raises(CheckpointError, match="has no chat template"):
        encode_rows([TWO_TURNS], tokenizer, seq_length=64, source="rows.jsonl", on_bad_line="skip")


@pytest.mark.parametrize("template", [CHAT_ML, *TAGGED.values()])
@pytest.mark.parametrize("mark", ["\ufdd0", "\ufdd1", "\ufdd01\ufdd1"])
def test_no_character_of_the_data_moves_the_labels(tmp_path: Path, template: str, mark: str) -> None:
    tokenizer = load_tokenizer(toy_folder(tmp_path, template=template))
    (example,) = encode_row(row(f"Hi{mark}<|im_end|>", f"yes{mark} no"), tokenizer)
    assert learnt(example, tokenizer) == [f"yes{mark} no<|im_end|>"]
    assert f"Hi{mark}" in tokenizer.decode(example.input_ids)
