"""The whole model on two ranks against transformers: logits, losses and every gradient, and what it sends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_frozen.comm import initialize_model_parallel
from megatron_frozen.models import CausalLM
from megatron_frozen.testing import RankError, run_ranks
from megatron_frozen.testing.reference import assert_close_to
from tests.unit.models_ranks import Job, build_model, logits_losses_gradients
from tests.unit.models_reference import losses_and_gradients, random_batch, tiny_model, weights_of

_VARIANTS = [
    "llama",
    "llama tied, biases",
    "llama3 rope",
    "mistral, narrow window",
    "qwen2",
    "qwen2, yarn rope",
    "qwen3",
    "qwen3, bias",
]


def _job(reference: Any, *, vocab_size: int = 64, num_rows: int = 2, **settings: Any) -> Job:
    input_ids, labels = random_batch(vocab_size=vocab_size, num_rows=num_rows)
    return Job(reference.config.to_dict(), weights_of(reference), input_ids, labels, **settings)


def _check(job: Job, reference: Any, *, world_size: int = 2) -> list[tuple[Tensor, Tensor, dict[str, Tensor]]]:
    expected_losses, expected_gradients = losses_and_gradients(reference, job.input_ids, job.labels)
    with torch.no_grad():
        expected_logits = reference(job.input_ids).logits
    results = run_ranks(world_size, logits_losses_gradients, job)
    vocab_size = expected_logits.shape[-1]
    for logits, losses, gradients in results:
        torch.testing.assert_close(logits[..., :vocab_size], expected_logits, rtol=0, atol=1e-4)
        torch.testing.assert_close(losses, expected_losses, rtol=0, atol=1e-5)
        unpadded = {
            name: gradient[:vocab_size] if name in _VOCABULARY else gradient for name, gradient in gradients.items()
        }
        assert_close_to(unpadded, expected_gradients, tolerance=1e-5)
    return results


_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "tp and sp"])
@pytest.mark.parametrize("variant", _VARIANTS)
def test_two_ranks_give_what_transformers_gives(variant: str, *, sequence_parallel: bool) -> None:
    reference = tiny_model(variant)
    _check(_job(reference, sequence_parallel=sequence_parallel), reference)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "tp and sp"])
def test_packed_documents_and_recomputation_on_two_ranks(*, sequence_parallel: bool) -> None:
    reference = tiny_model("qwen3")
    job = _job(reference, document_lengths=[[3, 7, 2], [12]])
    [(_, expected_losses, expected_gradients)] = run_ranks(1, logits_losses_gradients, job)
    job = job._replace(sequence_parallel=sequence_parallel, activation_checkpointing=True)
    for _, losses, gradients in run_ranks(2, logits_losses_gradients, job):
        torch.testing.assert_close(losses, expected_losses, rtol=0, atol=1e-5)
        assert_close_to(gradients, expected_gradients, tolerance=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_a_vocabulary_that_does_not_divide_is_padded_without_effect(*, tied: bool) -> None:
    reference = tiny_model("llama", vocab_size=65, tie_word_embeddings=tied)
    results = _check(_job(reference, vocab_size=65), reference)
    for logits, _, gradients in results:
        assert logits.shape[-1] == 66
        assert (logits[..., 65] == torch.finfo(torch.float32).min).all()
        assert all(gradients[name][65:].eq(0).all() for name in _VOCABULARY if name in gradients)


def _padding_gradient(rank: int, world_size: int, job: Job) -> tuple[int, Tensor | None]:
    """The head's gradient when every logit, padding included, is pulled on."""
    initialize_model_parallel(world_size)
    model = build_model(job.config, job.weights)
    logits = model(job.input_ids)
    pull = torch.ones_like(logits)
    logits.backward(pull)
    assert pull.eq(1).all(), "the incoming gradient was written to"
    return rank, model.get_parameter("lm_head.weight").grad


def test_a_gradient_on_padded_logits_goes_nowhere() -> None:
    job = _job(tiny_model("llama", vocab_size=65), vocab_size=65)
    for rank, gradient in run_ranks(2, _padding_gradient, job):
        assert gradient is not None
        assert gradient[32].eq(0).all() == (rank == 1)
        assert gradient[:32].ne(0).all()


def _without_and_with_a_hook(rank: int, world_size: int, job: Job) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Losses and gradients before and after the head gets a full backward hook, which sees no pull of padding."""
    del rank
    initialize_model_parallel(world_size)
    model = build_model(job.config, job.weights)
    before = _losses_and_gradients(model, job)
    seen: list[Tensor] = []
    model.lm_head.register_full_backward_hook(lambda _module, _grad_input, grads: seen.append(grads[0]))
    after = _losses_and_gradients(model, job)
    (grad,) = seen
    assert grad.any()
    assert not grad[..., model.num_real_columns :].any()
    return [before, after]


def test_a_backward_hook_on_a_padded_head_changes_nothing() -> None:
    job = _job(tiny_model("llama", vocab_size=65), vocab_size=65)
    for before, after in run_ranks(2, _without_and_with_a_hook, job):
        torch.testing.assert_close(after, before, rtol=0, atol=0)


def _written_logits(rank: int, world_size: int, job: Job) -> None:
    """A temperature in place."""
    del rank
    initialize_model_parallel(world_size)
    model = build_model(job.config, job.weights)
    logits = model(job.input_ids)
    expected = logits.detach() / 2
    logits.div_(2).sum().backward()
    assert torch.equal(logits.detach(), expected)


def test_the_logits_may_be_written_into() -> None:
    run_ranks(2, _written_logits, _job(tiny_model("llama", vocab_size=65), vocab_size=65))


def _embedding_gradient_of_the_sum(rank: int, world_size: int, job: Job) -> Tensor:
    """This rank's rows of the embedding's gradient under the sum of all logits, whose gradient is one number."""
    del rank
    initialize_model_parallel(world_size)
    model = build_model(job.config, job.weights).requires_grad_(requires_grad=False)
    embedding = model.get_parameter("model.embed_tokens.weight").requires_grad_()
    model(job.input_ids).sum().backward()
    assert embedding.grad is not None
    return embedding.grad


def test_a_broadcast_gradient_keeps_one_layout_on_ranks_with_and_without_padding() -> None:
    job = _job(tiny_model("llama", vocab_size=65), vocab_size=65)
    [expected] = run_ranks(1, _embedding_gradient_of_the_sum, job)
    gradient = torch.cat(run_ranks(2, _embedding_gradient_of_the_sum, job))
    assert_close_to({"gradient": gradient[:65]}, {"gradient": expected}, tolerance=1e-5)


def _before_and_after_the_groups(rank: int, world_size: int, job: Job) -> list[tuple[Tensor, dict[str, Tensor]]]:
    del rank
    model = build_model(job.config, job.weights)
    before = _losses_and_gradients(model, job)
    initialize_model_parallel(world_size)
    return [before, _losses_and_gradients(model, job)]


def _losses_and_gradients(model: CausalLM, job: Job) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    losses = model(job.input_ids, labels=job.labels)
    losses.sum().backward()
    return losses.detach(), {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def test_a_model_built_before_the_groups_stays_whole() -> None:
    job = _job(tiny_model("llama"))
    for before, after in run_ranks(2, _before_and_after_the_groups, job):
        torch.testing.assert_close(after, before, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["input_ids", "labels"])
def test_the_id_of_a_padded_row_is_refused(name: str) -> None:
    job = _job(tiny_model("llama", vocab_size=65), vocab_size=65)
    job = job._replace(**{name: torch.full_like(job.input_ids, 65)})
    message = f"{name} holds the id 65 for a vocabulary of 65; ids go from 0 to 64, so use the tokenizer"
    with pytest.raises(RankError, match=message):
        run_ranks(2, logits_losses_gradients, job)


def _forward_only(rank: int, world_size: int, job: Job) -> None:
    del rank
    initialize_model_parallel(world_size)
    build_model(job.config, job.weights, sequence_parallel=job.sequence_parallel)(job.input_ids)


@pytest.mark.parametrize(
    ("overrides", "seq_length", "message"),
    [
        (
            {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 8},
            12,
            "num_attention_heads 3 does not divide",
        ),
        (
            {},
            11,
            "sequence has 11 tokens, which sequence parallelism cannot cut over 2 ranks; pad it to a multiple of 2",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused(overrides: dict[str, Any], seq_length: int, message: str) -> None:
    reference = tiny_model("qwen3", **overrides)
    input_ids, labels = random_batch(seq_length=seq_length)
    job = Job(reference.config.to_dict(), weights_of(reference), input_ids, labels, sequence_parallel=True)
    with pytest.raises(RankError, match=message):
        run_ranks(2, _forward_only, job)
