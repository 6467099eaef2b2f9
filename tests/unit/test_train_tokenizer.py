"""The light tokenizer and chat template against `transformers`, and its errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from megatron_frozen.errors import CheckpointError, DataError
from megatron_frozen.train.tokenizer import load_tokenizer
from tests.unit.train_toy import CHAT_ML, REASONING_TAGGED, TAGGED, add_around, toy_backend, toy_folder

CHAT = [
    {"role": "system", "content": "Be brief <&'\">"},
    {"role": "user", "content": "Hi there, wie geht's? äöü"},
    {"role": "assistant", "content": "<think>hm</think>I am fine."},
    {"role": "user", "content": "the quick\n\n brown fox "},
    {"role": "assistant", "content": "yes\n"},
]
ODD_TEMPLATE = """
{%- set ns = namespace(found=false) %}
{%- macro shout(text) %}
    {{ text | upper | trim }}!
{%- endmacro %}
{% for message in messages %}
    {% if message.role == 'system' %}
        {% continue %}
    {% endif %}
    {% set ns.found = true %}
    {{ bos_token ~ message | tojson }}{{ message | tojson(indent=1) }}
    {{- shout(message['content']) }}{{ dict(a=1)['a'] }}{{ range(3) | list }}
{% endfor %}
{{ ns.found }} {{ strftime_now('%Y') }} {{ tools is none }} {{ documents is none }} {{ missing is defined }}
"""


@pytest.mark.parametrize("template", [CHAT_ML, *TAGGED.values(), REASONING_TAGGED, ODD_TEMPLATE])
@pytest.mark.parametrize("prompt", [False, True])
def test_renders_and_tokenises_as_transformers_does(tmp_path: Path, template: str, prompt: bool) -> None:  # noqa: FBT001
    folder = toy_folder(tmp_path, template=template, bos_token="<s>")
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    text = ours.render_chat(CHAT, add_generation_prompt=prompt).text
    assert text == theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=prompt)
    ids = ours.encode(text)
    assert ids == theirs.apply_chat_template(CHAT, add_generation_prompt=prompt, return_dict=False)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("template", TAGGED.values())
def test_generation_blocks_cover_what_transformers_marks(tmp_path: Path, template: str) -> None:
    folder = toy_folder(tmp_path, template=template)
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    rendering = ours.render_chat(CHAT)
    marked = theirs.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    ids = [token for token, mask in zip(marked["input_ids"], marked["assistant_masks"], strict=True) if mask]
    spans = "".join(rendering.text[start:stop] for start, stop in rendering.generated)
    assert spans == theirs.decode(ids)
    assert spans.count("I am fine.") == spans.count("yes") == 1


def test_a_generation_block_inside_a_set_block_is_placed_right(tmp_path: Path) -> None:
    template = "{% set x %}ab{% generation %}cd{% endgeneration %}{% endset %}{{ messages[0].content + x }}"
    rendering = load_tokenizer(toy_folder(tmp_path, template=template)).render_chat(CHAT[2:3])
    start, stop = rendering.generated[0]
    assert (rendering.text, rendering.text[start:stop]) == ("<think>hm</think>I am fine.abcd", "cd")


def test_without_a_generation_block_nothing_is_marked(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(toy_folder(tmp_path))
    assert not tokenizer.has_generation_blocks
    assert tokenizer.render_chat(CHAT).generated == ()


def test_special_ids(tmp_path: Path) -> None:
    backend = toy_backend()
    tokenizer = load_tokenizer(toy_folder(tmp_path / "a", backend=backend))
    assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.bos_id) == (1, 1, None)
    assert (tokenizer.stop_ids, tokenizer.prefix_ids, len(tokenizer)) == ({1}, (), backend.get_vocab_size())
    assert set(tokenizer.special_tokens) == {"<s>", "</s>", "<|im_start|>", "<|im_end|>", "<pad>"}
    named = {"pad_token": {"content": "<pad>"}, "bos_token": "<s>"}
    tokenizer = load_tokenizer(toy_folder(tmp_path / "b", backend=backend, **named))
    assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.bos_id) == (1, 4, 0)


@pytest.mark.parametrize(("bos", "eos", "prefix"), [(True, False, (0,)), (True, True, (0,)), (False, True, ())])
def test_the_prefix_is_what_the_post_processor_puts_before(
    tmp_path: Path, *, bos: bool, eos: bool, prefix: tuple[int, ...]
) -> None:
    backend = toy_backend()
    add_around(backend, bos=bos, eos=eos)
    tokenizer = load_tokenizer(toy_folder(tmp_path, backend=backend))
    assert tokenizer.prefix_ids == prefix
    assert 0 not in tokenizer.encode("Hi")
    assert 1 not in tokenizer.encode("Hi")


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_the_eos_of_the_model_is_the_fallback(tmp_path: Path, name: str) -> None:
    folder = toy_folder(tmp_path, eos_token=None)
    (folder / name).write_text(json.dumps({"eos_token_id": [3, 1]}))
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.eos_id, tokenizer.stop_ids) == (3, {1, 3})


def test_a_single_eos_id_and_the_special_tokens_map(tmp_path: Path) -> None:
    folder = toy_folder(tmp_path, eos_token=None)
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 1}))
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.eos_id, tokenizer.stop_ids) == (3, {1, 3})


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    backend = toy_backend()
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    assert 2 < len(load_tokenizer(toy_folder(tmp_path, backend=backend)).encode("the quick brown fox")) < 50


def test_templates_in_the_config(tmp_path: Path) -> None:
    one = load_tokenizer(toy_folder(tmp_path / "a", template=None, chat_template="one"))
    named = [{"name": "tool_use", "template": "tool"}, {"name": "default", "template": "two"}]
    several = load_tokenizer(toy_folder(tmp_path / "b", template=None, chat_template=named))
    assert (one.render_chat(CHAT).text, several.render_chat(CHAT).text) == ("one", "two")


def test_no_chat_template(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(toy_folder(tmp_path, template=None))
    with pytest.raises(
        CheckpointError, match=r"has no chat template, which chat rows need; add a chat_template\.jinja"
    ):
        tokenizer.render_chat(CHAT)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses the messages \\(roles must alternate\\)"),
        ("{{ messages[9].content + 1 }}", "refuses the messages"),
        ("{{ messages.append(1) }}", "refuses the messages .*unsafe"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refuses the messages .*unsafe"),
    ],
)
def test_a_template_that_fails_or_reaches_out(tmp_path: Path, template: str, message: str) -> None:
    tokenizer = load_tokenizer(toy_folder(tmp_path, template=template))
    with pytest.raises(DataError, match=message):
        tokenizer.render_chat(CHAT)


def test_broken_folders(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no tokenizer.json; write one with transformers"):
        load_tokenizer(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"the chat template of .* is broken .*; mend or replace it"):
        load_tokenizer(toy_folder(tmp_path / "a", template="{% for %}"))
    with pytest.raises(CheckpointError, match="names no eos_token, so nothing tells where an answer ends"):
        load_tokenizer(toy_folder(tmp_path / "b", eos_token=None))
    with pytest.raises(
        CheckpointError, match=r"names '<eot>' as its eos_token, which its tokenizer.json does not hold"
    ):
        load_tokenizer(toy_folder(tmp_path / "c", eos_token="<eot>"))
    folder = toy_folder(tmp_path / "d")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer.json is no tokenizer file"):
        load_tokenizer(folder)
    folder = toy_folder(tmp_path / "e")
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"chat_template.jinja is not UTF-8 text .*; copy it again"):
        load_tokenizer(folder)


@pytest.mark.parametrize("token", [5, ["</s>"], {"text": "</s>"}])
def test_a_named_token_that_is_no_text(tmp_path: Path, token: object) -> None:
    with pytest.raises(CheckpointError, match=r"has the eos_token .*, which is no text; mend tokenizer_config\.json"):
        load_tokenizer(toy_folder(tmp_path, eos_token=token))


@pytest.mark.parametrize("template", [5, {"default": "x"}, [{"name": "default", "template": 5}]])
def test_a_chat_template_that_is_no_text(tmp_path: Path, template: object) -> None:
    with pytest.raises(CheckpointError, match=r"has a chat_template that is no text; add a chat_template\.jinja"):
        load_tokenizer(toy_folder(tmp_path, template=None, chat_template=template))


def test_named_templates_without_a_default_are_none(tmp_path: Path) -> None:
    folder = toy_folder(tmp_path, template=None, chat_template=[{"template": "x"}, 5])
    assert not load_tokenizer(folder).has_chat_template


@pytest.mark.parametrize("ids", ["x", -1, [None], 1.5, [2**40], True])
def test_an_eos_id_that_is_no_id(tmp_path: Path, ids: object) -> None:
    folder = toy_folder(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    with pytest.raises(CheckpointError, match=r"generation_config.json has eos_token_id \[.*\]; give the number of a"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tokenizers", r"tokenizers is not installed; pip install 'megatron-frozen\[train\]'"),
        ("jinja2", r"jinja2 is not installed; pip install 'megatron-frozen\[train\]'"),
    ],
)
def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str) -> None:
    folder = toy_folder(tmp_path)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(folder)


def test_loading_takes_no_transformers(tmp_path: Path) -> None:
    program = (
        "import sys; from megatron_frozen.train.tokenizer import load_tokenizer; before = 'tokenizers' in sys.modules;"
        f"load_tokenizer({str(toy_folder(tmp_path))!r});"
        "print(before, 'tokenizers' in sys.modules, 'transformers' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "True", "False"]
