"""The diagnosis names what runs batched or copied, where and why; no test here looks at how long something took."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_frozen.diagnostics import Diagnosis
from megatron_frozen.diagnostics.findings import Fault
from megatron_frozen.functional import linear_with_frozen_weight
from tests.unit.diagnosis_toys import DGRAD, FORWARD, WGRAD, B, H, Head, Model, S, V, found_in, kinds, step


def test_a_frozen_heads_dgrad_by_name_layout_and_count() -> None:
    """Megatron-core's fault: dY [S, B, V] that lies as [B, S, V] is one product for each token."""
    model = Model()
    found = found_in(lambda: [step(model) for _ in range(5)])
    assert kinds(found) == {("Model.head", DGRAD, Fault.BATCHED)}
    (finding,) = found
    assert (finding.shape, finding.stride, finding.matrix) == ((S, B, V), (V, S * V, 1), (V, H))
    assert (finding.calls, finding.dtype) == (5, torch.float32)
    assert 0 < finding.folded_s < float("inf")
    assert finding.wasted_s == 5 * (finding.as_run_s - finding.folded_s)


def test_nothing_is_found_in_folded_products() -> None:
    """The same layout through this package, attention's products, and layouts that torch folds."""
    options: dict[str, Any] = {
        "gradient_accumulation_fusion": False,
        "allreduce_dgrad": False,
        "sequence_parallel": False,
    }
    head = Head(lambda X, weight: linear_with_frozen_weight(X, weight, None, **options))
    X = torch.ones(B, S, H).transpose(0, 1).requires_grad_()

    def attention() -> None:
        q, k, v = torch.ones(3, 2, 4, 6, 8, requires_grad=True).unbind()
        (torch.softmax(q @ k.mT, -1) @ v).sin().sum().backward()

    assert found_in(lambda: head(X).transpose(0, 1).contiguous().sin().sum().backward()) == []
    assert found_in(attention) == []
    assert found_in(lambda: nn.Linear(H, V)(torch.ones(S, B, H)).sum().backward()) == []


def test_a_forward_batched_by_a_frozen_weight_and_its_dgrad() -> None:
    linear = nn.Linear(H, V, bias=False)
    linear.weight.requires_grad = False
    X = torch.ones(B, S, H).transpose(0, 1).requires_grad_()
    forward, dgrad = sorted(found_in(lambda: linear(X).cos().sum().backward()), key=lambda found: found.matrix[0] == V)
    assert (forward.module, forward.direction, forward.shape, forward.matrix) == ("Linear", FORWARD, (S, B, H), (H, V))
    assert (dgrad.module, dgrad.direction, dgrad.shape, dgrad.matrix) == ("Linear", DGRAD, (S, B, V), (V, H))


@pytest.mark.parametrize("summed", [False, True], ids=["dense", "expanded"])
def test_a_batched_weight_gradient(summed: bool) -> None:  # noqa: FBT001
    """A batched product by an expanded weight gives dW a slice for each of the batch, also where dY is expanded."""

    def call() -> None:
        weight, X = torch.ones(H, V, requires_grad=True), torch.ones(S, B, H, requires_grad=True)
        Y = torch.bmm(X, weight.expand(S, H, V))
        (Y.sum() if summed else Y.sin().sum()).backward()

    found = {finding.direction: finding for finding in found_in(call)}
    assert found.keys() == {FORWARD, DGRAD, WGRAD}
    assert (found[WGRAD].shape, found[WGRAD].matrix, found[WGRAD].calls) == ((S, B, V), (H, V), 1)
    assert (found[DGRAD].shape, found[DGRAD].matrix, found[DGRAD].calls) == ((S, B, V), (V, H), 1)


@pytest.mark.parametrize("einsum", [False, True])
@pytest.mark.parametrize("of_what", ["permuted", "expanded"])
def test_a_copy_that_folding_spares(of_what: str, einsum: bool) -> None:  # noqa: FBT001
    """As in a plain flatten, in einsum, and in what autograd makes of a frozen nn.Linear over dense rows."""
    dense = torch.ones(B, S, H) if of_what == "permuted" else torch.ones(1, S, H)
    X, weight = dense.transpose(0, 1).expand(S, B, H), torch.ones(H, V)
    (finding,) = found_in(lambda: torch.einsum("sbh,hv->sbv", X, weight) if einsum else X.reshape(-1, H) @ weight)
    assert (finding.module, finding.direction, finding.fault) == ("", FORWARD, Fault.COPIED)
    assert (finding.shape, finding.stride, finding.matrix) == ((S, B, H), X.stride(), (H, V))
    assert finding.as_run_s > finding.folded_s


def test_a_copy_for_a_frozen_dgrad() -> None:
    linear = nn.Linear(H, V, bias=False)
    linear.weight.requires_grad = False
    X = torch.ones(S, B, H, requires_grad=True)
    (finding,) = found_in(lambda: linear(X).transpose(0, 1).contiguous().sin().sum().backward())
    assert (finding.module, finding.direction, finding.fault) == ("Linear", DGRAD, Fault.COPIED)
    assert (finding.shape, finding.stride, finding.matrix) == ((S, B, V), (V, S * V, 1), (V, H))


def test_copies_that_may_be_needed_are_no_fault() -> None:
    """A weight gradient wants dY and X in one order; heads are put side by side; a strided hidden dim cannot fold."""
    trains, frozen = nn.Linear(H, V), nn.Linear(H, V)
    for parameter in frozen.parameters():
        parameter.requires_grad = False
    X = torch.ones(S, B, H, requires_grad=True)
    assert found_in(lambda: trains(X).transpose(0, 1).contiguous().sin().sum().backward()) == []
    assert found_in(lambda: trains(X.transpose(0, 1)).transpose(0, 1).sin().sum().backward()) == []
    assert found_in(lambda: frozen(torch.ones(B, 2, S, H // 2).permute(2, 0, 1, 3).reshape(S, B, H))) == []
    assert found_in(lambda: frozen(torch.ones(S, B, H, 2)[..., 0])) == []
    square = nn.Linear(H, S * B, bias=False)  # so that dY.T looks like rows of dY
    assert found_in(lambda: square(torch.ones(S, B, H)).transpose(0, 1).contiguous().sin().sum().backward()) == []


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_checkpointing_computes_again_is_named(reentrant: bool) -> None:  # noqa: FBT001
    def run(model: nn.Module, X: Tensor) -> Tensor:
        logits = checkpoint(model, X, use_reentrant=reentrant)
        assert isinstance(logits, Tensor)
        return logits

    model = Model()
    found = found_in(lambda: step(model, run=run))
    assert kinds(found) == {("Model.head", DGRAD, Fault.BATCHED)}
    frozen = nn.Sequential(nn.Linear(H, H), nn.Linear(H, V))
    for parameter in frozen.parameters():
        parameter.requires_grad = False
    X = torch.ones(B, S, H).transpose(0, 1).requires_grad_()
    again = found_in(lambda: checkpoint(frozen, X, use_reentrant=reentrant).sum().backward())
    assert [finding.calls for finding in again if finding.direction is FORWARD] == [2]
    assert {finding.module for finding in again if finding.direction is FORWARD} == {"Sequential.0"}


def test_a_function_without_modules_computed_again_is_a_forward() -> None:
    weight = torch.ones(H, V)
    X = torch.ones(B, S, H, requires_grad=True)
    found = found_in(lambda: checkpoint(lambda X: (X.transpose(0, 1) @ weight).sin(), X, use_reentrant=False)
                     .sum().backward())  # fmt: skip
    assert {(finding.direction, finding.matrix, finding.calls) for finding in found} == {
        (FORWARD, (H, V), 2), (DGRAD, (V, H), 1),
    }  # fmt: skip


def test_outside_modules_and_after_an_error() -> None:
    class Fails(nn.Module):
        def forward(self, X: Tensor) -> Tensor:
            raise ValueError(X.shape)

    with Diagnosis() as found:
        with pytest.raises(ValueError, match="Size"):
            Fails()(torch.ones(1))
        torch.matmul(torch.ones(B, S, H).transpose(0, 1), torch.ones(H, V))
    assert kinds(found.findings) == {("", FORWARD, Fault.BATCHED)}
    found_in(lambda: None)
    assert not torch.nn.modules.module._global_forward_pre_hooks
    assert not torch.nn.modules.module._global_forward_hooks


def test_a_node_of_another_product_is_not_taken_for_it() -> None:
    """Without a gradient to come autograd makes no node, and the last one is somebody else's."""

    def call() -> None:
        q, k = torch.ones(2, S, H, B, requires_grad=True).unbind()
        scores = torch.bmm(q, k.mT)
        torch.matmul(torch.ones(B, S, H).transpose(0, 1), torch.ones(H, V))
        scores.sin().sum().backward()

    assert kinds(found_in(call)) == {("", FORWARD, Fault.BATCHED)}


def test_a_product_without_gradients_is_no_node() -> None:
    """Neither under no_grad, nor in the forward of somebody's autograd function, whose backward may be anything."""

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(q)
            return torch.bmm(q, weight.expand(S, H, V))

        @staticmethod
        def backward(ctx: Any, dY: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
            (q,) = ctx.saved_tensors
            return torch.bmm(torch.bmm(q, q.mT), q), None

    def call() -> None:
        q, k = torch.ones(2, S, B, H, requires_grad=True).unbind()
        scores = torch.bmm(q, k.mT)
        with torch.no_grad():
            torch.bmm(q, torch.ones(H, V).expand(S, H, V))
        (scores.sin().sum() + Fused.apply(q, torch.ones(H, V)).sin().sum()).backward()

    assert kinds(found_in(call)) == {("", FORWARD, Fault.BATCHED)}


def test_batched_products_by_other_names() -> None:
    X, weight, bias = torch.ones(S, B, H, requires_grad=True), torch.ones(H, V, requires_grad=True), torch.ones(V)
    matrix = weight.expand(S, H, V)
    found = found_in(lambda: torch.baddbmm(bias, X, matrix, beta=0.5).sin().sum().backward())
    assert {finding.direction for finding in found} == {FORWARD, DGRAD, WGRAD}
    with torch.no_grad():
        out = torch.zeros(S, B, V)
        assert kinds(found_in(lambda: torch.bmm(X, matrix, out=out))) == {("", FORWARD, Fault.BATCHED)}
        assert torch.equal(out, torch.bmm(X, matrix))
        assert kinds(found_in(lambda: out.baddbmm_(X, matrix))) == {("", FORWARD, Fault.BATCHED)}
        assert torch.equal(out, 2 * torch.bmm(X, matrix)), "it ran once"
