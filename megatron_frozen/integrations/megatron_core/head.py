"""The output layer of megatron-core's GPTModel, which no spec names."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from megatron_frozen.errors import ConfigError
from megatron_frozen.integrations.megatron_core import upstream
from megatron_frozen.integrations.megatron_core.layers import ColumnSteps, RowSteps, use_frozen_linear


def use_frozen_head(model: nn.Module) -> nn.Module:
    """Make the ``output_layer`` of a built GPTModel ours, in place, and return ``model``.

    The layer object stays (see ``use_frozen_linear``); it may be tied. Under defer_embedding_wgrad_compute it fills
    megatron-core's two buffers, which takes apex or ``patch()`` to drain, and leaves them empty where its weight is
    frozen, for which megatron-core's own drain has no case: turn the option off then, or ``patch()``. A model without
    an output layer, such as an early pipeline stage, is left alone.

    Raises ConfigError where the output layer is not one of megatron-core's local layers, or a wrapper is given.
    """
    head = getattr(model, "output_layer", None)
    if head is None and isinstance(getattr(model, "module", None), nn.Module):
        raise ConfigError(
            f"use_frozen_head was given a {type(model).__name__} around a model; give the GPTModel itself, before it "
            f"is wrapped"
        )
    if head is None or isinstance(head, ColumnSteps):
        return model
    if not isinstance(head, upstream.core("tensor_parallel.layers").ColumnParallelLinear):
        raise ConfigError(
            f"the output_layer of this {type(model).__name__} is a {type(head).__name__}, and only megatron-core's "
            f"ColumnParallelLinear can be swapped; leave it as it is"
        )
    use_frozen_linear(head)
    return model


class _ModelSteps:
    """A GPTModel whose output layer is ours; give its transformer_layer_spec through ``frozen_layer_spec``.

    gradient_accumulation_fusion needs no apex, as long as every linear is ours.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        """Take what megatron-core's GPTModel takes."""
        with _fusion_allowed():
            super().__init__(*args, **options)
        model: Any = self
        use_frozen_head(model)
        _check_fusion(model)


@functools.cache
def frozen_gpt_model_class() -> type:
    """Return ``FrozenGPTModel``, a subclass of megatron-core's GPTModel. Imports megatron-core."""
    base = upstream.core("models.gpt.gpt_model").GPTModel
    return type("FrozenGPTModel", (_ModelSteps, base), {"__doc__": _ModelSteps.__doc__, "__module__": __package__})


@contextmanager
def _fusion_allowed() -> Iterator[None]:
    """Let upstream's constructor build a head under gradient_accumulation_fusion where apex is absent."""
    layers = upstream.core("tensor_parallel.layers")
    before = layers._grad_accum_fusion_available
    layers._grad_accum_fusion_available = True
    try:
        yield
    finally:
        layers._grad_accum_fusion_available = before


def _check_fusion(model: nn.Module) -> None:
    """Refuse a model of which upstream's own linears would look for apex in the backward."""
    layers = upstream.core("tensor_parallel.layers")
    if layers._grad_accum_fusion_available:
        return
    for name, module in model.named_modules():
        fuses = isinstance(module, layers.ColumnParallelLinear | layers.RowParallelLinear)
        if fuses and not isinstance(module, ColumnSteps | RowSteps) and module.gradient_accumulation_fusion:
            raise ConfigError(
                f"{name} is megatron-core's own {type(module).__name__} under gradient_accumulation_fusion, for which "
                f"it needs apex; swap the layers with frozen_layer_spec, patch megatron-core, or turn the option off"
            )
