"""A Hugging Face folder's tokenizer and chat template, without `transformers`.

`tokenizers` and `jinja2` load in 0.05 s where `transformers.AutoTokenizer` takes 2 s on every rank. What a template may
use is what `transformers` gives it (tests compare the two): trimmed blocks, loop controls, `raise_exception`,
`strftime_now`, `tojson` that leaves HTML alone, and the `{% generation %}` block. Templates come with a checkpoint and
are not trusted: they run in jinja's sandbox.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from megatron_frozen.errors import CheckpointError, DataError
from megatron_frozen.io import read_json

# These mark in the rendered text what a `generation` block produced. Data can't hold them: each process makes its own.
_OPEN, _CLOSE = (f"\ufdd0{secrets.randbits(64)}\ufdd1" for _ in range(2))
_MARKERS = re.compile(f"{_OPEN}|{_CLOSE}")
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendering:
    """A conversation as text."""

    text: str
    """The text that is tokenised."""
    generated: tuple[tuple[int, int], ...]
    """Start and end of what the template's `generation` blocks produced."""


class Tokenizer:
    """Text to token ids and back, and conversations to text. Made by `load_tokenizer`."""

    def __init__(self, backend: Any, *, template: str | None, named_tokens: Mapping[str, str], folder: Path) -> None:
        self._backend, self._folder, self._named_tokens = backend, folder, dict(named_tokens)
        self._template = None if template is None else _compile(template, folder=folder)
        self.has_chat_template = template is not None
        self.has_generation_blocks = bool(template and re.search(r"\{%-?\s*generation\s*-?%\}", template))
        self.bos_id = self._id("bos_token") if "bos_token" in named_tokens else None
        self.eos_id = self._id("eos_token")
        self.pad_id = self._id("pad_token") if "pad_token" in named_tokens else self.eos_id
        self.stop_ids = frozenset({self.eos_id, *_generation_eos_ids(folder)})
        added = backend.get_added_tokens_decoder()
        specials = {token.content for token in added.values() if token.special}
        specials |= {backend.id_to_token(token_id) for token_id in self.stop_ids} - {None}
        self.special_tokens = tuple(sorted(specials, key=len, reverse=True))
        with_none = backend.encode("", add_special_tokens=True).ids
        self.prefix_ids = tuple(with_none[:-1] if with_none[-1:] == [self.eos_id] else with_none)

    def __len__(self) -> int:
        """How many ids there are, added tokens included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """The ids of `text` alone. Text that no template renders comes after `prefix_ids` (a BOS, or nothing)."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = False) -> Rendering:
        """`messages` through the chat template.

        CheckpointError if the folder has no template, DataError with its words if it refuses the messages.
        """
        if self._template is None:
            raise CheckpointError(
                f"{self._folder} has no chat template, which chat rows need; add a chat_template.jinja, "
                "or give prompt/completion or text rows"
            )
        try:
            marked = self._template.render(
                messages=list(messages), add_generation_prompt=add_generation_prompt, tools=None, documents=None,
                **self._named_tokens,
            )  # fmt: skip
        except Exception as error:  # a template can fail in any way that Python can
            raise DataError(f"the chat template of {self._folder} refuses the messages ({error})") from error
        return _unmark(marked)

    def _id(self, name: str) -> int:
        token = self._named_tokens[name]
        token_id = self._backend.token_to_id(token)
        if token_id is None:
            raise CheckpointError(
                f"{self._folder} names '{token}' as its {name}, which its tokenizer.json does not hold; "
                "mend tokenizer_config.json"
            )
        return token_id


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder, with its chat template if it has one.

    Reads tokenizer.json, tokenizer_config.json, special_tokens_map.json, chat_template.jinja, generation_config.json.
    CheckpointError if a part that is needed is absent or broken.
    """
    folder = Path(folder)
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has no tokenizer.json; write one with transformers: AutoTokenizer.from_pretrained(folder)"
            ".save_pretrained(folder)"
        )
    try:
        from tokenizers import Tokenizer as Backend
    except ImportError as error:
        raise CheckpointError("tokenizers is not installed; pip install 'megatron-frozen[train]'") from error
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the Rust side raises a bare Exception
        raise CheckpointError(f"{path} is no tokenizer file ({error}); copy it again") from error
    backend.no_truncation()
    backend.no_padding()
    config = {**_read_json(folder / "special_tokens_map.json"), **_read_json(folder / "tokenizer_config.json")}
    named = {name: _content(config[name], name=name, folder=folder) for name in _NAMED_TOKENS if config.get(name)}
    if "eos_token" not in named:
        ids = _generation_eos_ids(folder)
        token = backend.id_to_token(ids[0]) if ids else None
        if token is None:
            raise CheckpointError(f"{folder} names no eos_token, so nothing tells where an answer ends; add it to "
                                  "tokenizer_config.json")  # fmt: skip
        named["eos_token"] = token
    return Tokenizer(backend, template=_read_template(folder, config), named_tokens=named, folder=folder)


def _read_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{path} is not UTF-8 text ({error}); copy it again") from error
    template = config.get("chat_template")
    if isinstance(template, list):  # several named templates
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, Mapping)}
        template = named.get("default")
    if not isinstance(template, str | None):
        raise CheckpointError(
            f"{folder / 'tokenizer_config.json'} has a chat_template that is no text; add a chat_template.jinja"
        )
    return template


def _compile(template: str, *, folder: Path) -> Any:
    try:
        import jinja2
        from jinja2 import nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise CheckpointError("jinja2 is not installed; pip install 'megatron-frozen[train]'") from error

    class GenerationBlock(Extension):
        tags = {"generation"}  # noqa: RUF012 (the attribute that jinja2 reads)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Any) -> str:
            return f"{_OPEN}{caller()}{_CLOSE}"

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:  # noqa: FBT001, FBT002 (a template's call)
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    now = datetime.now()  # one moment for the whole run, so that a conversation renders alike each time
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = now.strftime
    try:
        return environment.from_string(template)
    except jinja2.TemplateError as error:
        raise CheckpointError(f"the chat template of {folder} is broken ({error}); mend or replace it") from error


def _unmark(marked: str) -> Rendering:
    text, spans, stack = "", [], []
    position = 0
    for match in _MARKERS.finditer(marked):
        text += marked[position : match.start()]
        position = match.end()
        if match[0] == _OPEN:
            stack.append(len(text))
        elif stack:
            spans.append((stack.pop(), len(text)))
    return Rendering(text=text + marked[position:], generated=tuple(sorted(spans)))


def _generation_eos_ids(folder: Path) -> list[int]:
    for name in ("generation_config.json", "config.json"):
        ids = _read_json(folder / name).get("eos_token_id")
        if ids is None:
            continue
        ids = ids if isinstance(ids, list) else [ids]
        if not all(type(token_id) is int and 0 <= token_id < 2**31 for token_id in ids):
            raise CheckpointError(f"{folder / name} has eos_token_id {ids}; give the number of a token, or several")
        return ids
    return []


def _read_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _content(token: Any, *, name: str, folder: Path) -> str:
    content = token.get("content") if isinstance(token, Mapping) else token
    if not isinstance(content, str):
        raise CheckpointError(f"{folder} has the {name} {token!r}, which is no text; mend tokenizer_config.json")
    return content
