"""When the model computes its losses in chunks over a frozen head, and that they are those of all logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_frozen.autograd import head_loss
from megatron_frozen.comm import initialize_model_parallel
from megatron_frozen.diagnostics import Recorder
from megatron_frozen.lora import LoraConfig, apply_lora
from megatron_frozen.models import CausalLM
from megatron_frozen.testing import assert_close_to, run_ranks
from tests.unit.models_ranks import Job, build_model
from tests.unit.models_reference import random_batch, tiny_model, weights_of

VOCABULARY, CHUNK = 131, 4
QUERY = "model.layers.0.self_attn.q_proj.weight"


def _frozen_model(job: Job, *, trains: str = QUERY) -> CausalLM:
    model = build_model(job.config, job.weights, sequence_parallel=job.sequence_parallel)
    model.requires_grad_(requires_grad=False)
    model.get_parameter(trains).requires_grad_()
    return model


def _job(*, tied: bool = True, sequence_parallel: bool = False) -> Job:
    reference = tiny_model("llama", vocab_size=VOCABULARY, tie_word_embeddings=tied)
    batch = random_batch(vocab_size=VOCABULARY)
    return Job(reference.config.to_dict(), weights_of(reference), *batch, sequence_parallel=sequence_parallel)


def _step(model: CausalLM, job: Job) -> tuple[Tensor, Tensor, int]:
    """Losses, the query's gradient, and the most rows that one product with the head gives."""
    model.zero_grad()
    with Recorder() as seen:
        losses = model(job.input_ids, labels=job.labels, document_lengths=job.document_lengths)
        losses.mean().backward()
    gradient = model.get_parameter(QUERY).grad
    assert gradient is not None
    num_columns = model.lm_head.output_size_per_partition
    ids = (model.num_real_columns, num_columns)
    rows = [op.shapes[0][0] for op in seen.operations if op.name == "aten.mm" and op.shapes[1][1] in ids]
    return losses.detach(), gradient, max(rows)


def _with_and_without_a_hook(rank: int, world_size: int, job: Job) -> list[tuple[Tensor, Tensor, int]]:
    """A hook makes the model call its head for all logits."""
    del rank
    initialize_model_parallel(world_size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head_loss, "CPU_CHUNK_TOKENS", CHUNK)
        model = _frozen_model(job)
        chunked = _step(model, job)
        model.lm_head.register_forward_hook(lambda *_: None)
        return [chunked, _step(model, job)]


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(("world_size", "sequence_parallel"), [(1, False), (2, False), (2, True)])
def test_losses_and_gradients_are_those_of_all_logits(world_size: int, *, sequence_parallel: bool, tied: bool) -> None:
    job = _job(tied=tied, sequence_parallel=sequence_parallel)
    for chunked, whole in run_ranks(world_size, _with_and_without_a_hook, job):
        assert (chunked[2], whole[2]) == (CHUNK, job.labels.numel())
        torch.testing.assert_close(chunked[0], whole[0], rtol=1e-6, atol=1e-6)
        assert_close_to({"q": chunked[1]}, {"q": whole[1]}, tolerance=1e-5)


def test_a_head_that_trains_gives_logits_and_in_evaluation_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    job = _job()
    model = _frozen_model(job)
    monkeypatch.setattr(head_loss, "CPU_CHUNK_TOKENS", CHUNK)
    model.model.embed_tokens.weight.requires_grad_()
    assert _step(model, job)[2] == job.labels.numel()
    with torch.no_grad(), Recorder() as seen:
        losses = model(job.input_ids, labels=job.labels)
    products = [op for op in seen.operations if op.name == "aten.mm" and op.shapes[1][1] == VOCABULARY]
    assert sum(op.shapes[0][0] for op in products) == int((job.labels >= 0).sum())
    assert max(op.shapes[0][0] for op in products) == CHUNK
    torch.testing.assert_close(losses, model(job.input_ids, labels=job.labels).detach(), rtol=1e-6, atol=1e-6)


def test_an_adapter_on_the_head_takes_part_in_the_losses() -> None:
    job = _job(tied=False)
    model = _frozen_model(job)
    before = model(job.input_ids, labels=job.labels)
    apply_lora(model, LoraConfig(r=2, target_modules=("lm_head",)))
    with torch.no_grad():
        model.get_parameter("lm_head.lora_B.default")[:40] = 1
    after = model(job.input_ids, labels=job.labels)
    assert not torch.allclose(after, before, atol=1e-2)
    after.sum().backward()
    gradient = model.get_parameter("lm_head.lora_A.default").grad
    assert gradient is not None
    assert gradient.any()


def test_fp32_logits_of_a_bf16_head_are_respected() -> None:
    job = _job()
    model = _frozen_model(job).to(torch.bfloat16)
    losses = []
    for model.lm_head.output_dtype in (None, torch.float32):
        losses.append(_step(model, job)[0])
        hook = model.lm_head.register_forward_hook(lambda *_: None)
        torch.testing.assert_close(losses[-1], _step(model, job)[0], rtol=1e-6, atol=1e-6)
        hook.remove()
    assert not torch.equal(*losses)
