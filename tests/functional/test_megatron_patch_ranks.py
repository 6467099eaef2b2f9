"""The patch on two ranks: megatron-core's layers and GPTModel do what they did, and what they did not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_frozen.testing import run_ranks
from tests.functional.megatron_cpu import BATCH, SEQUENCE, VOCAB
from tests.functional.megatron_patch_ranks import (
    UpstreamTied,
    UpstreamUntied,
    ddp_errors,
    diagnose,
    layer,
    train,
    unsharded,
)

# The dim along which the parts of two ranks make the whole; None: each rank has it all.
DIMS: dict[tuple[str, bool], dict[str, int | None]] = {
    ("column", False): {"Y": 2, "dX": None, "dW": 0, "db": 0},
    ("column", True): {"Y": 2, "dX": 0, "dW": 0, "db": 0},
    ("row", False): {"Y": None, "dX": 2, "dW": 1, "db": None},
    ("row", True): {"Y": 0, "dX": 2, "dW": 1, "db": None},
}


@pytest.mark.parametrize("sp", [False, True], ids=["all-reduce", "sequence parallel"])
@pytest.mark.parametrize("kind", ["column", "row"])
@pytest.mark.parametrize("weight", [False, True], ids=["frozen", "trainable"])
def test_each_layer(kind: str, *, weight: bool, sp: bool) -> None:
    """Against one rank, and collective for collective as upstream; case 6: the bias learns under a frozen weight."""
    options: dict[str, Any] = {"weight": weight, "bias": True, "sp": sp}
    ours = run_ranks(2, layer, kind, {**options, "patched": True})
    theirs = run_ranks(2, layer, kind, {**options, "patched": False})
    for name, exact in unsharded(options).items():
        parts = [found[name] for found in ours]
        if exact is None:
            assert parts == [None, None], name
            continue
        _compare(parts, exact.float(), dim=DIMS[kind, sp][name], name=name)
    for mine, upstream in zip(ours, theirs, strict=True):
        assert mine["collectives"] == upstream["collectives"]
        assert "aten.bmm" not in mine["products"]
        assert len(mine["products"]) == 2 + weight
        lost = {"db"} if kind == "column" and not weight else set()  # a row layer adds its bias outside the product
        for name in {"Y", "dX", "dW", "db"} - lost:
            _same(mine[name], upstream[name], name)
        assert all(upstream[name] is None for name in lost)


def _compare(parts: list[Tensor], exact: Tensor, *, dim: int | None, name: str) -> None:
    if dim is None:
        for part in parts:
            torch.testing.assert_close(part, exact, rtol=1e-5, atol=1e-5, msg=name)
    else:
        torch.testing.assert_close(torch.cat(parts, dim), exact, rtol=1e-5, atol=1e-5, msg=name)


def _same(mine: Tensor | None, theirs: Tensor | None, name: str) -> None:
    assert (mine is None) == (theirs is None), name
    if mine is not None:
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("overlap", [False, True], ids=["at the end", "overlapped"])
@pytest.mark.parametrize("kind", [UpstreamUntied, UpstreamTied])
def test_fused_gradients_of_upstreams_layers_are_exact(kind: type[nn.Module], *, overlap: bool) -> None:
    """Under megatron-core's DDP, without apex, over three micro-batches."""
    for errors in run_ranks(2, ddp_errors, kind, {"fusion": True, "overlap": overlap}):
        assert errors
        assert set(errors.values()) == {0.0}, errors


@pytest.mark.parametrize("sp", [False, True], ids=["all-reduce", "sequence parallel"])
@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
def test_a_gpt_model_learns_the_same(*, frozen: bool, sp: bool) -> None:
    options: dict[str, Any] = {"tp": 2, "frozen": frozen, "sp": sp, "tied": frozen}
    ours = run_ranks(2, train, {**options, "patched": True})
    theirs = run_ranks(2, train, {**options, "patched": False})
    for mine, upstream in zip(ours, theirs, strict=True):
        assert mine["losses"] == pytest.approx(upstream["losses"], rel=1e-5)
        assert mine["losses"][1] != mine["losses"][0]
        for grads, expected in zip(mine["grads"], upstream["grads"], strict=True):
            assert grads.keys() == expected.keys()
            _close(grads, expected)


def _close(grads: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, grad in grads.items():
        scale = expected[name].abs().max()
        torch.testing.assert_close(grad / scale, expected[name] / scale, rtol=0, atol=1e-5, msg=name)


def test_the_biases_of_a_frozen_gpt_model_learn() -> None:
    """Case 6: upstream gives them no gradient, unless the weights train too, and then the same."""
    options: dict[str, Any] = {"tp": 2, "frozen": True, "biases_only": True}
    ours = run_ranks(2, train, {**options, "patched": True})
    lost = run_ranks(2, train, {**options, "patched": False})
    theirs = run_ranks(2, train, {"tp": 2, "frozen": False, "patched": False})
    for mine, nothing, upstream in zip(ours, lost, theirs, strict=True):
        assert mine["grads"][0].keys() == {f"decoder.layers.{index}.self_attention.linear_qkv.bias" for index in (0, 1)}
        assert nothing["grads"] == [{}, {}]
        _close(mine["grads"][0], upstream["grads"][0])


def test_the_diagnosis_of_a_gpt_model() -> None:
    """It names the frozen head's backward as installed, and nothing once patched."""
    options = {"frozen": True, "tp": 2}
    shape, stride = (SEQUENCE, BATCH, VOCAB // 2), (VOCAB // 2, SEQUENCE * VOCAB // 2, 1)
    head = ("GPTModel.output_layer", "dgrad", "batched", shape, stride, (VOCAB // 2, 16))
    assert run_ranks(2, diagnose, {**options, "patched": False}) == [[head], [head]]
    assert run_ranks(2, diagnose, {**options, "patched": True}) == [[], []]
