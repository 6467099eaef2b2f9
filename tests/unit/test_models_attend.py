"""Attention as the operator of compiled graphs: the values and gradients of eager code, whatever the documents."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_frozen.models import attend
from megatron_frozen.models.documents import AttentionPlan, plan_attention
from megatron_frozen.testing import relative_error

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
    tokens = [part.detach().transpose(0, 1).flatten(0, 1).requires_grad_() for part in _heads(dtype)]
    results = torch.library.opcheck(attend.attend_documents, (*tokens, plan.bounds, plan.longest_mask(5), 5))
    assert set(results.values()) == {"SUCCESS"}


def test_bounds_say_where_documents_begin_and_end() -> None:
    assert _plan(None, window=None).bounds.tolist() == [0, 12, 24]
    assert _plan(DOCUMENTS["packed"], window=None).bounds.tolist() == [0, 3, 10, 12, 24]
