"""The settings that the layers read. Megatron-core's own config objects are taken in place of this one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_frozen.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelParallelConfig:
    """The fields of ``megatron.core.ModelParallelConfig`` that tensor-parallel layers read, and three of our own, last.

    Raises ConfigError where a size or a number is below 1 or params_dtype is no floating-point dtype.
    """

    tensor_model_parallel_size: int = 1
    """Ranks over which a layer is cut; the size of the group decides, this says it for readers."""
    expert_model_parallel_size: int = 1
    """Ranks over which experts are spread."""
    sequence_parallel: bool = False
    """Keep activations between layers cut along the sequence over the tensor-parallel ranks."""
    params_dtype: torch.dtype = torch.float32
    """Dtype in which parameters are created."""
    perform_initialization: bool = True
    """Fill new parameters; False leaves them as allocated, for a loader to fill."""
    use_cpu_initialization: bool = False
    """Create parameters on the CPU even where a GPU is present."""
    gradient_accumulation_fusion: bool = False
    """Write weight gradients into ``main_grad`` buffers."""
    defer_embedding_wgrad_compute: bool = False
    """Keep the head's dY for a weight gradient that the buffer's owner computes later."""
    wgrad_deferral_limit: int = 0
    """How many micro-batches are kept so; 0 is no limit."""
    deterministic_mode: bool = False
    """Look embeddings up by an operator whose backward is deterministic."""
    dgrad_in_fp32: bool = False
    """Multiply the low-precision operands of input gradients straight into fp32."""
    allreduce_dgrad_in_fp32: bool = False
    """Sum input gradients over ranks in fp32."""
    allreduce_dgrad_pieces: int = 1
    """Blocks of rows in which a layer all-reduces its input gradient, each while the next is multiplied; 1: whole. An
    entry that several layers share, as the decoder's and LoRA's, sums whole, and so does compiled code."""

    def __post_init__(self) -> None:
        """Raise ConfigError for a value out of range."""
        for name in ("tensor_model_parallel_size", "expert_model_parallel_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; give the number of ranks, at least 1")
        if self.allreduce_dgrad_pieces < 1:
            raise ConfigError(
                f"allreduce_dgrad_pieces is {self.allreduce_dgrad_pieces}; give a number of pieces, at least 1"
            )
        if not self.params_dtype.is_floating_point:
            raise ConfigError(f"params_dtype is {self.params_dtype}; give a floating-point dtype")
