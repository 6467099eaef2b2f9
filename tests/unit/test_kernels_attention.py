"""The compiled attention: threads, what is not finite or too large, heads that do not fit, and nothing at all."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_frozen import kernels
from megatron_frozen.testing import relative_error
from tests.unit.cpu_kernels import needs_kernels


@needs_kernels
@pytest.mark.parametrize(("batch", "num_groups"), [(1, 1), (1, 2), (3, 2)])
def test_attention_is_the_same_on_any_number_of_threads(batch: int, num_groups: int, num_threads: int) -> None:
    """With few key heads for each thread, the gradients of query heads that share one are summed by other means."""
    torch.manual_seed(0)
    query = torch.randn(batch, 2 * num_groups, 200, 16).bfloat16()
    key, value = (torch.randn(batch, num_groups, 200, 16).bfloat16() for _ in range(2))
    results = []
    for threads in (num_threads, 1):
        torch.set_num_threads(threads)
        context, logsumexp = kernels.attend(query, key, value)
        grads = kernels.attend_backward(query.cos(), query, key, value, context, logsumexp)
        results.append((context, logsumexp, *grads))
    for mine, alone in zip(results[0][:3], results[1][:3], strict=True):
        assert torch.equal(mine, alone)
    for mine, alone in zip(results[0][3:], results[1][3:], strict=True):
        assert relative_error(mine, alone.double()) < 2e-3


def cut_rows(num_rows: int, length: int, *, kind: str) -> torch.Tensor:
    """First keys of documents of some 90 or 11 tokens, or of a window of 38."""
    places = torch.arange(length)
    if kind == "window":
        return (places - 37).clamp(min=0).to(torch.int32).expand(num_rows, -1).contiguous()
    rows = []
    for _ in range(num_rows):
        begins = torch.rand(length) < (1 / 90 if kind == "long" else 1 / 11)
        rows.append(torch.where(begins, places, 0).cummax(0).values)
    return torch.stack(rows).to(torch.int32)


@needs_kernels
@pytest.mark.parametrize("kind", ["long", "short", "window"])
@pytest.mark.parametrize(
    "shape", [(1, 6, 2, 700, 16), (2, 4, 4, 300, 32), (3, 2, 1, 129, 8), (1, 2, 1, 64, 64)], ids=str
)
def test_attention_from_each_querys_first_key(shape: tuple[int, ...], kind: str, num_threads: int) -> None:
    """As in packed documents and windows, against fp64 under a mask."""
    torch.manual_seed(0)
    torch.set_num_threads(num_threads)
    b, n, k, s, d = shape
    query, grad = torch.randn(2, b, n, s, d).bfloat16()
    key, value = torch.randn(2, b, k, s, d).bfloat16()
    first_keys = cut_rows(b, s, kind=kind)
    context, logsumexp = kernels.attend(query, key, value, first_keys)
    found = context, *kernels.attend_backward(grad, query, key, value, context, logsumexp, first_keys)
    wide = [part.double().requires_grad_() for part in (query, key, value)]
    sees = ~later(s) & (torch.arange(s) >= first_keys[:, None, :, None])
    exact = torch.nn.functional.scaled_dot_product_attention(*wide, attn_mask=sees, enable_gqa=True)
    for mine, reference in zip(found, (exact, *torch.autograd.grad(exact, wide, grad.double())), strict=True):
        assert relative_error(mine, reference) < 4e-3


@needs_kernels
@pytest.mark.parametrize("size", [5.0, 1e4, 1e30])
def test_another_documents_tokens_change_nothing(size: float) -> None:
    """To the bit. Scores that are large were rounded by other means, for all queries of their block."""
    torch.manual_seed(0)
    length, cuts = 300, torch.tensor([150, 187])
    document = torch.bucketize(torch.arange(length), cuts, right=True)
    first_keys = torch.tensor([0, *cuts])[document].to(torch.int32)[None]
    own = document == 1
    given = torch.randn(4, 1, 2, length, 16).bfloat16()
    results = []
    for scale in (1.0, size):
        query, key, value, grad = torch.where(own[:, None], given, scale * given)
        context, logsumexp = kernels.attend(query, key, value, first_keys)
        grads = kernels.attend_backward(grad, query, key, value, context, logsumexp, first_keys)
        results.append((context, logsumexp.unsqueeze(-1), *grads))
    for before, after in zip(*results, strict=True):
        assert torch.equal(before[:, :, own], after[:, :, own])
        assert not torch.equal(before, after)


@needs_kernels
def test_first_keys_that_do_not_fit_are_refused() -> None:
    query = torch.randn(2, 1, 64, 8).bfloat16()
    for wrong in (torch.zeros(2, 63), torch.zeros(2, 64), torch.zeros(64, 2, dtype=torch.int32).t()):
        with pytest.raises(AssertionError, match="got first keys"):
            kernels.attend(query, query, query, wrong)


@needs_kernels
def test_attention_keeps_what_is_not_a_number_to_the_queries_that_see_it() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 1, 300, 8).bfloat16() for _ in range(3))
    key[0, 0, 200] = torch.nan
    context, _ = kernels.attend(query, key, value)
    assert context[0, 0, 200:].isnan().all()
    assert not context[0, 0, :200].isnan().any()


@needs_kernels
def test_attention_gives_the_logarithm_of_the_sum_of_exponentials() -> None:
    torch.manual_seed(0)
    query, key, value = (3 * torch.randn(2, 2, 150, 12).bfloat16() for _ in range(3))
    _, logsumexp = kernels.attend(query, key, value)
    scores = query.double() @ key.double().transpose(2, 3) / 12**0.5
    exact = scores.masked_fill(later(150), -torch.inf).logsumexp(-1) / math.log(2)
    torch.testing.assert_close(logsumexp.double(), exact, rtol=1e-6, atol=1e-5)


@needs_kernels
def test_attention_forgets_a_block_of_keys_that_a_query_cannot_see() -> None:
    """Its maximum is -inf, which taken from itself is no number."""
    torch.manual_seed(0)
    query, value = torch.ones(1, 1, 256, 2).bfloat16(), torch.randn(1, 1, 256, 2).bfloat16()
    key = query.clone()
    key[:, :, :128] = -torch.inf
    context, _ = kernels.attend(query, key, value)
    seen = value[:, :, 128:].double().cumsum(2) / torch.arange(1, 129).view(-1, 1)
    assert relative_error(context[:, :, 128:], seen) < 4e-3


@needs_kernels
@pytest.mark.parametrize("size", [1e3, 1e5, 1e8, 1e15])
def test_attention_to_scores_as_large_as_a_run_that_diverges_has(size: float) -> None:
    """A score times the scale, rounded, was taken from one that was not: what rounding leaves of 10^9 overflows."""
    torch.manual_seed(0)
    query, key, value, grad = (torch.randn(1, heads, 200, 16).bfloat16() for heads in (2, 1, 1, 2))
    query = (size * query.float()).bfloat16()
    context, logsumexp = kernels.attend(query, key, value)
    grads = kernels.attend_backward(grad, query, key, value, context, logsumexp)
    scores = (query.double() @ key.double().transpose(2, 3) / 4).masked_fill(later(200), -torch.inf)
    probs = scores.softmax(-1)
    assert relative_error(context, probs @ value.double()) < 4e-3
    assert relative_error(grads[2], (probs.transpose(2, 3) @ grad.double()).sum(1, keepdim=True)) < 4e-3
    assert all(part.isfinite().all() for part in grads)


@needs_kernels
@pytest.mark.parametrize("shape", [(0, 2, 1, 64, 16), (1, 0, 2, 64, 16), (1, 2, 1, 0, 16), (1, 2, 1, 64, 0)], ids=str)
def test_attention_to_nothing(shape: tuple[int, ...]) -> None:
    b, n, k, s, d = shape
    query, key, value = (torch.ones(b, heads, s, d).bfloat16() for heads in (n, k, k))
    context, logsumexp = kernels.attend(query, key, value)
    grads = kernels.attend_backward(query, query, key, value, context, logsumexp)
    for grad, given in zip((context, *grads), (query, query, key, value), strict=True):
        assert torch.equal(grad, torch.zeros_like(given))


@pytest.mark.parametrize(
    ("key", "value"),
    [((1, 1, 64, 8), (1, 1, 64, 8)), ((2, 3, 64, 8), (2, 3, 64, 8)), ((2, 2, 64, 8), (2, 1, 64, 8)),
     ((2, 2, 64, 8), (2, 2, 63, 8)), ((2, 2, 64, 4), (2, 2, 64, 4))],
    ids=["batch", "heads", "value heads", "length", "head dim"],
)  # fmt: skip
def test_heads_that_do_not_fit_are_not_read(key: tuple[int, ...], value: tuple[int, ...]) -> None:
    """What stood behind them in memory was."""
    heads = (torch.ones(shape).bfloat16() for shape in ((2, 4, 64, 8), key, value))
    with pytest.raises(AssertionError, match="got key"):
        kernels.attend(*heads)
    query = torch.ones(2, 4, 64, 8).bfloat16()
    with pytest.raises(AssertionError, match="got a gradient of"):
        kernels.attend_backward(query[:1], query, query, query, query, torch.ones(2, 4, 64))


def later(length: int) -> torch.Tensor:
    return torch.ones(length, length, dtype=torch.bool).triu_(1)
