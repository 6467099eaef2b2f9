"""The step that `bench growth` times: a small decoder with adapters, and the work that one step of it is.

AdamW is fused, see `lora_step`.

Suffixes: T = tokens, h = hidden, f = width inside the MLP.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_frozen.bench.runner import extra_mib, num_threads
from megatron_frozen.comm import initialize_model_parallel
from megatron_frozen.layers import ModelParallelConfig
from megatron_frozen.lora import LoraConfig, apply_lora, lora_parameters
from megatron_frozen.models import CausalLM, DecoderConfig
from megatron_frozen.params import sum_partial_grads


@dataclass(frozen=True, kw_only=True, slots=True)
class PointConfig:
    """One step's sizes."""

    sequence: int = 512
    """Tokens of a row."""
    batch: int = 1
    """Rows."""
    rank: int = 16
    """Rank of the adapters, on all seven projections."""
    vocabulary: int = 8192
    """Rows of the tied embedding."""
    documents: int = 1
    """Documents of equal length packed into a row."""
    tensor_parallel: int = 1
    """Ranks over which the model is cut."""
    hidden: int = 256
    """Width of the residual stream; the MLP is 2.75 times as wide, 8 heads share 4 keys and values."""
    layers: int = 4
    """Decoder layers."""

    @property
    def intermediate(self) -> int:
        """Width inside the MLP."""
        return self.hidden * 11 // 4

    def work(self) -> float:
        """Return the floating-point operations of one step, over all ranks; what each does again counts once.

        Each frozen weight: two products. Each factor: three. Causal attention, half of each square: two products
        forward and five backward, as its kernel computes the scores again."""
        h, f, T = self.hidden, self.intermediate, self.sequence * self.batch
        shapes = [(h, h), (h // 2, h), (h // 2, h), (h, h), (f, h), (f, h), (h, f)]
        frozen = self.layers * sum(out * width for out, width in shapes) + self.vocabulary * h
        factors = self.layers * sum(out + width for out, width in shapes) * self.rank
        squares = self.batch * self.documents * (self.sequence // self.documents) ** 2
        return 4.0 * T * frozen + 6.0 * T * factors + 7.0 * squares * h * self.layers


def build_step(point: PointConfig) -> Callable[[], torch.Tensor]:
    """Return one training step on this rank, which returns its loss: forward, backward, the sum of replicated factors,
    AdamW."""
    h = point.hidden
    config = DecoderConfig(
        model_type="llama",
        vocab_size=point.vocabulary,
        hidden_size=h,
        intermediate_size=point.intermediate,
        num_hidden_layers=point.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=h // 8,
        max_position_embeddings=point.sequence,
        tie_word_embeddings=True,
        layer_windows=(None,) * point.layers,
    )
    parallel = ModelParallelConfig(
        tensor_model_parallel_size=point.tensor_parallel, params_dtype=torch.bfloat16, use_cpu_initialization=True
    )
    torch.manual_seed(0)
    model = CausalLM(config, parallel=parallel)
    apply_lora(model, LoraConfig(r=point.rank))
    params = lora_parameters(model)
    optimizer = torch.optim.AdamW(params, lr=1e-4, fused=True)
    ids = torch.randint(point.vocabulary, (point.batch, point.sequence + 1))
    lengths = None
    if point.documents > 1:
        lengths = [[point.sequence // point.documents] * point.documents] * point.batch

    def step() -> torch.Tensor:
        loss = model(ids[:, :-1], labels=ids[:, 1:], document_lengths=lengths).mean()
        loss.backward()
        sum_partial_grads(params, group=model.tp_group)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def time_on_rank(
    rank: int, world_size: int, *, point: PointConfig, threads: int, num_steps: int
) -> tuple[float, float]:
    """Return the median time of a step in ms, and how far memory rose in one, in MiB, on one of the ranks, which runs
    on ``threads``."""
    del rank
    initialize_model_parallel(world_size)
    with num_threads(threads):
        step = build_step(point)
        for _ in range(2):
            step()
        times = []
        for _ in range(num_steps):
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
        return statistics.median(times) * 1e3, extra_mib(step, device="cpu")
