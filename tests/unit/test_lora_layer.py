"""One adapted linear on one rank: values, gradients, products, dtypes, dropout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_frozen.diagnostics import Recorder
from megatron_frozen.errors import ConfigError
from megatron_frozen.layers import ColumnParallelLinear
from megatron_frozen.lora import LoraConfig, LoraLinear, adapter_delta
from megatron_frozen.testing import assert_close_to, assert_no_worse_than
from tests.unit.lora_toys import column, config_for, row, seeded, set_weight, with_adapter

IN, OUT, R = 7, 5, 3
W, A, B = seeded(OUT, IN, seed=1), seeded(R, IN, seed=2), seeded(OUT, R, seed=3)

LAYOUTS = {
    "dense": lambda: seeded(6, 3, IN, seed=4),
    "one dim": lambda: seeded(IN, seed=4),
    "transposed": lambda: seeded(3, 6, IN, seed=4).transpose(0, 1),
    "expanded": lambda: seeded(6, 1, IN, seed=4).expand(6, 3, IN),
    "hidden dim outside": lambda: seeded(6, IN, 3, seed=4).transpose(1, 2),
    "four dims": lambda: seeded(3, 2, 6, IN, seed=4).permute(2, 0, 1, 3),
    "no tokens": lambda: seeded(0, 3, IN, seed=4),
}


def _run(layer: LoraLinear, input_: Tensor, grad: Tensor) -> dict[str, Tensor | None]:
    leaf = input_.detach()  # keeps the strides, which clone would not
    leaf.requires_grad_()
    output, bias = layer(leaf)
    assert bias is None
    output.backward(grad)
    lora_A, lora_B = layer.lora_A["default"], layer.lora_B["default"]
    return {"y": output.detach(), "dx": leaf.grad, "dA": lora_A.grad, "dB": lora_B.grad}


def _reference(input_: Tensor, grad: Tensor, *, dtype: torch.dtype, scale: float = 2.0) -> dict[str, Tensor | None]:
    """Plain autograd in `dtype` on the same (rounded) numbers."""
    x, w, a, b = (t.detach().to(dtype, copy=True).contiguous() for t in (input_, W.to(input_.dtype), A, B))
    for tensor in (x, a, b):
        tensor.requires_grad_()
    y = x @ w.t() + scale * (x @ a.t()) @ b.t()
    y.backward(grad.to(dtype).contiguous())
    return {"y": y.detach(), "dx": x.grad, "dA": a.grad, "dB": b.grad}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("make", [column, row])
@pytest.mark.parametrize("path", ["base and adapter in one", "fp32 dgrad asked for", "trainable base"])
def test_values_and_gradients_are_those_of_plain_autograd(
    path: str, make: Any, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path == "fp32 dgrad asked for":
        monkeypatch.setenv("MEGATRON_TRUE_ON_POLICY_LINEAR_DGRAD_FP32", "1")
    input_ = LAYOUTS[layout]()
    grad = seeded(*input_.shape[:-1], OUT, seed=5)
    layer = with_adapter(make(W), A, B)
    layer.weight.requires_grad = path == "trainable base"
    actual = _run(layer, input_, grad)
    assert_close_to(actual, _reference(input_, grad, dtype=torch.float64), tolerance=1e-6)
    expected = grad.reshape(-1, OUT).t() @ input_.reshape(-1, IN) if path == "trainable base" else None
    assert_close_to({"dW": layer.weight.grad}, {"dW": expected}, tolerance=1e-6)


@pytest.mark.parametrize("is_trainable", [False, True])
def test_the_output_may_be_written_into(is_trainable: bool) -> None:  # noqa: FBT001
    layer = with_adapter(column(W), A, B)
    layer.weight.requires_grad = is_trainable
    input_ = seeded(4, 2, IN, seed=4).requires_grad_()
    output, _ = layer(input_)
    output.mul_(2)
    output.sum().backward()
    expected = 2 * (W + 2 * B @ A).sum(0).expand(4, 2, IN)
    torch.testing.assert_close(input_.grad, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("grad_layout", ["dense", "transposed", "expanded"])
def test_every_product_is_one_2d_gemm(layout: str, grad_layout: str) -> None:
    input_ = LAYOUTS[layout]()
    lead = input_.shape[:-1]
    grad = seeded(*lead, OUT, seed=5)
    if grad_layout == "transposed":
        grad = seeded(*reversed(lead), OUT, seed=5).permute(*reversed(range(len(lead))), len(lead))
    elif grad_layout == "expanded":
        grad = seeded(OUT, seed=5).expand(*lead, OUT)
    layer = with_adapter(column(W), A, B)
    with Recorder() as seen:
        actual = _run(layer, input_, grad)
    assert seen.count("aten.bmm") == 0
    assert (seen.count("aten.mm"), seen.count("aten.addmm_")) == (
        6,
        2,
    )  # Y, h, dX, dh, dA, dB; h B^T and dh A are added
    assert_close_to(actual, _reference(input_, grad, dtype=torch.float64), tolerance=1e-6)


@pytest.mark.parametrize("rows_first", [True, False])
def test_nothing_of_the_size_of_x_or_dy_is_copied(rows_first: bool) -> None:  # noqa: FBT001
    wide, tokens = 64, (32, 8)
    input_ = seeded(*tokens, wide, seed=1) if rows_first else seeded(*tokens[::-1], wide, seed=1).transpose(0, 1)
    grad = seeded(*tokens, wide, seed=2) if rows_first else seeded(*tokens[::-1], wide, seed=2).transpose(0, 1)
    layer = with_adapter(column(seeded(wide, wide, seed=3)), seeded(2, wide, seed=4), seeded(wide, 2, seed=5))
    leaf = input_.detach().requires_grad_()
    with Recorder() as seen:
        layer(leaf)[0].backward(grad)
    assert seen.copies(min_bytes=32 * 8 * wide * 4) == []
    assert leaf.grad is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_activations_with_fp32_factors(dtype: torch.dtype) -> None:
    input_, grad = seeded(16, 2, IN, seed=4, dtype=dtype), seeded(16, 2, OUT, seed=5, dtype=dtype)
    actual = _run(with_adapter(column(W.to(dtype)), A, B), input_, grad)
    dtypes = {key: tensor.dtype for key, tensor in actual.items() if tensor is not None}
    assert dtypes == {"y": dtype, "dx": dtype, "dA": torch.float32, "dB": torch.float32}
    plain = _reference(input_, grad, dtype=dtype)
    assert_no_worse_than(actual, plain, _reference(input_, grad, dtype=torch.float64))


def test_under_autocast_the_products_run_in_its_dtype() -> None:
    input_, grad = seeded(4, 2, IN, seed=4), seeded(4, 2, OUT, seed=5, dtype=torch.bfloat16)
    layer = with_adapter(column(W), A, B)
    leaf = input_.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, _ = layer(leaf)
    output.backward(grad)
    assert output.dtype == torch.bfloat16
    assert leaf.grad is not None
    assert leaf.grad.dtype == layer.lora_A["default"].grad.dtype == torch.float32
    reference = _reference(input_, grad, dtype=torch.float64)
    actual = {
        "y": output.detach(),
        "dx": leaf.grad,
        "dA": layer.lora_A["default"].grad,
        "dB": layer.lora_B["default"].grad,
    }
    assert_close_to(actual, reference, tolerance=2e-2)


def test_factors_may_take_the_base_dtype() -> None:
    layer = with_adapter(column(W.bfloat16()), A, B, dtype=None)
    assert layer.lora_A["default"].dtype == layer.lora_B["default"].dtype == torch.bfloat16


@pytest.mark.parametrize("frozen", ["lora_A", "lora_B", "both"])
def test_a_frozen_factor_gets_no_gradient_and_saves_no_activation(frozen: str) -> None:
    layer = with_adapter(column(W), A, B)
    for name in ("lora_A", "lora_B") if frozen == "both" else (frozen,):
        getattr(layer, name)["default"].requires_grad_(requires_grad=False)
    input_, grad = seeded(4, 2, IN, seed=4), seeded(4, 2, OUT, seed=5)
    saved: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(tuple(t.shape)) or t, lambda t: t):
        leaf = input_.clone().requires_grad_()
        output, _ = layer(leaf)
    output.backward(grad)
    reference = _reference(input_, grad, dtype=torch.float64)
    for name, key in (("lora_A", "dA"), ("lora_B", "dB")):
        expected = None if frozen in (name, "both") else reference[key]
        assert_close_to({key: getattr(layer, name)["default"].grad}, {key: expected}, tolerance=1e-6)
    assert_close_to({"dx": leaf.grad}, {"dx": reference["dx"]}, tolerance=1e-6)
    assert ((4, 2, IN) in saved) == (frozen == "lora_B")


def test_an_input_that_needs_no_gradient_costs_none() -> None:
    layer = with_adapter(column(W), A, B)
    with Recorder() as seen:
        layer(seeded(4, 2, IN, seed=4))[0].sum().backward()
    assert (seen.count("aten.mm"), seen.count("aten.addmm_")) == (5, 1)  # Y, h, dh, dA, dB; h B^T is added


def test_dropout_zeroes_entries_of_the_adapter_input_only() -> None:
    p, input_ = 0.25, torch.ones(50, 8, IN)
    layer = with_adapter(column(W), torch.eye(IN), seeded(OUT, IN, seed=3), dropout=p, alpha=IN)
    torch.manual_seed(3)
    output, _ = layer(input_)
    torch.manual_seed(3)
    keep = torch.empty(50, 8, IN, dtype=torch.bool).bernoulli_(1 - p)
    assert keep.float().mean().item() == pytest.approx(1 - p, abs=0.03)
    expected = input_ @ W.t() + (input_ * keep / (1 - p)) @ layer.lora_B["default"].t()
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
    assert not torch.equal(layer(input_)[0], output)  # another call, another mask
    layer.eval()
    torch.testing.assert_close(layer(input_)[0], input_ @ (W + layer.lora_B["default"]).t(), atol=1e-5, rtol=1e-5)


def test_bias_stays_the_business_of_the_base() -> None:
    for skip in (False, True):
        base = column(W, bias=True, skip_bias_add=skip)
        assert base.bias is not None
        base.bias.data.fill_(7)
        output, bias = with_adapter(base, A, B)(seeded(4, IN, seed=4))
        expected = _reference(seeded(4, IN, seed=4), seeded(4, OUT, seed=5), dtype=torch.float64)["y"]
        assert expected is not None
        torch.testing.assert_close(output.detach().double(), expected + (0 if skip else 7), atol=1e-5, rtol=1e-5)
        assert (bias is base.bias) == skip


class _Clamped(ColumnParallelLinear):
    def multiply(self, input_parallel: Tensor) -> Tensor:
        return super().multiply(input_parallel).clamp(max=0.5)


def test_a_base_with_a_product_of_its_own_keeps_it() -> None:
    base = _Clamped(IN, OUT, config=config_for(), init_method=torch.nn.init.zeros_, bias=False)
    set_weight(base, W)
    layer, input_ = with_adapter(base, A, B), seeded(4, 2, IN, seed=4)
    expected = (input_ @ W.t()).clamp(max=0.5) + 2 * input_ @ A.t() @ B.t()
    torch.testing.assert_close(layer(input_)[0], expected, atol=1e-5, rtol=1e-5)


def test_the_wrapper_shows_the_base_and_its_adapters() -> None:
    base = column(W)
    layer = with_adapter(base, A, B)
    assert layer.weight is base.weight
    assert layer.bias is None
    assert "adapters=['default'], active_adapter='default'" in repr(layer)


def test_delta_is_the_product_in_fp32_for_one_named_adapter() -> None:
    layer = with_adapter(column(W.bfloat16()), A, B)
    layer.add_adapter("other", LoraConfig(r=R, alpha=R), full_A=A, full_B=-B)
    torch.testing.assert_close(adapter_delta(layer), (2 * B.double() @ A.double()).float())
    torch.testing.assert_close(adapter_delta(layer, adapter_name="other"), -(B.double() @ A.double()).float())
    with pytest.raises(ConfigError, match="adapter 'third' is not on this layer, which holds default, other"):
        adapter_delta(layer, adapter_name="third")


def test_a_merge_with_the_delta_rounds_every_entry_right() -> None:
    """Case 37: fp32 product and sum, one cast; an all-bf16 merge is wrong in some 800 of 4096 entries.

    The factors have so few digits that their product is exact, or its last bit would differ from CPU to CPU.
    """
    torch.manual_seed(0)
    weight = (0.05 * torch.randn(64, 64)).bfloat16()
    full_A, full_B = (102 * torch.randn(16, 64)).round() / 2**10, (82 * torch.randn(64, 16)).round() / 2**12
    merged = (weight.float() + adapter_delta(with_adapter(column(weight), full_A, full_B))).bfloat16()
    exact = (weight.double() + 2 * full_B.double() @ full_A.double()).bfloat16()
    assert torch.equal(merged, exact)
    all_bf16 = weight + 2 * (full_B.bfloat16() @ full_A.bfloat16())
    assert (all_bf16 != exact).sum() > 500
