"""A tiny model compiled on each rank of the pool, beside the same model in eager."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from megatron_frozen import LoraConfig, apply_lora
from megatron_frozen.comm import initialize_model_parallel
from megatron_frozen.models import CausalLM
from megatron_frozen.params import sum_partial_grads
from megatron_frozen.testing import relative_error
from tests.unit.models_ranks import build_model

BATCHES = [[[3, 7, 2], [12]], [[5, 5], [2, 8]], [[8], [8]], [[4, 2], [2, 4], [6]]]
"""Document lengths: packed and whole rows of several lengths and numbers."""
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-6}
"""Of a model in fp64, whose adapters are fp32: which way their gradients are rounded at last is the CPU's choice."""


def _model(config: dict[str, Any], weights: dict[str, Tensor], options: dict[str, Any]) -> CausalLM:
    model = build_model(config, weights, sequence_parallel=options.get("sequence_parallel", False))
    if options.get("lora", True):
        apply_lora(model, LoraConfig(r=2))
        torch.manual_seed(3)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.5)
    return model.train()


def _results(model: CausalLM, documents: list[list[int]], *, evaluates: bool) -> list[Tensor]:
    """Losses, gradients and, if asked, what a pass without gradients gives."""
    model.zero_grad()
    generator = torch.Generator().manual_seed(len(documents[0]))
    input_ids = torch.randint(64, (len(documents), sum(documents[0])), generator=generator)
    losses = model(input_ids, labels=input_ids, document_lengths=documents)
    losses.sum().backward()
    sum_partial_grads(model.parameters(), group=model.tp_group)
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    with torch.no_grad():
        plain = [model(input_ids, document_lengths=documents)] if evaluates else []
    return [losses.detach(), *plain, *gradients]


def compile_model(
    rank: int, world_size: int, config: dict[str, Any], weights: dict[str, Tensor], options: dict[str, Any]
) -> tuple[float, list[int], int]:
    """Return the largest error against eager in units of its tolerance, the number of graphs after the batches and
    after recomputing one, and the number of tensors compared."""
    del rank
    initialize_model_parallel(world_size)
    torch._dynamo.reset()
    counters.clear()
    eager, compiled = _model(config, weights, options), _model(config, weights, options)
    compiled.model.compile_layers(backend="aot_eager")
    evaluates = options.get("evaluates", True)
    error, num_graphs, num_compared = 0.0, [], 0
    for batches, recomputes in ((BATCHES, False), (BATCHES[:1], True)):
        compiled.activation_checkpointing = recomputes
        for documents in batches:
            expected, actual = (_results(model, documents, evaluates=evaluates) for model in (eager, compiled))
            for ours, plain in zip(actual, expected, strict=True):
                error = max(error, relative_error(ours, plain) / TOLERANCES[plain.dtype])
            num_compared += len(expected)
        num_graphs.append(counters["stats"]["unique_graphs"])
    torch._dynamo.reset()
    return error, num_graphs, num_compared
