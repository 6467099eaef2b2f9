"""The calls made to Transformer Engine. It needs CUDA, so a stand-in with its semantics takes the calls here."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.machinery import BuiltinImporter
from typing import Any

import pytest
import torch

from megatron_frozen.errors import LayoutError
from megatron_frozen.gemm import reference, transformer_engine
from megatron_frozen.gemm.request import Product, Request
from megatron_frozen.testing import relative_error
from tests.unit import gemm_foreign
from tests.unit.gemm_foreign import IN, LOW, OUT, TOKENS, make_request, operands

EXTENSIONS, BASE = "transformer_engine.pytorch.cpp_extensions", "transformer_engine.pytorch.module.base"


@pytest.fixture(autouse=True)
def _fresh_probe() -> Iterator[None]:
    transformer_engine._installed.cache_clear()
    yield
    transformer_engine._installed.cache_clear()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[torch.Tensor, ...], dict[str, Any]]]:
    """What Transformer Engine was called with, since 2.10: no workspace."""
    calls: list[tuple[tuple[torch.Tensor, ...], dict[str, Any]]] = []

    def general_gemm(*args: torch.Tensor, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        return gemm_foreign.general_gemm(*args, **kwargs)

    gemm_foreign.install(monkeypatch, EXTENSIONS, general_gemm=general_gemm)
    gemm_foreign.install(monkeypatch, BASE)
    return calls


REQUESTS = [
    make_request(product, dtype, output_dtype=output_dtype, accumulate=accumulate, with_bias=with_bias)
    for dtype in LOW
    for output_dtype in (torch.float32, dtype)
    for product in Product
    for accumulate in (False, True)
    for with_bias in ([False] if product is Product.DGRAD else [False, True])
]


@pytest.mark.parametrize("gaps", [False, True], ids=["dense", "gaps"])
@pytest.mark.parametrize("request_", REQUESTS, ids=str)
def test_every_product_equals_the_reference(calls: list[Any], request_: Request, *, gaps: bool) -> None:
    left, right, out, bias = operands(request_, gaps=gaps)
    expected = out.double()
    wide = make_request(
        request_.product,
        torch.float64,
        output_dtype=torch.float64,
        accumulate=request_.accumulate,
        with_bias=request_.with_bias,
    )
    expected_db = reference.run(wide, left.double(), right.double(), out=expected, bias=bias.double())
    db = transformer_engine.run(request_, left, right, out=out, bias=bias)
    tolerance = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[request_.output_dtype]
    assert len(calls) == 1
    assert relative_error(out, expected) < tolerance
    assert (db is None) == (expected_db is None)
    if db is not None and expected_db is not None:
        assert db.dtype == request_.output_dtype
        assert relative_error(db, expected_db) < tolerance


def test_the_stand_in_misreads_gaps_and_a_bias_of_another_dtype() -> None:
    """The control: without care for strides and dtypes the comparison above fails."""
    request = make_request(Product.DGRAD)
    left, right, out, _ = operands(request, gaps=True)
    gemm_foreign.general_gemm(right.contiguous(), left, layout="NN", out=out, accumulate=False, bias=None, grad=True)
    expected = torch.empty_like(out)
    reference.run(request, left, right, out=expected)
    assert not relative_error(out, expected) < 0.1
    request = make_request(Product.FORWARD, with_bias=True)
    left, right, out, bias = operands(request, gaps=False)
    with pytest.raises(RuntimeError, match=r"must match the size|must be divisible"):
        gemm_foreign.general_gemm(right, left, layout="TN", out=out, accumulate=False, bias=bias, grad=False)


@pytest.mark.parametrize(
    ("product", "layout", "first", "second", "grad"),
    [
        (Product.FORWARD, "TN", (OUT, IN), (TOKENS, IN), False),
        (Product.DGRAD, "NN", (OUT, IN), (TOKENS, OUT), True),
        (Product.WGRAD, "NT", (TOKENS, IN), (TOKENS, OUT), True),
    ],
)
@pytest.mark.parametrize("accumulate", [False, True])
def test_operand_order_layout_and_keywords(
    calls: list[Any],
    product: Product,
    layout: str,
    first: tuple[int, int],
    second: tuple[int, int],
    *,
    grad: bool,
    accumulate: bool,
) -> None:
    request = make_request(product, accumulate=accumulate)
    left, right, out, _ = operands(request, gaps=False)
    assert transformer_engine.run(request, left, right, out=out) is None
    (((A, B), keywords),) = calls
    assert A is right
    assert B is left
    assert (tuple(A.shape), tuple(B.shape)) == (first, second)
    assert keywords.pop("out") is out
    assert keywords == {"layout": layout, "accumulate": accumulate, "grad": grad, "bias": None}


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("product", Product)
def test_all_that_is_passed_is_dense(calls: list[Any], product: Product, *, accumulate: bool) -> None:
    request = make_request(product, accumulate=accumulate, with_bias=product is not Product.DGRAD)
    left, right, out, bias = operands(request, gaps=True)
    transformer_engine.run(request, left, right, out=out, bias=bias)
    ((args, keywords),) = calls
    given = [*args, keywords["out"], *([] if keywords["bias"] is None else [keywords["bias"]])]
    assert len(given) == (3 if product is Product.DGRAD else 4)
    assert all(tensor.is_contiguous() for tensor in given)
    assert not out.is_contiguous()


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_the_bias_comes_in_the_outputs_dtype(calls: list[Any], dtype: torch.dtype) -> None:
    for product, output_dtype in ((Product.FORWARD, torch.float32), (Product.WGRAD, torch.float32)):
        request = make_request(product, dtype, output_dtype=output_dtype, with_bias=True)
        left, right, out, bias = operands(request, gaps=False)
        transformer_engine.run(request, left, right, out=out, bias=bias)
        passed = calls[-1][1]["bias"]
        assert (passed.dtype, tuple(passed.shape)) == (output_dtype, (OUT,))


def test_a_buffer_with_gaps_keeps_its_neighbours(calls: list[Any]) -> None:
    flat = torch.full((OUT, 2 * IN), 3.0)
    request = make_request(Product.WGRAD, accumulate=True)
    left, right, _, _ = operands(request, gaps=False)
    transformer_engine.run(request, left, right, out=flat[:, IN:])
    assert len(calls) == 1
    assert torch.equal(flat[:, :IN], torch.full((OUT, IN), 3.0))
    assert relative_error(flat[:, IN:], 3 + left.double().t() @ right.double()) < 1e-6


def test_the_workspace_is_passed_where_the_release_has_one(monkeypatch: pytest.MonkeyPatch, calls: list[Any]) -> None:
    workspace = torch.empty(8, dtype=torch.uint8)
    passed: list[torch.Tensor] = []

    def general_gemm(A: torch.Tensor, B: torch.Tensor, workspace: torch.Tensor, **keywords: Any) -> Any:
        passed.append(workspace)
        return gemm_foreign.general_gemm(A, B, **keywords)

    request = make_request(Product.WGRAD)
    left, right, out, _ = operands(request, gaps=False)
    gemm_foreign.install(monkeypatch, BASE, get_workspace=lambda: workspace)
    gemm_foreign.install(monkeypatch, EXTENSIONS, general_gemm=general_gemm)
    transformer_engine.run(request, left, right, out=out)
    assert passed[0] is workspace
    assert not calls  # the release without one was replaced
    elsewhere = torch.empty(8, dtype=torch.uint8, device="meta")
    gemm_foreign.install(monkeypatch, BASE, get_workspace=lambda: elsewhere)
    transformer_engine._installed.cache_clear()
    transformer_engine.run(request, left, right, out=out)
    assert (passed[1].device, passed[1].shape, passed[1].dtype) == (out.device, elsewhere.shape, elsewhere.dtype)


def test_a_release_whose_module_base_is_gone_needs_no_workspace(
    monkeypatch: pytest.MonkeyPatch, calls: list[Any]
) -> None:
    monkeypatch.setitem(sys.modules, BASE, None)
    request = make_request(Product.WGRAD)
    left, right, out, _ = operands(request, gaps=False)
    transformer_engine.run(request, left, right, out=out)
    assert "workspace" not in calls[0][1]


def test_sizes_above_32_bits_are_refused_before_any_copy(calls: list[Any]) -> None:
    tokens = torch.zeros((), dtype=torch.bfloat16).expand(2**31, 1)
    with pytest.raises(LayoutError, match=r"Transformer Engine was given operands \[2147483648, 1\].* cut the tokens"):
        transformer_engine.run(make_request(Product.WGRAD), tokens, tokens, out=torch.zeros(1, 1))
    assert not calls


def test_what_does_not_fit_the_request_reaches_no_kernel(calls: list[Any]) -> None:
    request = make_request(Product.FORWARD, with_bias=True)
    left, right, out, bias = operands(request, gaps=False)
    for changed in (
        {"left": left.float()},
        {"right": right[None]},
        {"right": right.to("meta")},
        {"out": out.half()},
        {"out": out[1:]},
        {"out": out.to("meta")},
        {"bias": bias[1:]},
    ):
        given = {"left": left, "right": right, "out": out, "bias": bias} | changed
        with pytest.raises(AssertionError, match=r"got operands|got an output|a bias"):
            transformer_engine.run(request, given.pop("left"), given.pop("right"), **given)
    assert not calls


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device_type": "cpu"}, "multiplies on CUDA only"),
        ({"dtype": torch.float64, "output_dtype": torch.float64}, "bfloat16 and float16 operands only"),
        ({"dtype": torch.float32}, "rounds float32 ones to TF32"),
        ({"output_dtype": torch.float16}, "output is float32 or of the operands' dtype"),
    ],
)
def test_what_no_install_can_serve(calls: list[Any], changes: dict[str, Any], reason: str) -> None:
    request = make_request(**({"product": Product.WGRAD, "device_type": "cuda"} | changes))
    assert reason in (transformer_engine.unsupported(request) or "")


def test_an_absent_or_broken_install_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    request = make_request(Product.WGRAD, device_type="cuda")
    with monkeypatch.context() as nothing_installed:
        nothing_installed.setattr(sys, "meta_path", [BuiltinImporter])
        assert transformer_engine.unsupported(request) == "transformer_engine is not installed"
    gemm_foreign.install(monkeypatch, EXTENSIONS)
    assert transformer_engine.unsupported(request) == "transformer_engine is not installed"  # tried once
    transformer_engine._installed.cache_clear()
    reason = transformer_engine.unsupported(request) or ""
    assert reason.startswith("transformer_engine is installed but fails to import (AttributeError: ")
    assert "general_gemm" in reason


def test_a_device_is_needed_last(monkeypatch: pytest.MonkeyPatch, calls: list[Any]) -> None:
    request = make_request(Product.WGRAD, device_type="cuda")
    for available, reason in ((False, "torch finds no CUDA device"), (True, None)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        assert transformer_engine.unsupported(request) == reason
