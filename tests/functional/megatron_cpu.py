"""Megatron-core 0.16.1 on the CPU: the calls to CUDA that it makes everywhere, its groups, and small GPT models.

Used inside the ranks of a spawn pool. Nothing of megatron-core's arithmetic is replaced.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_frozen.bench.gpt_model import cuda_answered, llama_config

VOCAB, SEQUENCE, BATCH = 32, 8, 2


@contextlib.contextmanager
def megatron_on_cpu(tp: int = 1, **sizes: Any) -> Iterator[None]:
    """Set up megatron-core's groups over the ranks that there are, with CUDA's device and trackers out of the way."""
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")  # of Transformer Engine and apex being absent
        patch.setattr(torch.cuda, "synchronize", lambda *_: None)  # before a checkpoint is written
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import random
        from megatron.core.transformer.moe import moe_utils

        patch.setattr(moe_utils, "te_general_gemm", None, raising=False)  # it asks after it without Transformer Engine
        patch.setattr(random, "_get_cuda_rng_state", lambda *_, **__: None)  # what recomputed layers restore
        patch.setattr(random, "_set_cuda_rng_state", lambda *_, **__: None)
        with cuda_answered():
            parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, **sizes)
            try:
                yield
            finally:
                parallel_state.destroy_model_parallel()


@contextlib.contextmanager
def child_processes() -> Iterator[None]:
    """Let a rank of the pool start processes, as megatron-core's checkpoint writer does; a daemon may not.

    The writer keeps one for the next checkpoint. It would outlive the rank, which the pool kills, and the test run.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    settings: Any = vars(multiprocessing.current_process())["_config"]
    before = settings.get("daemon", False)
    settings["daemon"] = False
    try:
        yield
    finally:
        settings["daemon"] = before
        filesystem_async._results_queue = None
    assert not multiprocessing.active_children()


def gpt_config(**overrides: Any) -> Any:
    """Return a TransformerConfig of two small Llama-like layers, four heads in two groups, in fp32."""
    sizes = {"num_layers": 2, "hidden_size": 16, "ffn_hidden_size": 24, "num_query_groups": 2, "init_method_std": 0.2}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what a test may ask for
        return llama_config(**(sizes | {"add_qkv_bias": True} | overrides))


class SequenceParallelNorm(nn.RMSNorm):
    """An RMSNorm under sequence parallelism, which megatron-core's local one refuses and apex's one does."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps=eps)
        weight: Any = self.weight
        weight.sequence_parallel = config.sequence_parallel


def block_spec(config: Any) -> Any:
    """Return the local spec of the whole block, with norms that know sequence parallelism."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    norm: Any = SequenceParallelNorm
    layer: Any = get_gpt_layer_local_spec(normalization="RMSNorm", num_experts=config.num_moe_experts)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm
    return TransformerBlockSubmodules(layer_specs=[layer] * config.num_layers, layer_norm=norm)


def gpt_model(config: Any, spec: Any, *, make: Callable[..., Any] | None = None, tied: bool = False) -> Any:
    """Return a GPTModel, the same on every rank and for every layer class, whose norms and biases are not trivial."""
    if make is None:
        from megatron.core.models.gpt import GPTModel

        make = GPTModel
    torch.manual_seed(1)
    model = make(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=VOCAB,
        max_sequence_length=SEQUENCE,
        share_embeddings_and_output_weights=tied,
        position_embedding_type="rope",
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and "norm" in name:
                parameter.add_(torch.linspace(-0.2, 0.2, parameter.numel()))
    return model


def tokens(seed: int = 0, *, batch: int = BATCH) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ids [b, s], positions, a causal mask that hides what is True, and labels."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (batch, SEQUENCE + 1), generator=generator)
    positions = torch.arange(SEQUENCE).expand(batch, -1)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    return ids[:, :-1].contiguous(), positions, mask, ids[:, 1:].contiguous()
