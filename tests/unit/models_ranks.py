"""Our model on one or several ranks, fed full weights by hand; what the spawn pool runs for the model tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_frozen.comm import get_tensor_model_parallel_group, group_rank, group_size, initialize_model_parallel
from megatron_frozen.layers import ModelParallelConfig
from megatron_frozen.models import CausalLM, DecoderConfig
from megatron_frozen.params import sum_partial_grads


class Job(NamedTuple):
    """One forward and backward: config.json, full weights by name, a batch, and how to run it."""

    config: dict[str, Any]
    weights: dict[str, Tensor]
    input_ids: Tensor
    labels: Tensor
    sequence_parallel: bool = False
    activation_checkpointing: bool = False
    document_lengths: Sequence[Sequence[int]] | None = None


def build_model(config: dict[str, Any], weights: dict[str, Tensor], *, sequence_parallel: bool = False) -> CausalLM:
    """The model of this rank with its parts of the full weights; padded vocabulary rows are 0."""
    group = get_tensor_model_parallel_group()
    parallel = ModelParallelConfig(
        tensor_model_parallel_size=group_size(group),
        sequence_parallel=sequence_parallel,
        params_dtype=next(iter(weights.values())).dtype,
        perform_initialization=False,
    )
    model = CausalLM(DecoderConfig.from_hf(config), parallel=parallel)
    parameters = dict(model.named_parameters())
    assert parameters.keys() == weights.keys() == model.state_dict().keys()
    for name, parameter in parameters.items():
        parameter.data.copy_(_shard(weights[name], parameter))
    return model


def _shard(full: Tensor, parameter: Tensor) -> Tensor:
    if not getattr(parameter, "tensor_model_parallel", False):
        return full
    dim = parameter.partition_dim  # pyright: ignore[reportAttributeAccessIssue]
    group = get_tensor_model_parallel_group()
    missing = parameter.shape[dim] * group_size(group) - full.shape[dim]
    if missing:
        full = F.pad(full, (0, 0, 0, missing))
    return full.chunk(group_size(group), dim=dim)[group_rank(group)]


def logits_losses_gradients(rank: int, world_size: int, job: Job) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Logits [b, s, V] (padding kept), losses [b, s] and full gradients of the losses' sum, all gathered."""
    del rank
    initialize_model_parallel(world_size)
    group = get_tensor_model_parallel_group()
    model = build_model(job.config, job.weights, sequence_parallel=job.sequence_parallel)
    model.activation_checkpointing = job.activation_checkpointing
    with torch.no_grad():
        logits_shard = model(job.input_ids, document_lengths=job.document_lengths)
    assert logits_shard.is_contiguous()
    logits = torch.cat(_all_gathered(logits_shard), dim=-1)
    losses = model(job.input_ids, labels=job.labels, document_lengths=job.document_lengths)
    losses.sum().backward()
    sum_partial_grads(model.parameters(), group=group)
    return logits, losses.detach(), {name: _full_gradient(parameter) for name, parameter in model.named_parameters()}


def _all_gathered(shard: Tensor) -> list[Tensor]:
    group = get_tensor_model_parallel_group()
    shards = [torch.empty_like(shard) for _ in range(group_size(group))]
    torch.distributed.all_gather(shards, shard, group=group)
    return shards


def _full_gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    if not getattr(parameter, "tensor_model_parallel", False):
        copies = _all_gathered(parameter.grad)
        assert all(torch.equal(copies[0], copy) for copy in copies), "a replicated gradient differs between ranks"
        return parameter.grad
    dim = parameter.partition_dim  # pyright: ignore[reportAttributeAccessIssue]
    return torch.cat(_all_gathered(parameter.grad.contiguous()), dim=dim)
