"""The loss over a frozen head in chunks: values, gradients, layouts, labels, memory, products, collectives, graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

from megatron_frozen.autograd import cross_entropy, head_loss
from megatron_frozen.comm import get_tensor_model_parallel_group, initialize_model_parallel
from megatron_frozen.diagnostics import Recorder
from megatron_frozen.errors import ConfigError, LayoutError
from megatron_frozen.functional import checked_cross_entropy, frozen_head_cross_entropy, linear_with_frozen_weight
from megatron_frozen.partition import padded_vocab_size
from megatron_frozen.testing import assert_close_to, relative_error, run_ranks
from tests.unit.core_ranks import MEMORY, Untouched, seeded

V, WIDTH = 65, 12
IGNORED = -100
TOLERANCES = {torch.bfloat16: 1.5e-2, torch.float16: 2e-3, torch.float32: 2e-6, torch.float64: 1e-13}


def head_weight(dtype: torch.dtype, *, num_ids: int = V, seed: int = 2) -> torch.Tensor:
    return (seeded(num_ids, WIDTH, seed=seed) * 0.5).to(dtype)


def labels(*shape: int, ignored: float = 0.3, num_ids: int = V) -> torch.Tensor:
    target = torch.randint(0, num_ids, shape, generator=torch.Generator().manual_seed(3))
    return torch.where(torch.rand(shape, generator=torch.Generator().manual_seed(4)) < ignored, IGNORED, target)


def reference(
    hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, grad: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses and dX in fp64, from all logits of the whole vocabulary."""
    leaf = hidden.detach().double().requires_grad_()
    logits = (leaf @ weight.double().t()).reshape(-1, weight.shape[0])
    loss = F.cross_entropy(logits, target.reshape(-1), reduction="none").view(target.shape)
    return loss.detach(), torch.autograd.grad(loss, leaf, grad.double())[0]


def with_all_logits(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, **options: Any) -> torch.Tensor:
    """The two functions that this one stands in for, on one rank."""
    logits = linear_with_frozen_weight(
        hidden, weight, None, gradient_accumulation_fusion=False, allreduce_dgrad=False, sequence_parallel=False,
        **options,
    )  # fmt: skip
    return checked_cross_entropy(logits, target, group=None)


def shard_of(weight: torch.Tensor, *, rank: int, world_size: int, multiple: int = 1) -> tuple[torch.Tensor, int]:
    """This rank's rows of the padded weight, padding NaN so that its use shows, and how many are real."""
    padded = padded_vocab_size(weight.shape[0], world_size=world_size, multiple_per_rank=multiple)
    shard = F.pad(weight, (0, 0, 0, padded - weight.shape[0]), value=torch.nan).chunk(world_size)[rank]
    return shard, min(max(weight.shape[0] - rank * shard.shape[0], 0), shard.shape[0])


def check(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    grad: torch.Tensor,
    *,
    rank: int = 0,
    world_size: int = 1,
    multiple: int = 1,
) -> None:
    """Both passes; this rank's dX is a part of a sum. ``hidden`` is taken in the memory that it has."""
    expected_loss, expected_dX = reference(hidden, weight, target, grad)
    shard, num_real = shard_of(weight, rank=rank, world_size=world_size, multiple=multiple)
    leaf = hidden.detach().requires_grad_()
    untouched = Untouched(leaf, shard, target, grad)
    group = get_tensor_model_parallel_group()
    with Recorder() as forward:
        loss = frozen_head_cross_entropy(leaf, shard, target, num_real_columns=num_real, group=group)
    with Recorder() as backward:
        (dX,) = torch.autograd.grad(loss, leaf, grad)
    untouched.check()
    assert dict(forward.collectives()) == ({"all_reduce": 2} if world_size > 1 else {})
    assert not backward.collectives()
    assert not any(forward.count(f"aten.{name}") for name in ("bmm", "baddbmm", "scatter_"))
    assert not any(backward.count(f"aten.{name}") for name in ("mm", "bmm", "addmm"))
    assert (loss.dtype, dX.dtype, dX.shape) == (grad.dtype, hidden.dtype, hidden.shape)
    total = dX.double()
    if world_size > 1:
        torch.distributed.all_reduce(total)
    tolerance = TOLERANCES[hidden.dtype]
    assert_close_to({"loss": loss.detach()}, {"loss": expected_loss}, tolerance=tolerance)
    assert_close_to({"dX": total}, {"dX": expected_dX}, tolerance=tolerance)
    assert not dX[target == IGNORED].any()
    assert not loss[target == IGNORED].any()


def values_body(rank: int, world_size: int) -> None:
    """65 ids divide by neither 2 nor 3; padded to a multiple of 64 per rank, the last of three has padding alone."""
    initialize_model_parallel(world_size)
    ranks: dict[str, Any] = {"rank": rank, "world_size": world_size}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head_loss, "CPU_CHUNK_TOKENS", 5)
        for dtype in TOLERANCES:
            weight = head_weight(dtype)
            for shape in ((), (6,), (6, 3), (3, 2, 2)):
                hidden, target = seeded(*shape, WIDTH, seed=1, dtype=dtype) * 2, labels(*shape)
                grad = seeded(*shape, seed=9, dtype=torch.promote_types(dtype, torch.float32))
                for multiple in (1, 64):
                    check(hidden, weight, target, grad, multiple=multiple, **ranks)
        hidden, weight = seeded(6, 3, WIDTH, seed=1, dtype=torch.float32), head_weight(torch.float32)
        grad = seeded(6, 3, seed=9, dtype=torch.float32)
        for ignored in (0.0, 1.0):
            check(hidden, weight, labels(6, 3, ignored=ignored), grad, **ranks)
        for memory in MEMORY.values():
            check(memory(hidden), weight, labels(6, 3), memory(grad), **ranks)
        # Rows and gradients that are repeated by strides, each under a label of its own.
        check(hidden[:, :1].expand(6, 3, WIDTH), weight, labels(6, 3), grad[:1].expand(6, 3), **ranks)
        check(hidden[0, 0].expand(6, 3, WIDTH), weight, labels(6, 3), torch.ones(()).expand(6, 3), **ranks)
        for shape in ((0,), (0, 2), (3, 0)):
            check(torch.zeros(*shape, WIDTH), weight, labels(*shape), torch.zeros(shape), **ranks)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_values_and_gradients(world_size: int) -> None:
    run_ranks(world_size, values_body)


@pytest.mark.parametrize("chunk", [1, 7, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_equals_the_path_over_all_logits(dtype: torch.dtype, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss within 1e-6; dX no further from fp64, but for a hair where both are as far as the rounding of dX alone."""
    monkeypatch.setattr(head_loss, "CPU_CHUNK_TOKENS", chunk)
    for spread in (0.1, 0.5, 2.0):
        weight, target = (seeded(V, WIDTH, seed=2) * spread).to(dtype), labels(40, 2)
        grad = torch.rand(40, 2, generator=torch.Generator().manual_seed(5)) / 80
        hidden = seeded(40, 2, WIDTH, seed=1, dtype=dtype).requires_grad_()
        _, expected = reference(hidden, weight, target, grad)
        found = {}
        for function in (frozen_head_cross_entropy, with_all_logits):
            options: dict[str, Any] = {"group": None} if function is frozen_head_cross_entropy else {}
            loss = function(hidden, weight, target, **options)
            found[function] = loss.detach(), torch.autograd.grad(loss, hidden, grad)[0]
        ours, plain = found[frozen_head_cross_entropy], found[with_all_logits]
        torch.testing.assert_close(ours[0], plain[0], rtol=1e-6, atol=1e-6)
        assert relative_error(ours[1], expected) < max(1.05 * relative_error(plain[1], expected), 1e-6)


def test_the_gradient_of_confident_rows_is_not_rounded_away() -> None:
    """p - 1 of a p near 1 has no digits left in bf16."""
    weight, target = head_weight(torch.bfloat16), labels(64, ignored=0)
    hidden = (weight[target] * 8).requires_grad_()
    grad = torch.full((64,), 1 / 64)
    losses, expected = reference(hidden, weight, target, grad)
    assert losses.median() < 1e-2
    (dX,) = torch.autograd.grad(frozen_head_cross_entropy(hidden, weight, target, group=None), hidden, grad)
    (plain,) = torch.autograd.grad(with_all_logits(hidden, weight, target), hidden, grad)
    assert relative_error(dX, expected) < 1.05 * relative_error(plain, expected)


def test_the_id_of_a_padded_row_is_refused() -> None:
    with pytest.raises(LayoutError, match="over a vocabulary of 10 got the target id 10"):
        frozen_head_cross_entropy(
            torch.randn(1, 4), torch.randn(12, 4), torch.tensor([10]), num_real_columns=10, group=None
        )


@pytest.mark.parametrize("option", ["dgrad_in_fp32", "output_dtype"])
def test_fp32_options(option: str) -> None:
    """With dX multiplied into fp32 the gradient is nearer to fp64, and with fp32 logits the loss is."""
    weight, target = head_weight(torch.bfloat16, num_ids=900) + 0.5, labels(64, num_ids=900)
    hidden = seeded(64, WIDTH, seed=1, dtype=torch.bfloat16).requires_grad_()
    expected = reference(hidden, weight, target, torch.ones(64))
    errors = []
    for value in (True, False) if option == "dgrad_in_fp32" else (torch.float32, None):
        options: dict[str, Any] = {option: value}
        loss = frozen_head_cross_entropy(hidden, weight, target, group=None, **options)
        (dX,) = torch.autograd.grad(loss.sum(), hidden)
        which = (dX, expected[1]) if option == "dgrad_in_fp32" else (loss.detach(), expected[0])
        errors.append(relative_error(*which))
    assert errors[0] < errors[1] * 0.9


def test_a_second_step_and_a_second_backward() -> None:
    weight, target = head_weight(torch.float32), labels(6, 2)
    hidden = seeded(6, 2, WIDTH, seed=1, dtype=torch.float32).requires_grad_()
    for step in range(2):
        grad = seeded(6, 2, seed=step, dtype=torch.float32)
        expected_loss, expected_dX = reference(hidden, weight, target, grad)
        loss = frozen_head_cross_entropy(hidden, weight, target, group=None)
        found = [torch.autograd.grad(loss, hidden, grad, retain_graph=again)[0] for again in (True, False)]
        assert torch.equal(*found)
        assert_close_to(
            {"loss": loss.detach(), "dX": found[0]}, {"loss": expected_loss, "dX": expected_dX}, tolerance=2e-6
        )
        with torch.no_grad():
            hidden -= found[0]
            loss += 1  # the output is a tensor of its own


def test_double_backward_is_refused() -> None:
    hidden = seeded(6, WIDTH, seed=1, dtype=torch.float32).requires_grad_()
    scale = torch.ones(6, requires_grad=True)
    loss = (frozen_head_cross_entropy(hidden, head_weight(torch.float32), labels(6), group=None) * scale).sum()
    (dX,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dX.sum().backward()


def test_nothing_spreads_from_rows_without_a_label() -> None:
    hidden = seeded(6, WIDTH, seed=1, dtype=torch.float32)
    hidden[::2] = torch.nan
    target = torch.where(hidden[:, 0].isnan(), IGNORED, 3)
    leaf = hidden.requires_grad_()
    loss = frozen_head_cross_entropy(leaf, head_weight(torch.float32), target, group=None)
    (dX,) = torch.autograd.grad(loss, leaf, torch.where(target == IGNORED, torch.inf, 1.0))
    assert loss.isfinite().all()
    assert dX.isfinite().all()
    assert dX[1::2].all()
    assert not dX[::2].any()


def large_logits_body(rank: int, world_size: int) -> None:
    initialize_model_parallel(world_size)
    weight, target = head_weight(torch.float32), labels(6)
    for factor in (1e3, 1e30):
        check(
            seeded(6, WIDTH, seed=1, dtype=torch.float32) * factor,
            weight,
            target,
            torch.ones(6),
            rank=rank,
            world_size=world_size,
        )


@pytest.mark.parametrize("world_size", [1, 2])
def test_large_logits(world_size: int) -> None:
    run_ranks(world_size, large_logits_body)


def written(num_tokens: int, *, dtype: torch.dtype, ignored: float, trains: bool = True) -> tuple[Recorder, int]:
    """What both passes did, and the most bytes that one operation wrote, for 5000 ids."""
    weight, target = head_weight(dtype, num_ids=5000), labels(num_tokens, ignored=ignored, num_ids=5000)
    hidden = seeded(num_tokens, WIDTH, seed=1, dtype=dtype).requires_grad_(trains)
    with Recorder() as seen:
        loss = frozen_head_cross_entropy(hidden, weight, target, group=None)
        if trains:
            loss.sum().backward()
    return seen, max(op.written_bytes for op in seen.operations)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_tensor_holds_more_logits_than_one_chunk(dtype: torch.dtype) -> None:
    """1100 tokens make 5 chunks of 220; what is wider than the operands is as large as a cache."""
    seen, most = written(1100, dtype=dtype, ignored=0.0)
    assert most <= max(220 * 5000 * dtype.itemsize, cross_entropy.CPU_PIECE_ELEMENTS * 4)
    assert most < 1100 * 5000 * dtype.itemsize / 2
    assert seen.count("aten.mm") == 10
    made = [op.written_bytes for op in seen.operations if op.name == "aten.new_empty"]
    assert made.count(220 * 5000 * dtype.itemsize) == 1, "one buffer serves all chunks"


@pytest.mark.parametrize("ignored", [0.0, 0.5, 1.0])
def test_tokens_without_a_label_are_not_multiplied(ignored: float) -> None:
    seen, _ = written(500, dtype=torch.float32, ignored=ignored)
    rows = sum(op.shapes[0][0] for op in seen.operations if op.name == "aten.mm")
    assert rows == 2 * int((labels(500, ignored=ignored, num_ids=5000) != IGNORED).sum())


def test_evaluation_multiplies_once() -> None:
    """Neither a frozen input nor no_grad pays for a gradient, and nothing is kept."""
    seen, _ = written(500, dtype=torch.float32, ignored=0.0, trains=False)
    assert seen.count("aten.mm") == 2
    hidden = seeded(500, WIDTH, seed=1, dtype=torch.float32).requires_grad_()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), Recorder() as seen:
            loss = frozen_head_cross_entropy(hidden, head_weight(torch.float32), labels(500), group=None)
        assert seen.count("aten.mm") == 2
        assert not loss.requires_grad


def test_what_is_kept_is_as_large_as_the_input() -> None:
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor.nbytes) or tensor, lambda saved: saved
    ):
        hidden = seeded(500, WIDTH, seed=1, dtype=torch.bfloat16).requires_grad_()
        frozen_head_cross_entropy(hidden, head_weight(torch.bfloat16, num_ids=5000), labels(500), group=None)
    assert sorted(kept) == [500 * 8, 500 * WIDTH * 4]


def test_autocast_casts_both_operands() -> None:
    hidden = seeded(6, WIDTH, seed=1, dtype=torch.float32).requires_grad_()
    weight, target = head_weight(torch.float32), labels(6)
    with torch.autocast("cpu", torch.bfloat16):
        loss = frozen_head_cross_entropy(hidden, weight, target, group=None)
    expected = frozen_head_cross_entropy(hidden.bfloat16(), weight.bfloat16(), target, group=None)
    assert torch.equal(loss, expected)
    loss.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.float32


def compiled_body(rank: int, world_size: int, backend: str) -> tuple[float, int]:
    """Return the largest error against eager over sizes and numbers of labels, and how often it was compiled."""
    initialize_model_parallel(world_size)
    torch._dynamo.reset()
    shard, num_real = shard_of(head_weight(torch.float32), rank=rank, world_size=world_size)
    group = get_tensor_model_parallel_group()

    def loss_of(hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        doubled = hidden.transpose(0, 1) * 2
        return frozen_head_cross_entropy(doubled, shard, target, num_real_columns=num_real, group=group).square()

    counter, errors = CompileCounterWithBackend(backend), []
    compiled = torch.compile(loss_of, fullgraph=True, backend=counter)
    for num_tokens, ignored in ((6, 0.0), (6, 0.5), (6, 1.0), (300, 0.5), (700, 0.5)):
        hidden = seeded(3, num_tokens, WIDTH, seed=1, dtype=torch.float32).requires_grad_()
        both = []
        for function in (loss_of, compiled):
            loss = function(hidden, labels(num_tokens, 3, ignored=ignored))
            both.append((loss.detach(), *torch.autograd.grad(loss.sum(), hidden)))
        errors += [float((ours - eager).abs().max()) for eager, ours in zip(*both, strict=True)]
    return max(errors), counter.frame_count


@pytest.mark.parametrize(("world_size", "backend"), [(1, "aot_eager"), (2, "aot_eager")])
def test_it_compiles_to_one_graph_whatever_the_labels(world_size: int, backend: str) -> None:
    """Once for the first size and once for all others."""
    for error, num_graphs in run_ranks(world_size, compiled_body, backend):
        assert error < 1e-4
        assert num_graphs == 2


@pytest.mark.parametrize("trains", [True, False])
def test_the_operator_keeps_to_torchs_rules(*, trains: bool) -> None:
    """It writes into nothing that it is given, and its fake gives the shapes that it does."""
    target = labels(6)
    operands = seeded(6, WIDTH, seed=1, dtype=torch.bfloat16), head_weight(torch.bfloat16)
    arguments = (*operands, target, target.clamp(min=0), target >= 0, trains, False, torch.float32)
    assert set(torch.library.opcheck(head_loss._sweep_in_graph, arguments).values()) == {"SUCCESS"}


def test_refusals() -> None:
    hidden, weight = torch.zeros(6, 2, WIDTH), torch.zeros(V, WIDTH)
    message = r"cross-entropy over a frozen head got an input of shape \[6, 2, 12\] and targets of shape \[2, 6\]; give"
    with pytest.raises(LayoutError, match=message):
        frozen_head_cross_entropy(hidden, weight, labels(2, 6), group=None)
    with pytest.raises(LayoutError, match="cross-entropy over a vocabulary of 65 got the target id 65"):
        frozen_head_cross_entropy(hidden, weight, torch.full((6, 2), V), group=None)
    with pytest.raises(LayoutError, match=r"cross-entropy got targets of torch\.float32"):
        frozen_head_cross_entropy(hidden, weight, torch.zeros(6, 2), group=None)
    with pytest.raises(LayoutError, match="a linear product got operands of dtypes"):
        frozen_head_cross_entropy(hidden, weight.double(), labels(6, 2), group=None)
    with pytest.raises(ConfigError, match=r"output_dtype is torch\.bfloat16 for operands of torch\.float32"):
        frozen_head_cross_entropy(hidden, weight, labels(6, 2), group=None, output_dtype=torch.bfloat16)
