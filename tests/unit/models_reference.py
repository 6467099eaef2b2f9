"""Tiny random models of transformers, the reference of the model tests."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

Config = dict[str, Any]

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}

VARIANTS: dict[str, tuple[str, Config]] = {
    "llama": ("llama", {}),
    "llama tied, biases": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama3 rope": ("llama", {"rope_parameters": LLAMA3_ROPE, "max_position_embeddings": 64}),
    "llama linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}}),
    "llama dynamic rope": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0}, "max_position_embeddings": 8},
    ),
    "mistral, wide window": ("mistral", {"sliding_window": 64}),
    "mistral, narrow window": ("mistral", {"sliding_window": 5}),
    "qwen2": ("qwen2", {}),
    "qwen2, window from layer 1": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen2, yarn rope": ("qwen2", {"rope_parameters": YARN_ROPE, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3, bias": ("qwen3", {"head_dim": 16, "attention_bias": True}),
}
"""Name to (model type, settings beside the tiny sizes)."""

_TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}


def tiny_model(variant: str, **overrides: Any) -> Any:
    """A seeded fp32 model of a variant, with weights large enough for every part to show in the logits."""
    model_type, settings = VARIANTS[variant]
    config_class, model_class = _CLASSES[model_type]
    torch.manual_seed(0)
    model = model_class(config_class(**{**_TINY, **settings, **overrides})).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=0.2)
    return model


def tiny_config(variant: str, **overrides: Any) -> Config:
    """The config.json dictionary of a variant."""
    return tiny_model(variant, **overrides).config.to_dict()


def weights_of(model: Any) -> dict[str, Tensor]:
    """Its full weights by Hugging Face name, the tied head left out as in its files."""
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    return weights


def losses_and_gradients(model: Any, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Per-token losses [b, s], 0 where the label is -100, and the gradients of their sum by name."""
    model.zero_grad()
    logits = model(input_ids).logits
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    losses.sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return losses.detach(), gradients


def random_batch(*, num_rows: int = 2, seq_length: int = 12, vocab_size: int = 64) -> tuple[Tensor, Tensor]:
    """Token ids and labels [b, s]; every fifth label is -100."""
    generator = torch.Generator().manual_seed(1)
    input_ids = torch.randint(vocab_size, (num_rows, seq_length), generator=generator)
    labels = torch.randint(vocab_size, (num_rows, seq_length), generator=generator)
    labels.view(-1)[::5] = -100
    return input_ids, labels
