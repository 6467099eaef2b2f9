"""A real pretrained model: fp32 logits of SmolLM2-135M-Instruct against transformers, on one rank and on three."""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from megatron_frozen.checkpoint.demo_model import fetch_demo_model
from megatron_frozen.checkpoint.hf_folder import load_hf_folder
from megatron_frozen.diagnostics import Recorder
from megatron_frozen.layers import ModelParallelConfig
from megatron_frozen.testing import run_ranks
from tests.functional.smollm2_ranks import PROMPT_LENGTH, folder_logits


@pytest.fixture(scope="module")
def reference() -> tuple[Path, Tensor, Tensor]:
    """The model's folder, token ids [2, s] of real text, and transformers' fp32 logits [2, s, V]."""
    folder = fetch_demo_model()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer((statistics.__doc__ or "") + (argparse.__doc__ or ""))["input_ids"]
    input_ids = torch.tensor(ids[: 2 * PROMPT_LENGTH]).view(2, PROMPT_LENGTH)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return folder, input_ids, model(input_ids).logits


@pytest.mark.parametrize(("world_size", "sequence_parallel"), [(1, False), (3, False), (3, True)])
def test_logits_are_those_of_transformers(
    reference: tuple[Path, Tensor, Tensor], world_size: int, *, sequence_parallel: bool
) -> None:
    folder, input_ids, expected = reference
    assert expected.std() > 1, "the reference must be a model that has learnt something"
    shards = run_ranks(world_size, folder_logits, str(folder), input_ids, sequence_parallel, timeout_s=300)
    torch.testing.assert_close(torch.cat(shards, dim=-1), expected, rtol=0, atol=1e-4)


def test_logits_are_those_of_projections_called_one_by_one(reference: tuple[Path, Tensor, Tensor]) -> None:
    """q, k and v are one product, gate and up another; a hook on each makes them seven a layer again."""
    folder, input_ids, _ = reference
    model = load_hf_folder(folder, parallel=ModelParallelConfig())
    found = []
    for num_products in (4, 7):
        with torch.no_grad(), Recorder() as seen:
            found.append(model(input_ids))
        assert seen.count("aten.mm") == num_products * len(model.model.layers) + 1
        for name, module in model.named_modules():
            if name.endswith(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")):
                module.register_forward_hook(lambda *_: None)
    torch.testing.assert_close(*found, rtol=0, atol=1e-5)
