"""The same training step by transformers and peft, as their users write it. The one file that imports them.

AdamW is fused, see `lora_step`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from megatron_frozen.bench.workers import Step


def token_rows(folder: Path, text: str, *, shape: tuple[int, int, int]) -> Tensor:
    """Return the first ids of ``text`` as [steps, batch, sequence]."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"][0]  # no model sees the whole text at once
    num_steps, num_rows, seq_length = shape
    return ids[: num_steps * num_rows * seq_length].view(shape)


def lora_step(
    *, folder: Path, adapter: Path, rows: Tensor, learning_rate: float, fp32_adapters: bool, compiled: bool
) -> Step:
    """Return a LoRA step of peft on a bf16 base. ``fp32_adapters`` is what peft does unless told otherwise."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    with _quiet_loading():
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        model = PeftModel.from_pretrained(base, str(adapter), is_trainable=True, autocast_adapter_dtype=fp32_adapters)
    return _step(model, rows=rows, learning_rate=learning_rate, compiled=compiled)


def full_step(*, folder: Path, rows: Tensor, learning_rate: float) -> Step:
    """Return a step of full fine-tuning in bf16 with AdamW."""
    from transformers import AutoModelForCausalLM

    with _quiet_loading():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return _step(model, rows=rows, learning_rate=learning_rate, compiled=False)


@contextmanager
def _quiet_loading() -> Iterator[None]:
    """Load without transformers' progress bar and its warnings that peft calls what will go."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def _step(model: nn.Module, *, rows: Tensor, learning_rate: float, compiled: bool) -> Step:
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=learning_rate, fused=True)
    forward: Callable[..., object] = torch.compile(model) if compiled else model

    def step(index: int) -> dict[str, float]:
        output = forward(input_ids=rows[index], labels=rows[index], use_cache=False)
        loss = output.loss  # pyright: ignore[reportAttributeAccessIssue]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": float(loss.detach())}

    return step
