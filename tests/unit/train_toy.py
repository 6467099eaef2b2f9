"""A toy tokenizer folder with a chosen chat template, for the tests of `train/`."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

SPECIALS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<pad>"]
CORPUS = ["Hi there, how are you? I am fine. yes no 2+2=4 Answer: assistant user system the quick brown fox\n\n"] * 4

_HEADER = "{{ '<|im_start|>' + m['role'] + '\\n' }}"
_PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
_OTHERS = f"{{% if m['role'] != 'assistant' %}}{_HEADER}{{{{ m['content'] + '<|im_end|>\\n' }}}}{{% else %}}"


def chat_ml(answer: str) -> str:
    """ChatML with `answer` as the template of an assistant turn."""
    return f"{{% for m in messages %}}{_OTHERS}{answer}{{% endif %}}{{% endfor %}}{_PROMPT}"


_OPEN, _CLOSE = "{% generation %}", "{% endgeneration %}"
CHAT_ML = chat_ml(_HEADER + "{{ m['content'] + '<|im_end|>\\n' }}")
TAGGED = {
    "content": chat_ml(_HEADER + _OPEN + "{{ m['content'] }}" + _CLOSE + "{{ '<|im_end|>\\n' }}"),
    "content and end": chat_ml(_HEADER + _OPEN + "{{ m['content'] + '<|im_end|>' }}" + _CLOSE + "{{ '\\n' }}"),
    "whole turn": chat_ml(_HEADER + _OPEN + "{{ m['content'] + '<|im_end|>\\n' }}" + _CLOSE),
    "header too": chat_ml(_OPEN + _HEADER + "{{ m['content'] + '<|im_end|>\\n' }}" + _CLOSE),
    "two blocks": chat_ml(
        _HEADER + _OPEN + "{{ m['content'] }}" + _CLOSE + _OPEN + "{{ '<|im_end|>' }}" + _CLOSE + "{{ '\\n' }}"
    ),
}
_KEPT = "{{ (m['content'] if loop.last else m['content'].split('</think>')[-1]) + '<|im_end|>\\n' }}"
REASONING = chat_ml(_HEADER + _KEPT)
REASONING_TAGGED = chat_ml(_HEADER + _OPEN + _KEPT + _CLOSE)


def toy_backend() -> Backend:
    """A small byte-level BPE."""
    return Backend.from_str(_trained())


@cache
def _trained() -> str:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend.to_str()


def add_around(backend: Backend, *, bos: bool, eos: bool) -> None:
    """Make encoding with special tokens put `<s>` before and `</s>` after the text."""
    single = f"{'<s> ' if bos else ''}$A{' </s>' if eos else ''}"
    ids = [("<s>", backend.token_to_id("<s>")), ("</s>", backend.token_to_id("</s>"))]
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)


def toy_folder(folder: Path, *, template: str | None = CHAT_ML, backend: Backend | None = None, **config: Any) -> Path:
    """Write the folder; `config` goes into tokenizer_config.json beside an `</s>` as eos_token."""
    folder.mkdir(exist_ok=True)
    (backend or toy_backend()).save(str(folder / "tokenizer.json"))
    values = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder
