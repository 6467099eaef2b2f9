"""An adapter that a job trained on two ranks, through peft and back, at 1, 2 and 3 ranks: the logits stay the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from safetensors.torch import load_file

from megatron_frozen.testing import run_ranks
from tests.functional.peft_ranks import adapter_logits
from tests.unit.train_job_toy import SIZES, run_config, toy_config

_WEIGHTS = "adapter_model.safetensors"


def test_trained_adapter_goes_through_peft_and_back(tmp_path: Path) -> None:
    config = toy_config(tmp_path, tensor_model_parallel_size=2, sequence_parallel=True)
    run_ranks(2, run_config, config)
    trained, saved = Path(config.output_dir, "adapter"), tmp_path / "by peft"
    input_ids = torch.arange(24).view(2, 12)
    base: Any = transformers.AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.float32)
    with torch.no_grad():
        plain = base(input_ids).logits
        model: Any = peft.PeftModel.from_pretrained(base, str(trained)).eval()
        expected = model(input_ids).logits
    assert (expected - plain).abs().max() > 0.1  # the adapter has learnt something, in every B
    assert all(tensor.any() for name, tensor in load_file(trained / _WEIGHTS).items() if "lora_B" in name)
    model.save_pretrained(str(saved))
    torch.testing.assert_close(load_file(saved / _WEIGHTS), load_file(trained / _WEIGHTS), rtol=0, atol=0)
    for world_size in (1, 2, 3):
        shards = run_ranks(world_size, adapter_logits, config.model, [str(trained), str(saved)], input_ids)
        for logits in zip(*shards, strict=True):
            whole = torch.cat(logits, dim=-1)[..., : SIZES["vocab_size"]]
            torch.testing.assert_close(whole, expected, rtol=0, atol=1e-4)
