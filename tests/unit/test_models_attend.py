"""Attention as the operator of compiled graphs: the values and gradients of eager code, whatever the documents."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_frozen import kernels
from megatron_frozen.models import attend
from megatron_frozen.models.documents import AttentionPlan, plan_attention
from megatron_frozen.testing import relative_error
from tests.unit.cpu_kernels import needs_kernels

ROWS, LENGTH, HEADS, KV_HEADS, HEAD_DIM = 2, 12, 4, 2, 8
DOCUMENTS = {"whole": None, "packed": [[3, 7, 2], [12]], "equal": [[4, 4, 4], [6, 6]]}


def _plan(documents: list[list[int]] | None, *, window: int | None) -> AttentionPlan:
    return plan_attention(
        num_rows=ROWS,
        seq_length=LENGTH,
        document_lengths=documents,
        windows=[window],
        device=torch.device("cpu"),
    )


def _heads(dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(ROWS, LENGTH, count, HEAD_DIM) for count in (HEADS, KV_HEADS, KV_HEADS)]
    return [torch.randn(shape, dtype=dtype).transpose(0, 1).requires_grad_() for shape in shapes]


def _results(heads: list[Tensor], context: Tensor) -> list[Tensor]:
    weights = torch.randn(context.shape, generator=torch.Generator().manual_seed(1)).to(context.dtype)
    return [context.detach(), *torch.autograd.grad((context * weights).sum(), heads)]


@pytest.mark.parametrize("device", ["cpu", "other"])
@pytest.mark.parametrize("window", [None, 5, 40])
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_the_operator_gives_what_eager_code_gives(
    documents: str, window: int | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "other":  # the same code on the CPU
        monkeypatch.setattr(attend, "_attend_in_graph", attend._attend_under_mask)
    heads, plan = _heads(torch.float32), _plan(DOCUMENTS[documents], window=window)
    expected = _results(heads, attend.attend(*heads, plan=plan, window=window))
    with monkeypatch.context() as graph:
        graph.setattr(torch.compiler, "is_compiling", lambda: True)
        actual = _results(heads, attend.attend(*heads, plan=plan, window=window))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.functionalize], ids=["grad", "functionalize"])
def test_under_a_transform_it_gives_what_torch_gives(transform: Callable[..., Callable[..., Tensor]]) -> None:
    """Where what a kernel writes is wrapped, or stands at no address, which ended the process."""
    heads = torch.randn(100, 1, 2, 16, dtype=torch.bfloat16)
    plan = plan_attention(num_rows=1, seq_length=100, document_lengths=None, windows=[None], device=torch.device("cpu"))
    ours = transform(lambda x: attend.attend(x, x, x, plan=plan, window=None).sum())(heads)
    rows = heads.permute(1, 2, 0, 3)
    theirs = transform(lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True).sum())(rows)
    assert relative_error(ours, (theirs if theirs.dim() == 0 else theirs.permute(2, 0, 1, 3)).double()) < 8e-3


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_the_operator_keeps_to_torchs_rules(dtype: torch.dtype) -> None:
    plan = _plan(DOCUMENTS["packed"], window=5)
    heads = [part.detach().transpose(0, 1).requires_grad_() for part in _heads(dtype)]
    results = torch.library.opcheck(attend.attend_documents, (*heads, plan.bounds, plan.longest_mask(5), 5))
    assert set(results.values()) == {"SUCCESS"}


def test_first_keys_are_where_documents_and_windows_begin() -> None:
    packed, whole = _plan(DOCUMENTS["packed"], window=5), _plan(None, window=5)
    documents = packed.first_key(None)
    assert documents is not None
    assert documents.tolist() == [[0] * 3 + [3] * 7 + [10] * 2, [0] * 12]
    assert documents.dtype == torch.int32
    window = packed.first_key(5)
    assert window is not None
    assert window.tolist() == [[0, 0, 0, 3, 3, 3, 3, 3, 4, 5, 10, 10], [0] * 5 + [1, 2, 3, 4, 5, 6, 7]]
    assert torch.equal(whole.first_keys[5][1], window[1])
    assert packed.first_key(40) is documents
    assert whole.first_key(None) is None
    assert whole.first_key(40) is None
    with torch.device("meta"):  # somebody's default
        assert torch.equal(_plan(DOCUMENTS["packed"], window=5).first_keys[5], window)


@needs_kernels
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("in_graph", [False, True])
def test_our_kernel_takes_all_documents_at_once(
    window: int | None,
    in_graph: bool,  # noqa: FBT001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One call, whatever their number; the values of one call of torch's for each."""
    lengths = [[1, 70, 29, 200], [150, 3, 140, 7]]
    plan = plan_attention(
        num_rows=2, seq_length=300, document_lengths=lengths, windows=[window], device=torch.device("cpu")
    )
    torch.manual_seed(0)
    heads = [torch.randn(300, 2, count, 16).bfloat16().requires_grad_() for count in (4, 2, 2)]
    calls = []
    real = kernels.attend
    monkeypatch.setattr(kernels, "attend", lambda *given: calls.append(1) or real(*given))
    with monkeypatch.context() as graph:
        if in_graph:
            graph.setattr(torch.compiler, "is_compiling", lambda: True)
        ours = _results(heads, attend.attend(*heads, plan=plan, window=window))
    assert len(calls) == 1
    monkeypatch.setattr(attend, "_takes_our_kernel", lambda *_: False)
    wide = [part.detach().double().requires_grad_() for part in heads]
    exact = _results(wide, attend.attend(*wide, plan=plan, window=window))
    theirs = _results(heads, attend.attend(*heads, plan=plan, window=window))
    assert len(calls) == 1
    for mine, other, reference in zip(ours, theirs, exact, strict=True):
        assert relative_error(mine, reference) < max(1.4 * relative_error(other, reference), 3e-3)


def test_bounds_say_where_documents_begin_and_end() -> None:
    assert _plan(None, window=None).bounds.tolist() == [0, 12, 24]
    assert _plan(DOCUMENTS["packed"], window=None).bounds.tolist() == [0, 3, 10, 12, 24]
