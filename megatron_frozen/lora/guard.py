"""A check that adapters learn, as a run whose adapters get no gradient looks healthy otherwise, and one cure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from megatron_frozen.comm import WORLD, gather_objects
from megatron_frozen.errors import ConfigError
from megatron_frozen.layers import VocabParallelEmbedding
from megatron_frozen.lora.apply import lora_parameters


def assert_adapters_learn(model: nn.Module) -> None:
    """Raise unless some gradient of the active adapter is non-zero. Call it after a backward pass, on every rank.

    It holds at any step: while B is zero the gradients of A are zero, but those of B are not. The ranks' gradients
    count together, so one rank without labelled tokens does no harm. Collectives: one small exchange over the world.

    Raises:
        ConfigError: all gradients are absent or zero, on every rank.
    """
    assert_some_gradient(lora_parameters(model))


def assert_some_gradient(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Do this for the given parameters of an adapter."""
    grads = [parameter.grad for parameter in parameters]
    num_absent = sum(grad is None for grad in grads)
    is_learning = any(grad is not None and bool(torch.count_nonzero(grad)) for grad in grads)
    if not any(gather_objects(is_learning, group=WORLD)):
        raise ConfigError(
            f"no adapter gradient is other than zero ({num_absent} of {len(grads)} are absent), so nothing is learned; "
            f"the loss must depend on the adapted layers, and reentrant activation checkpointing needs "
            f"megatron_frozen.lora.require_input_grads(model)"
        )


def require_input_grads(model: nn.Module) -> None:
    """Make every VocabParallelEmbedding's output require grad, so that reentrant checkpoints after it run backward.

    Non-reentrant checkpoints (use_reentrant=False) need no such help and skip that first input gradient.
    """

    def require(_module: nn.Module, _args: Any, output: torch.Tensor) -> None:
        output.requires_grad_()

    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding):
            module.register_forward_hook(require)
