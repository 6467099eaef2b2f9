"""The commands beside `train` that run a model. Under torchrun all ranks hold one tensor-parallel copy of it."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_frozen.checkpoint.hf_folder import load_hf_folder
from megatron_frozen.checkpoint.merge import merge_adapter
from megatron_frozen.comm import WORLD, group_rank, together
from megatron_frozen.environment import launched_rank
from megatron_frozen.errors import ConfigError
from megatron_frozen.layers import ModelParallelConfig
from megatron_frozen.lora import adapters_disabled, load_adapter
from megatron_frozen.models import CausalLM
from megatron_frozen.train.chat import encode_prompt
from megatron_frozen.train.config import check_model_folder
from megatron_frozen.train.dataset import check_token_ids
from megatron_frozen.train.generate import generate
from megatron_frozen.train.job import model_folder
from megatron_frozen.train.launch import parallel_ranks
from megatron_frozen.train.sample import question_row
from megatron_frozen.train.schema import DTYPES
from megatron_frozen.train.tokenizer import Tokenizer, load_tokenizer

_TIMEOUT_S = 600.0


def answer_prompt(given: argparse.Namespace) -> None:
    """Print the model's answer to `given.prompt`, and with `given.adapter` the adapted one's after it."""
    if not 0 <= given.temperature < math.inf:
        raise ConfigError(f"--temperature is {given.temperature}; give 0 (the likeliest answer) or a number above it")
    if not 0 <= given.seed < 2**63:
        raise ConfigError(f"--seed is {given.seed}; give a whole number from 0 up to 2**63 - 1")
    if any("\ud800" <= char <= "\udfff" for char in given.prompt):
        raise ConfigError("--prompt is not UTF-8 text; give it in UTF-8")
    _, world_size, _ = launched_rank()
    check_model_folder(given.model, tensor_model_parallel_size=world_size)
    with parallel_ranks(tensor_model_parallel_size=world_size, timeout_s=_TIMEOUT_S) as device:
        folder = model_folder(given.model)
        with together(doing="reading the prompt"):
            tokenizer = load_tokenizer(folder)
            prompt_ids = encode_prompt(question_row(given.prompt, tokenizer), tokenizer)
            if not prompt_ids:
                raise ConfigError("--prompt is empty and this model has no token to start from; give some text")
            check_token_ids(prompt_ids, model_folder=folder, source="--prompt")
        model = _load(folder, given, device=device)

        def answer(heading: str) -> None:
            stream = AnswerStream(heading, tokenizer=tokenizer)
            tokens = generate(
                model,
                prompt_ids,
                max_new_tokens=given.max_new_tokens,
                stop_ids=tokenizer.stop_ids,
                temperature=given.temperature,
                seed=given.seed,
                on_token=stream.show if sys.stdout.isatty() else None,
            )
            stream.end(tokens)

        with adapters_disabled(model):
            answer("without adapter: " if given.adapter else "")
        if given.adapter:
            answer("with adapter: ")


class AnswerStream:
    """An answer on the first rank's stdout, as it grows or at once: the text is the same."""

    def __init__(self, heading: str, *, tokenizer: Tokenizer) -> None:
        self._heading, self._tokenizer = heading, tokenizer
        self._shown = ""

    def show(self, tokens: Sequence[int]) -> None:
        """Print what `tokens`, the answer so far, add; not yet a character of which only some bytes are there."""
        self._print(self._text(tokens).rstrip("\ufffd"))

    def end(self, tokens: Sequence[int]) -> None:
        """Print the rest of the answer `tokens` and end the line."""
        self._print(self._text(tokens) + "\n")

    def _text(self, tokens: Sequence[int]) -> str:
        return self._heading + self._tokenizer.decode(tokens).strip()

    def _print(self, text: str) -> None:
        if group_rank(WORLD) == 0:
            print(text[len(self._shown) :], end="", flush=True)
            self._shown = text


def merge_folder(given: argparse.Namespace) -> None:
    """Write `given.model` with `given.adapter` merged in as the Hugging Face folder `given.output`."""
    _, world_size, _ = launched_rank()
    check_model_folder(given.model, tensor_model_parallel_size=world_size)
    with parallel_ranks(tensor_model_parallel_size=world_size, timeout_s=_TIMEOUT_S) as device:
        folder = model_folder(given.model)
        model = _load(folder, given, device=device)
        merge_adapter(model, given.output, source_folder=folder, dtype=DTYPES[given.dtype])
        _print_first(f"merged into {given.output}")


def _load(folder: Path, given: argparse.Namespace, *, device: torch.device) -> CausalLM:
    parallel = ModelParallelConfig(params_dtype=DTYPES[given.dtype])
    model = load_hf_folder(folder, parallel=parallel).to(device)
    if given.adapter:
        load_adapter(model, given.adapter)
    return model


def _print_first(text: str) -> None:
    if group_rank(WORLD) == 0:
        print(text, flush=True)
