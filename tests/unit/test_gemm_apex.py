"""The calls made to apex's extension. It needs CUDA, so a stand-in with its semantics takes the calls here."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_frozen.errors import LayoutError
from megatron_frozen.gemm import apex, reference
from megatron_frozen.gemm.request import Product
from megatron_frozen.testing import relative_error
from tests.gates.source import ROOT
from tests.unit.gemm_foreign import LOW, install, layout_product, make_request, operands, seen

EXTENSION = "fused_weight_gradient_mlp_cuda"


@pytest.fixture(autouse=True)
def _fresh_probe() -> Iterator[None]:
    apex._installed.cache_clear()
    yield
    apex._installed.cache_clear()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that ran."""
    calls: list[str] = []

    def kernel(name: str) -> Any:
        def add(input_: torch.Tensor, d_output: torch.Tensor, d_weight: torch.Tensor) -> None:
            calls.append(name)
            assert d_weight.dtype == (torch.float32 if name.endswith("fp32") else input_.dtype)
            total = seen(d_weight).float() + layout_product(input_, d_output, layout="NT")
            seen(d_weight).copy_(total)

        return add

    names = ("wgrad_gemm_accum_fp32", "wgrad_gemm_accum_fp16")
    install(monkeypatch, EXTENSION, **{name: kernel(name) for name in names})
    return calls


@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("gaps", [False, True], ids=["dense", "gaps"])
@pytest.mark.parametrize(
    ("dtype", "output_dtype", "kernel", "tolerance"),
    [
        (torch.bfloat16, torch.float32, "wgrad_gemm_accum_fp32", 1e-6),
        (torch.float16, torch.float32, "wgrad_gemm_accum_fp32", 1e-6),
        (torch.float32, torch.float32, "wgrad_gemm_accum_fp32", 1e-6),
        (torch.bfloat16, torch.bfloat16, "wgrad_gemm_accum_fp16", 8e-3),
        (torch.float16, torch.float16, "wgrad_gemm_accum_fp16", 1e-3),
    ],
)
def test_weight_gradients_are_added(
    calls: list[str],
    dtype: torch.dtype,
    output_dtype: torch.dtype,
    kernel: str,
    tolerance: float,
    *,
    gaps: bool,
    with_bias: bool,
) -> None:
    request = make_request(Product.WGRAD, dtype, output_dtype=output_dtype, accumulate=True, with_bias=with_bias)
    wide = make_request(Product.WGRAD, torch.float64, output_dtype=torch.float64, accumulate=True, with_bias=with_bias)
    left, right, out, _ = operands(request, gaps=gaps)
    expected = out.double()
    expected_db = reference.run(wide, left.double(), right.double(), out=expected)
    db = apex.run(request, left, right, out=out)
    assert calls == [kernel]
    assert relative_error(out, expected) < tolerance
    assert (db is None) == (expected_db is None) == (not with_bias)
    if db is not None and expected_db is not None:
        assert db.dtype == output_dtype
        assert relative_error(db, expected_db) < tolerance


def test_256_and_1_give_257(calls: list[str]) -> None:
    request = make_request(Product.WGRAD, accumulate=True)
    main_grad = torch.zeros(1, 1)
    for value in (256.0, 1.0):
        gradient = torch.full((1, 1), value, dtype=torch.bfloat16)
        apex.run(request, gradient, torch.ones(1, 1, dtype=torch.bfloat16), out=main_grad)
    assert len(calls) == 2
    assert main_grad.item() == 257.0


def test_the_stand_in_misreads_gaps(calls: list[str]) -> None:
    """The control: without care for strides the comparison above fails."""
    request = make_request(Product.WGRAD, accumulate=True)
    left, right, out, _ = operands(request, gaps=True)
    expected = out.clone()
    reference.run(request, left, right, out=expected)
    dense = out.contiguous()
    sys.modules[EXTENSION].wgrad_gemm_accum_fp32(right.contiguous(), left, dense)
    assert len(calls) == 1
    assert relative_error(dense, expected) > 0.1


def test_sizes_above_32_bits_are_refused_before_any_copy(calls: list[str]) -> None:
    tokens = torch.zeros((), dtype=torch.bfloat16).expand(2**31, 1)
    request = make_request(Product.WGRAD, accumulate=True)
    with pytest.raises(
        LayoutError, match=r"apex was given operands \[2147483648, 1\].* the most that its 32-bit sizes"
    ):
        apex.run(request, tokens, tokens, out=torch.zeros(1, 1))
    assert not calls


def test_what_does_not_fit_the_request_reaches_no_kernel(calls: list[str]) -> None:
    request = make_request(Product.WGRAD, accumulate=True)
    left, right, out, _ = operands(request, gaps=False)
    for changed in (
        {"left": left.float()},
        {"right": right[None]},
        {"right": right.to("meta")},
        {"out": out.half()},
        {"out": out[1:]},
        {"out": out.to("meta")},
    ):
        given = {"left": left, "right": right, "out": out} | changed
        with pytest.raises(AssertionError, match=r"got operands|got an output"):
            apex.run(request, given["left"], given["right"], out=given["out"])
    assert not calls


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device_type": "cpu"}, "apex multiplies on CUDA only"),
        ({"accumulate": False}, "only adds a weight gradient to what its buffer holds"),
        ({"product": Product.FORWARD}, "only adds a weight gradient to what its buffer holds"),
        ({"product": Product.DGRAD}, "only adds a weight gradient to what its buffer holds"),
        ({"dtype": torch.float64, "output_dtype": torch.float64}, "and the first two to their own dtype"),
        ({"dtype": torch.float64}, "adds bfloat16, float16 and float32 operands to float32"),
        ({"output_dtype": torch.float16}, "adds bfloat16, float16 and float32 operands to float32"),
        ({"dtype": torch.float32, "output_dtype": torch.bfloat16}, "adds bfloat16, float16 and float32 operands"),
    ],
)
def test_what_no_install_can_serve(calls: list[str], changes: dict[str, Any], reason: str) -> None:
    request = make_request(**({"product": Product.WGRAD, "device_type": "cuda", "accumulate": True} | changes))
    assert reason in (apex.unsupported(request) or "")


@pytest.mark.parametrize("output_dtype", [torch.float32, *LOW], ids=str)
def test_install_and_device_are_asked_for_last(
    monkeypatch: pytest.MonkeyPatch, calls: list[str], output_dtype: torch.dtype
) -> None:
    request = make_request(Product.WGRAD, output_dtype, output_dtype=output_dtype, device_type="cuda", accumulate=True)
    for available, expected in ((False, "torch finds no CUDA device"), (True, None)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        assert apex.unsupported(request) == expected
    monkeypatch.setitem(sys.modules, EXTENSION, None)
    assert apex.unsupported(request) is None  # tried once
    apex._installed.cache_clear()
    source = "; it is built from the source of NVIDIA's apex"
    assert apex.unsupported(request) == f"{EXTENSION} is not installed{source}"
    monkeypatch.delitem(sys.modules, EXTENSION)
    install(monkeypatch, EXTENSION)
    apex._installed.cache_clear()
    reason = apex.unsupported(request) or ""
    assert reason.startswith(f"{EXTENSION} is installed but fails to import (AttributeError: ")
    assert reason.endswith(source)


def test_no_requirement_names_apex() -> None:
    """The package index has an unrelated project of that name."""
    files = [ROOT / "setup.py", ROOT / "pyproject.toml", *ROOT.glob("requirements*.txt")]
    texts = [path.read_text(encoding="utf-8") for path in files]
    assert len(files) > 2
    assert all("torch" in text for text in texts)
    assert not any(re.search(r"^\W*apex\b|[\"']apex\b", text, re.MULTILINE) for text in texts)
