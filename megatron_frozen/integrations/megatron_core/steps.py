"""What our subclasses of megatron-core's linears share: constructor, product, checkpoint, and room for an adapter."""

from __future__ import annotations

import abc
import copy
import inspect
from typing import Any, cast

import torch

from megatron_frozen.comm.groups import Group
from megatron_frozen.integrations.megatron_core.sharded_state import complete, sharded_tensors
from megatron_frozen.layers.parts import frozen_or_trainable_linear
from megatron_frozen.main_grad import introduce, name_parameters
from megatron_frozen.params import KeepsMarks, set_tensor_model_parallel_attributes


class Adapter(torch.nn.Module):
    """What a layer lets multiply in its place, between its own communication before and after."""

    @abc.abstractmethod
    def multiply(self, base: Any, input_parallel: torch.Tensor) -> torch.Tensor:
        """Return what ``base.multiply(input_parallel)`` would, and more: this rank's part of the output, no bias."""

    @abc.abstractmethod
    def partition_dims(self) -> dict[str, int]:
        """Return the names of this module's parameters that are cut over tensor-parallel ranks, with the dim."""


class Steps(KeepsMarks):
    """What the two share: how the layer is built around upstream's constructor, its product and its checkpoint."""

    config: Any
    tp_group: Group
    weight: torch.nn.Parameter | None
    bias: torch.nn.Parameter | None
    partition_dim: int
    tensor_model_parallel = True
    """With ``partition_dim`` what Megatron-Bridge's AutoMapping reads of a class that it has no name for."""
    output_dtype: torch.dtype | None = None
    adapter: Adapter | None
    """What multiplies in place of this layer; a child module, so that state dicts keep the layer's own keys."""
    explicit_expert_comm: bool
    gradient_accumulation_fusion: bool
    skip_bias_add: bool
    sequence_parallel: bool

    def build(
        self, base: type, sizes: tuple[int, int], *, config: Any, pg_collection: Any, name: str | None, **options: Any
    ) -> None:
        """Run upstream's constructor with those arguments that its release has, and finish the layer."""
        known = inspect.signature(base.__init__).parameters
        if "pg_collection" in known:
            options["pg_collection"] = pg_collection
        elif options["tp_group"] is None and pg_collection is not None:
            options["tp_group"] = pg_collection.expt_tp if options["is_expert"] else pg_collection.tp
        if "name" in known:
            options["name"] = name
        super().__init__(*sizes, config=_without_fusion(config), **options)
        self.config, self.gradient_accumulation_fusion = config, config.gradient_accumulation_fusion
        self.finish(name=name, stride=options["stride"])

    def finish(self, *, name: str | None = None, stride: int = 1) -> None:
        """Mark a weight that upstream left unmarked, as it does where it initialises none, and make it known."""
        self.adapter = None
        if self.weight is not None:
            if not hasattr(self.weight, "partition_dim"):
                set_tensor_model_parallel_attributes(
                    self.weight, is_parallel=True, dim=self.partition_dim, stride=stride
                )
            introduce(self.weight)
        if name is not None:
            name_parameters(self, prefix=name)

    def product(
        self,
        input_: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        sums_dgrad: bool = False,
        gathers: bool = False,
        grad_output_buffer: list[torch.Tensor] | None = None,
        wgrad_deferral_limit: Any = None,
    ) -> torch.Tensor:
        """Return X W^T + b [..., O of this rank]: frozen or trainable, as the weight is now."""
        _mark_for_offloading(input_, self.config)
        return frozen_or_trainable_linear(
            input_,
            weight,
            bias,
            config=self.config,
            gradient_accumulation_fusion=self.gradient_accumulation_fusion,
            allreduce_dgrad=sums_dgrad,
            sequence_parallel=gathers,
            grad_output_buffer=grad_output_buffer,
            wgrad_deferral_limit=wgrad_deferral_limit,
            tp_group=self.tp_group,
            output_dtype=self.output_dtype,
        )

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Return upstream's sharded state dict; ``metadata`` may be None or lack the data-parallel group."""
        metadata = complete(metadata)
        tensors = cast("Any", super()).sharded_state_dict(prefix, sharded_offsets, metadata)
        if self.adapter is not None:  # upstream knows how weight and bias are cut
            cut = {f"adapter.{name}": dim for name, dim in self.adapter.partition_dims().items()}
            own = {name: param for name, param in self.named_parameters() if name in cut}
            tensors |= sharded_tensors(
                own, cut, prefix=prefix, sharded_offsets=sharded_offsets, tp_group=self.tp_group, metadata=metadata
            )
        return tensors

    def backward_dw(self) -> None:
        """Do nothing: weight gradients are computed in backward. Megatron's schedules call it."""


def _without_fusion(config: Any) -> Any:
    """Return ``config``, or a copy for upstream's constructor, which refuses gradient_accumulation_fusion without
    apex."""
    if not config.gradient_accumulation_fusion:
        return config
    plain = copy.copy(config)
    plain.gradient_accumulation_fusion = False
    return plain


def _mark_for_offloading(input_: torch.Tensor, config: Any) -> None:
    """Tell TransformerEngine's offloading, inside its context, what to do with a saved input."""
    context = getattr(config, "_cpu_offloading_context", None)
    if context is not None and context.inside_context:
        cast("Any", input_).activation_offloading = config.cpu_offloading_activations
