"""Megatron-core 0.16.1's GPTModel with our linears in its spec and as its head, against its own: gloo, TP 1 and 2."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_frozen.testing import run_ranks
from tests.functional.megatron_specs_ranks import frozen_head_products, fused, interchange, train


@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("sp", [False, True], ids=["all-reduce", "sequence parallel"])
def test_the_swapped_model_trains_as_upstreams(*, sp: bool, tied: bool, frozen: bool) -> None:
    """Two steps at TP=2: the losses and gradients of upstream's layers, and the losses of one rank."""
    options = {"tp": 2, "sp": sp, "tied": tied, "frozen": frozen}
    ours = run_ranks(2, train, {**options, "ours": True})
    theirs = run_ranks(2, train, {**options, "ours": False})
    (alone,) = run_ranks(1, train, {**options, "tp": 1, "sp": False, "ours": True})
    for mine, reference in zip(ours, theirs, strict=True):
        assert mine["losses"] == pytest.approx(reference["losses"], rel=1e-6)
        assert mine["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert mine["grads"].keys() == reference["grads"].keys()
        for name, grad in reference["grads"].items():
            torch.testing.assert_close(mine["grads"][name], grad, rtol=1e-5, atol=1e-6, msg=name)
    assert alone["losses"][0] != alone["losses"][1]


@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
def test_shared_experts_train_as_upstreams(*, frozen: bool) -> None:
    """Routed experts stay upstream's, beside attention and shared experts of ours."""
    overrides = {
        "num_moe_experts": 4, "moe_router_topk": 2, "moe_shared_expert_intermediate_size": 24,
        "moe_token_dispatcher_type": "allgather",
    }  # fmt: skip
    options = {"tp": 2, "sp": True, "frozen": frozen, "overrides": overrides}
    ours = run_ranks(2, train, {**options, "ours": True})
    theirs = run_ranks(2, train, {**options, "ours": False})
    for mine, reference in zip(ours, theirs, strict=True):
        assert mine["losses"] == pytest.approx(reference["losses"], rel=1e-6)
        assert mine["grads"].keys() == reference["grads"].keys()
        for name, grad in reference["grads"].items():
            torch.testing.assert_close(mine["grads"][name], grad, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_frozen_head_is_one_product(*, tied: bool) -> None:
    """Upstream multiplies in a batch there; the gradient that arrives below the head is the same."""
    (mine,) = run_ranks(1, frozen_head_products, {"tp": 1, "tied": tied, "ours": True})
    (theirs,) = run_ranks(1, frozen_head_products, {"tp": 1, "tied": tied, "ours": False})
    torch.testing.assert_close(mine[0], theirs[0], rtol=1e-5, atol=1e-6)
    assert mine[1] == ["aten.mm"]
    assert theirs[1] == ["aten.bmm"]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_gradients_are_fused_without_apex(*, tied: bool) -> None:
    for main_grads, grads in run_ranks(2, fused, {"tp": 2, "tied": tied, "ours": True}):
        assert main_grads.keys() == grads.keys()
        for name, grad in grads.items():
            torch.testing.assert_close(main_grads[name], grad, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("ours", [False, True], ids=["upstream's into ours", "ours into upstream's"])
def test_distributed_checkpoints_interchange(tmp_path: Path, *, ours: bool, tied: bool) -> None:
    for differences in run_ranks(2, interchange, str(tmp_path / "saved"), {"tp": 2, "tied": tied, "ours": ours}):
        assert len(differences) > 10
        assert set(differences.values()) == {0.0}
