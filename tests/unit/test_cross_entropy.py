"""vocab_parallel_cross_entropy against plain torch in fp64: values, gradients, layouts, hard logits, what is kept."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from megatron_frozen import initialize_model_parallel, vocab_parallel_cross_entropy
from megatron_frozen.autograd import cross_entropy
from megatron_frozen.diagnostics import Recorder
from megatron_frozen.errors import ConfigError, LayoutError
from megatron_frozen.partition import padded_vocab_size
from megatron_frozen.testing import assert_close_to, relative_error, run_ranks
from tests.unit.core_ranks import MEMORY, Untouched, seeded

V = 30
IGNORED = -100
DTYPES = {torch.bfloat16: 3e-3, torch.float16: 4e-4, torch.float32: 1e-6, torch.float64: 1e-13}
"""Allowed relative error of the gradient: a few roundings of its dtype. The loss is in fp32 or fp64 always."""


def smoothed_by_megatrons_formula(logits: torch.Tensor, target: torch.Tensor, smoothing: float) -> torch.Tensor:
    """1 - a of the mass on the target and a / (V - 1) on each other id, in fp64."""
    log_probs = logits.double().log_softmax(-1)
    share = torch.full_like(log_probs, smoothing / (logits.shape[-1] - 1))
    share.scatter_(-1, target.clamp(min=0).unsqueeze(-1), 1 - smoothing)
    return -(share * log_probs).sum(-1).masked_fill(target == IGNORED, 0)


def reference(
    logits: torch.Tensor, target: torch.Tensor, grad: torch.Tensor, *, smoothing: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses and the logits' gradient in fp64."""
    leaf = logits.detach().double().requires_grad_()
    if smoothing:
        loss = smoothed_by_megatrons_formula(leaf, target, smoothing)
    else:
        flat = F.cross_entropy(leaf.reshape(-1, leaf.shape[-1]), target.reshape(-1), reduction="none")
        loss = flat.view(target.shape)
    return loss.detach(), torch.autograd.grad(loss, leaf, grad.double())[0]


def targets(*shape: int) -> torch.Tensor:
    target = torch.randint(0, V, shape, generator=torch.Generator().manual_seed(3))
    return torch.where(torch.rand(shape, generator=torch.Generator().manual_seed(4)) < 0.2, IGNORED, target)


def check(
    logits: torch.Tensor, target: torch.Tensor, *, rank: int, world_size: int, smoothing: float, memory: str = "dense"
) -> None:
    """Both passes of this rank's columns, against the whole row."""
    grad_loss = seeded(*target.shape, seed=9, dtype=torch.promote_types(logits.dtype, torch.float32))
    expected_loss, expected_grad = reference(logits, target, grad_loss, smoothing=smoothing)
    shard = logits.chunk(world_size, dim=-1)[rank]
    shard = (MEMORY[memory](shard) if shard.dim() > 1 else shard.clone()).requires_grad_()
    untouched = Untouched(shard, target, grad_loss)
    with Recorder() as forward:
        loss = vocab_parallel_cross_entropy(shard, target, smoothing)
    with Recorder() as backward:
        (grad,) = torch.autograd.grad(loss, shard, grad_loss)
    untouched.check()
    assert dict(forward.collectives()) == ({"all_reduce": 2} if world_size > 1 else {})
    assert not backward.collectives()
    assert (loss.dtype, grad.dtype) == (grad_loss.dtype, logits.dtype)
    loss_tolerance = 1e-13 if logits.dtype == torch.float64 else 1e-6
    assert_close_to({"loss": loss.detach()}, {"loss": expected_loss}, tolerance=loss_tolerance)
    expected_shard = expected_grad.chunk(world_size, dim=-1)[rank]
    assert_close_to({"dlogits": grad}, {"dlogits": expected_shard}, tolerance=DTYPES[logits.dtype])
    assert not grad[target == IGNORED].any()
    assert not loss[target == IGNORED].any()


def values_body(rank: int, world_size: int) -> None:
    initialize_model_parallel(world_size)
    for dtype in DTYPES:
        for smoothing in (0.0, 0.1):
            for shape in ((), (6,), (6, 2), (3, 2, 2)):
                logits, target = seeded(*shape, V, seed=1, dtype=dtype) * 3, targets(*shape)
                for memory in MEMORY:
                    if memory == "dense" or (len(shape) > 1 and dtype == torch.float32):
                        check(logits, target, rank=rank, world_size=world_size, smoothing=smoothing, memory=memory)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_values_and_gradients(world_size: int) -> None:
    run_ranks(world_size, values_body)


def pieces_body(rank: int, world_size: int) -> None:
    """Rows are worked on in pieces; where the cuts fall shows nowhere."""
    initialize_model_parallel(world_size)
    with pytest.MonkeyPatch.context() as patch:
        for piece_size in (1, 25, 70, 10_000):
            patch.setattr(cross_entropy, "CPU_PIECE_ELEMENTS", piece_size)
            for shape in ((), (7,), (5, 3), (2, 3, 2)):
                logits, target = seeded(*shape, V, seed=1, dtype=torch.float32), targets(*shape)
                check(logits, target, rank=rank, world_size=world_size, smoothing=0.1)


def test_pieces() -> None:
    run_ranks(2, pieces_body)


def confident_rows(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows whose target has a probability near 0.9995."""
    logits = seeded(64, V, seed=1, dtype=dtype)
    target = torch.randint(0, V, (64,), generator=torch.Generator().manual_seed(3))
    logits[torch.arange(64), target] = 11.5
    return logits, target


def test_gradient_of_confident_rows_is_not_rounded_away() -> None:
    """p - 1 of a p near 1 has no digits left in bf16, so it must be taken before rounding."""
    logits, target = confident_rows(torch.bfloat16)
    grad_loss = torch.full((64,), 1 / 64)
    _, expected = reference(logits, target, grad_loss)
    leaf = logits.requires_grad_()
    (grad,) = torch.autograd.grad(vocab_parallel_cross_entropy(leaf, target), leaf, grad_loss)
    plain = F.cross_entropy(leaf, target, reduction="none")
    (plain_grad,) = torch.autograd.grad(plain, leaf, grad_loss.bfloat16())
    assert relative_error(grad, expected) < 3e-3
    assert relative_error(grad, expected) < 2 * relative_error(plain_grad, expected)


def hard_body(rank: int, world_size: int) -> None:
    initialize_model_parallel(world_size)
    generator = torch.Generator().manual_seed(5)
    target = torch.randint(0, V - 10, (8,), generator=generator)
    plain = seeded(8, V, seed=1, dtype=torch.float32)
    silenced = plain.clone()
    silenced[:, V - 10 :] = -torch.inf  # all columns of the last of three ranks: padding
    for logits in (plain * 1e4, plain * 1e30, plain + 1e4, plain - 1e4, silenced, torch.zeros(8, V)):
        check(logits, target, rank=rank, world_size=world_size, smoothing=0.0)
    check(plain * 1e4, target, rank=rank, world_size=world_size, smoothing=0.1)
    # Nothing to learn from: no loss, no gradient, no NaN, even where a row is one.
    nothing = torch.full((8,), IGNORED)
    for logits in (plain, torch.full((8, V), torch.nan), torch.full((8, V), -torch.inf)):
        shard = logits.chunk(world_size, dim=-1)[rank].clone().requires_grad_()
        loss = vocab_parallel_cross_entropy(shard, nothing)
        (grad,) = torch.autograd.grad(loss, shard, torch.full((8,), torch.inf))
        assert not loss.any()
        assert not grad.any()
    for shape in ((0,), (0, 2), (3, 0)):
        shard = torch.zeros(*shape, V // world_size, requires_grad=True)
        loss = vocab_parallel_cross_entropy(shard, torch.zeros(shape, dtype=torch.int64))
        assert loss.shape == shape
        loss.sum().backward()
        assert shard.grad is not None
        assert shard.grad.shape == shard.shape


def test_extreme_logits_padding_ignored_rows_and_no_tokens() -> None:
    run_ranks(1, hard_body)
    run_ranks(3, hard_body)


def padded_body(rank: int, world_size: int, multiple: int) -> torch.Tensor:
    """Case 32: 65 ids padded to 66 or 256 rows; padded logits are -inf, as the model makes them."""
    initialize_model_parallel(world_size)
    padded = padded_vocab_size(65, world_size=world_size, multiple_per_rank=multiple)
    logits = F.pad(seeded(12, 65, seed=1, dtype=torch.float32), (0, padded - 65), value=-torch.inf)
    shard = logits.chunk(world_size, dim=-1)[rank].clone().requires_grad_()
    target = torch.arange(53, 65)
    loss = vocab_parallel_cross_entropy(shard, target)
    loss.sum().backward()
    assert shard.grad is not None
    first = rank * shard.shape[-1]
    num_real = min(max(65 - first, 0), shard.shape[-1])
    assert not shard.grad[:, num_real:].any()
    assert shard.grad[:, :num_real].all()
    return loss.detach()


@pytest.mark.parametrize("multiple", [1, 128])
def test_padded_columns_change_nothing(multiple: int) -> None:
    expected = F.cross_entropy(seeded(12, 65, seed=1).double(), torch.arange(53, 65), reduction="none")
    for loss in run_ranks(2, padded_body, multiple):
        torch.testing.assert_close(loss.double(), expected, rtol=0, atol=1e-6)


def test_gradient_has_the_memory_of_the_logits() -> None:
    """Logits are [b, s, V] in memory and viewed as [s, b, V]; a dY in other memory would be copied by the head."""
    for dtype in (torch.float32, torch.bfloat16):
        logits = seeded(2, 6, V, seed=1, dtype=dtype).transpose(0, 1).requires_grad_()
        with Recorder() as seen:
            (grad,) = torch.autograd.grad(vocab_parallel_cross_entropy(logits, targets(6, 2)).sum(), logits)
        assert grad.stride() == logits.stride() == (V, 6 * V, 1)
        written = max(operation.written_bytes for operation in seen.copies(min_bytes=1))
        assert written <= logits.numel() * logits.element_size()


def kept_bytes(logits: torch.Tensor, *, smoothing: float) -> tuple[list[int], list[int]]:
    """Sizes of vocabulary-sized storages that the forward keeps, and of those that both passes write."""
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), Recorder() as seen:
        loss = vocab_parallel_cross_entropy(logits, torch.zeros(logits.shape[0], dtype=torch.int64), smoothing)
        torch.autograd.grad(loss.sum(), logits)
    least = logits.numel() * logits.element_size()
    sizes = [operation.written_bytes for operation in seen.operations if operation.name not in VIEWS]
    return [size for size in kept.values() if size >= least], [size for size in sizes if size >= least]


VIEWS = {"aten.slice", "aten.select", "aten.view", "aten.detach", "aten.unsqueeze", "aten.alias", "aten.expand"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_buffer_of_vocabulary_size_is_written(dtype: torch.dtype) -> None:
    """The logits themselves are kept, nothing beside them; the one large tensor that is made is their gradient."""
    logits = torch.randn(64, 100_000).to(dtype).requires_grad_()  # several pieces
    num_bytes = logits.numel() * logits.element_size()
    for smoothing in (0.0, 0.1):
        kept, written = kept_bytes(logits, smoothing=smoothing)
        assert kept == [num_bytes]
        assert written == [num_bytes]


def test_second_backward_and_in_place_writes_and_double_backward() -> None:
    logits = seeded(6, V, seed=1, dtype=torch.float32).requires_grad_()
    loss = vocab_parallel_cross_entropy(logits, targets(6)).sum()
    (first,) = torch.autograd.grad(loss, logits, retain_graph=True)
    (second,) = torch.autograd.grad(loss, logits)
    assert torch.equal(first, second)
    middle = logits * 1
    loss = vocab_parallel_cross_entropy(middle, targets(6)).sum()
    middle.div_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    weight = torch.ones(6, requires_grad=True)
    loss = (vocab_parallel_cross_entropy(logits, targets(6)) * weight).sum()
    (grad,) = torch.autograd.grad(loss, logits, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def range_body(rank: int, world_size: int) -> None:
    """Every rank refuses an id that no rank holds, which would otherwise give a plausible loss."""
    del rank
    initialize_model_parallel(world_size)
    logits = torch.zeros(1, 2, V // world_size)
    for bad in (V, -1, -99):
        message = rf"cross-entropy over a vocabulary of 30 got the target id {bad}; ids go from 0 to 29, and -100 marks"
        with pytest.raises(LayoutError, match=message):
            vocab_parallel_cross_entropy(logits, torch.tensor([[3, bad]]))


def test_ids_out_of_range_are_refused_on_all_ranks() -> None:
    run_ranks(2, range_body)


def test_refusals() -> None:
    with pytest.raises(LayoutError, match=r"cross-entropy got logits of shape \[6, 30\] and targets of shape \[6, 1\]"):
        vocab_parallel_cross_entropy(torch.zeros(6, V), torch.zeros(6, 1, dtype=torch.int64))
    for smoothing in (-0.1, 1.0, float("nan")):
        message = f"label_smoothing is {smoothing}; it takes a number from 0 up to, not including, 1"
        with pytest.raises(ConfigError, match=message):
            vocab_parallel_cross_entropy(torch.zeros(6, V), torch.zeros(6, dtype=torch.int64), smoothing)
    for dtype in (torch.float32, torch.uint8, torch.bool, torch.int16):
        message = f"cross-entropy got targets of {dtype}; give token ids as torch.int64 or torch.int32"
        with pytest.raises(LayoutError, match=message):
            vocab_parallel_cross_entropy(torch.zeros(6, V), torch.zeros(6, dtype=dtype))
    message = "label_smoothing is 0.1 over a vocabulary of 1, which has no other id to smooth over; set it to 0"
    with pytest.raises(ConfigError, match=message):
        vocab_parallel_cross_entropy(torch.zeros(6, 1), torch.zeros(6, dtype=torch.int64), 0.1)


def test_int32_ids_and_a_vocabulary_of_one() -> None:
    logits = seeded(6, V, seed=1, dtype=torch.float32)
    loss = vocab_parallel_cross_entropy(logits, targets(6).int())
    assert torch.equal(loss, vocab_parallel_cross_entropy(logits, targets(6)))
    assert not vocab_parallel_cross_entropy(logits[:, :1], torch.zeros(6, dtype=torch.int64)).any()
