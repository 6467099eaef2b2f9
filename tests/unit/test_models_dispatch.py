"""What the model dispatches: no batched product, no copy of a vocabulary-sized tensor, few collectives."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from megatron_frozen.comm import initialize_model_parallel
from megatron_frozen.diagnostics import Recorder
from megatron_frozen.models import CausalLM
from megatron_frozen.testing import run_ranks
from tests.unit.models_ranks import Job, build_model
from tests.unit.models_reference import random_batch, tiny_model, weights_of


def _freeze_all_but_the_first_query_projection(model: CausalLM) -> None:
    model.requires_grad_(requires_grad=False)
    model.get_parameter("model.layers.0.self_attn.q_proj.weight").requires_grad_()


def _logits_path(rank: int, world_size: int, job: Job) -> tuple[dict[str, int], int, list[bool]]:
    """Products by name in logits and their backward from a [b, s, V] gradient, bytes of copies as large, and facts."""
    del rank
    initialize_model_parallel(world_size)
    model = build_model(job.config, job.weights, sequence_parallel=job.sequence_parallel)
    _freeze_all_but_the_first_query_projection(model)
    with Recorder() as seen:
        logits = model(job.input_ids, document_lengths=job.document_lengths)
        logits.backward(torch.ones_like(logits))
    products = {name: seen.count(f"aten.{name}") for name in ("bmm", "baddbmm", "mm", "addmm")}
    return products, seen.copied_bytes(min_bytes=logits.nbytes), [logits.is_contiguous(), logits.requires_grad]


@pytest.mark.parametrize("document_lengths", [None, [[3, 7, 2], [12]]], ids=["whole rows", "packed"])
@pytest.mark.parametrize(
    ("world_size", "sequence_parallel"), [(1, False), (2, False), (2, True)], ids=["1 rank", "tp", "tp and sp"]
)
def test_no_batched_product_and_no_copy_of_the_logits(
    document_lengths: list[list[int]] | None, world_size: int, *, sequence_parallel: bool
) -> None:
    reference = tiny_model("qwen3", vocab_size=512)
    job = Job(
        reference.config.to_dict(),
        weights_of(reference),
        *random_batch(),
        sequence_parallel=sequence_parallel,
        document_lengths=document_lengths,
    )
    for products, copied_bytes, facts in run_ranks(world_size, _logits_path, job):
        assert facts == [True, True]
        # Forward: of each layer q, k and v, o, gate and up, down; and the head. Backward: each but the first, below
        # which nothing trains; and one weight gradient.
        assert products == {"bmm": 0, "baddbmm": 0, "mm": 9 + 8 + 1, "addmm": 0}
        assert copied_bytes == 0


@pytest.mark.parametrize("num_rows", [1, 3])
def test_hidden_states_keep_batch_first_memory_between_layers(num_rows: int) -> None:
    reference = tiny_model("llama")
    model = build_model(reference.config.to_dict(), weights_of(reference))
    seen = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda module, inputs, output: seen.append(output))
    model(random_batch(num_rows=num_rows)[0])
    assert [tuple(hidden.shape) for hidden in seen] == [(12, num_rows, 32)] * 2
    assert all(hidden.transpose(0, 1).is_contiguous() for hidden in seen)


def _collectives(rank: int, world_size: int, job: Job) -> tuple[Counter[str], Counter[str]]:
    del rank
    initialize_model_parallel(world_size)
    model = build_model(job.config, job.weights, sequence_parallel=job.sequence_parallel)
    _freeze_all_but_the_first_query_projection(model)
    with Recorder() as forward:
        losses = model(job.input_ids, labels=job.labels)
    with Recorder() as backward:
        losses.sum().backward()
    return forward.collectives(), backward.collectives()


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "tp and sp"])
def test_each_block_communicates_once_each_way(*, sequence_parallel: bool) -> None:
    """Two layers of two blocks, embedding, head, and two small reductions in the loss; q, k and v share one."""
    reference = tiny_model("llama")
    job = Job(reference.config.to_dict(), weights_of(reference), *random_batch(), sequence_parallel=sequence_parallel)
    for forward, backward in run_ranks(2, _collectives, job):
        # The first layer's attention owes nobody an input gradient, as the embedding is frozen.
        if sequence_parallel:
            assert forward == {"all_gather": 5, "reduce_scatter": 5, "all_reduce": 2}
            assert backward == {"all_gather": 4, "reduce_scatter": 4}
        else:
            assert forward == {"all_reduce": 7}
            assert backward == {"all_reduce": 4}
