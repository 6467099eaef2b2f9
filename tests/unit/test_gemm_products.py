"""The four products on one rank: bit-equal to torch where the arithmetic is the same, outside autocast."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from megatron_frozen import gemm
from megatron_frozen.gemm.products import widened_product
from megatron_frozen.gemm.request import Product
from megatron_frozen.testing import relative_error

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
TOKENS, IN, OUT = 33, 7, 5


def operands(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    shapes = [(TOKENS, IN), (OUT, IN), (OUT,), (TOKENS, OUT)]
    x, weight, bias, grad = (torch.randn(*shape).to(dtype) for shape in shapes)
    return x, weight, bias, grad


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_are_bit_equal_to_torchs(dtype: torch.dtype) -> None:
    x, weight, bias, grad = operands(dtype)
    assert torch.equal(gemm.forward(x, weight), F.linear(x, weight))
    assert torch.equal(gemm.forward(x, weight, bias), F.linear(x, weight, bias))
    assert torch.equal(gemm.dgrad(grad, weight), grad @ weight)
    assert torch.equal(gemm.wgrad(grad, x), grad.t() @ x)
    assert torch.equal(gemm.bias_gradient(grad, repeats=1), grad.sum(0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fp32_dgrad_is_the_product_of_upcast_operands(dtype: torch.dtype) -> None:
    _, weight, _, grad = operands(dtype)
    product = gemm.dgrad(grad, weight, in_fp32=True)
    assert product.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(product, grad.to(product.dtype) @ weight.to(product.dtype))


@pytest.mark.parametrize("in_fp32", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dgrad_writes_into_rows_of_a_buffer(dtype: torch.dtype, *, in_fp32: bool) -> None:
    _, weight, _, grad = operands(dtype)
    expected = gemm.dgrad(grad, weight, in_fp32=in_fp32)
    buffer = torch.full((TOKENS + 2, IN), torch.nan, dtype=expected.dtype)
    with torch.autocast("cpu", torch.bfloat16):
        product = gemm.dgrad(grad, weight, in_fp32=in_fp32, out=buffer[1:-1])
    assert product.data_ptr() == buffer[1:].data_ptr()
    assert torch.equal(buffer[1:-1], expected)
    assert buffer[[0, -1]].isnan().all()


def test_products_keep_the_dtype_of_their_operands_under_autocast() -> None:
    """A backward may run inside the user's autocast, which must not change what is saved in fp32."""
    x, weight, bias, grad = operands(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        products = {
            "y": gemm.forward(x, weight),
            "y with bias": gemm.forward(x, weight, bias),
            "dx": gemm.dgrad(grad, weight),
            "dw": gemm.wgrad(grad, x),
        }
    assert {name: product.dtype for name, product in products.items()} == dict.fromkeys(products, torch.float32)
    assert torch.equal(products["y"], F.linear(x, weight))
    assert torch.equal(products["dx"], grad @ weight)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_add_up_in_place(dtype: torch.dtype) -> None:
    x, weight, bias, _ = operands(dtype)
    total = F.linear(x, weight, bias)
    expected, place = torch.addmm(total, x, weight.t()), total.data_ptr()
    with torch.autocast("cpu", torch.bfloat16):
        gemm.add_product_(total, x, weight.t())
    assert (total.dtype, total.data_ptr()) == (dtype, place)
    assert torch.equal(total, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bias_gradient_counts_each_row_as_often_as_it_stands(dtype: torch.dtype) -> None:
    grad = torch.full((300, OUT), 1.0).to(dtype)
    # 300 ones and 3 times 300 ones are 300 and 900 in every dtype here, if the sum is not made in bf16 (256 + 1 = 256).
    for repeats in (1, 3):
        db = gemm.bias_gradient(grad, repeats=repeats)
        assert db.dtype == dtype
        assert torch.equal(db, torch.full((OUT,), 300.0 * repeats).to(dtype))


def test_no_tokens_and_no_features() -> None:
    weight, bias = torch.randn(OUT, IN), torch.randn(OUT)
    assert gemm.forward(torch.empty(0, IN), weight, bias).shape == (0, OUT)
    assert torch.equal(gemm.wgrad(torch.empty(0, OUT), torch.empty(0, IN)), torch.zeros(OUT, IN))
    assert torch.equal(gemm.bias_gradient(torch.empty(0, OUT), repeats=1), torch.zeros(OUT))
    assert torch.equal(gemm.forward(torch.empty(2, 0), torch.empty(OUT, 0), bias), bias.expand(2, OUT))


def test_transposed_operands_give_the_same_product() -> None:
    x, weight, _, grad = operands(torch.float32)
    columns = [tensor.t().contiguous().t() for tensor in (x, weight, grad)]
    assert relative_error(gemm.forward(columns[0], columns[1]), x.double() @ weight.double().t()) < 1e-6
    assert relative_error(gemm.dgrad(columns[2], columns[1]), grad.double() @ weight.double()) < 1e-6
    assert relative_error(gemm.wgrad(columns[2], columns[0]), grad.double().t() @ x.double()) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_compiled_product_into_fp32_is_the_eager_one(dtype: torch.dtype) -> None:
    """As an operator: upcast operands would be copies, and operands' dtype a rounding."""
    x, weight, bias, grad = operands(dtype)

    def products() -> list[torch.Tensor]:
        return [
            gemm.forward(x, weight, bias, dtype=torch.float32),
            gemm.dgrad(grad, weight, in_fp32=True),
            gemm.wgrad(grad, x, dtype=torch.float32),
        ]

    torch._dynamo.reset()
    compiled = torch.compile(products, fullgraph=True, backend="aot_eager")()
    torch._dynamo.reset()
    for ours, eager in zip(compiled, products(), strict=True):
        assert ours.dtype == torch.float32
        assert torch.equal(ours, eager)
    torch.library.opcheck(widened_product, (grad, x, None, Product.WGRAD.value, torch.float32))
