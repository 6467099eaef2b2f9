"""A tiny Llama folder and adapters on it, shared by the tests of PEFT's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor

from megatron_frozen.checkpoint.hf_folder import load_hf_folder
from megatron_frozen.layers import ModelParallelConfig
from megatron_frozen.models import CausalLM
from tests.unit.models_reference import tiny_model

TINY = {
    "vocab_size": 65,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
}
IDS = torch.arange(12).view(2, 6)


def reference_model() -> Any:
    return tiny_model("llama", **TINY)


def loaded(folder: Path, *, dtype: torch.dtype = torch.float32) -> CausalLM:
    return load_hf_folder(folder, parallel=ModelParallelConfig(params_dtype=dtype))


def peft_folder(folder: Path, **fields: Any) -> Tensor:
    """An adapter that peft makes and saves; returns its logits."""
    fields = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", "init_lora_weights": False, **fields}
    torch.manual_seed(1)
    model = peft.get_peft_model(reference_model(), peft.LoraConfig(**fields)).eval()
    model.save_pretrained(str(folder), save_embedding_layers="lm_head" in fields["target_modules"])
    with torch.no_grad():
        return model(IDS).logits
