"""The CPU backends against fp64 over shapes, strides and modes, and how one is chosen."""

from __future__ import annotations

import random
from functools import partial
from types import ModuleType

import pytest
import torch
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from megatron_frozen import gemm
from megatron_frozen.diagnostics import Recorder
from megatron_frozen.errors import ConfigError, LayoutError
from megatron_frozen.gemm import brgemm, mkl, reference, select, torch_cuda
from megatron_frozen.gemm.request import Product, Request, oriented, result_shape
from megatron_frozen.testing import relative_error

SIZES = [1, 2, 3, 7, 16, 33, 64, 65, 130, 600, 1100]
CASES = [
    (brgemm, torch.bfloat16),
    (mkl, torch.bfloat16),
    (mkl, torch.float16),
    (reference, torch.bfloat16),
    (reference, torch.float16),
    (reference, torch.float64),
]


def request_for(
    product: Product = Product.WGRAD,
    *,
    dtype: torch.dtype = torch.bfloat16,
    accumulate: bool = False,
    with_bias: bool = False,
    output_dtype: torch.dtype = torch.float32,
) -> Request:
    """Return a request on the CPU."""
    return Request(
        product=product,
        device_type="cpu",
        operand_dtype=dtype,
        output_dtype=output_dtype,
        accumulate=accumulate,
        with_bias=with_bias,
    )


def operand(rng: random.Random, rows: int, columns: int) -> torch.Tensor:
    """Return a random matrix in one of five layouts."""
    return rng.choice(
        [
            lambda: torch.randn(rows, columns),
            lambda: torch.randn(columns, rows).t(),
            lambda: torch.randn(rows, columns + 3)[:, 1 : columns + 1],
            lambda: torch.randn(2 * rows, 2 * columns)[::2, ::2],
            lambda: torch.randn(1, columns).expand(rows, columns),
        ]
    )()


def output(rng: random.Random, rows: int, columns: int) -> torch.Tensor:
    """Return a buffer of NaN in one of four layouts."""
    nan = float("nan")
    return rng.choice(
        [
            lambda: torch.full((rows, columns), nan),
            lambda: torch.full((columns, rows), nan).t(),
            lambda: torch.full((rows, columns + 5), nan)[:, 2 : 2 + columns],
            lambda: torch.full((2 * rows, 2 * columns), nan)[::2, ::2],
        ]
    )()


@pytest.mark.parametrize(("backend", "dtype"), CASES, ids=lambda value: getattr(value, "NAME", str(value)))
def test_any_layout_shape_and_mode(backend: ModuleType, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Overwriting clears NaN, accumulating adds, neighbours in the buffer's storage stay, operands stay."""
    rng = random.Random(0)
    torch.manual_seed(0)
    wide = torch.promote_types(dtype, torch.float32)
    if (reason := backend.unsupported(request_for(dtype=dtype, output_dtype=wide))) is not None:
        pytest.skip(reason)
    for _ in range(60):
        monkeypatch.setattr(torch, "get_num_threads", lambda: rng.choice([1, 2, 3]))
        T, I, O = (rng.choice(SIZES) for _ in range(3))  # noqa: E741
        product, accumulate, with_bias = rng.choice(list(Product)), rng.random() < 0.5, rng.random() < 0.5
        request = request_for(product, dtype=dtype, accumulate=accumulate, with_bias=with_bias, output_dtype=wide)
        shapes = {
            Product.FORWARD: ((T, I), (O, I)),
            Product.DGRAD: ((T, O), (O, I)),
            Product.WGRAD: ((T, O), (T, I)),
        }[product]
        left, right = (operand(rng, *shape).to(dtype) for shape in shapes)
        kept = left.clone(), right.clone()
        out = output(rng, *result_shape(product, left, right))
        out = out.to(wide) if out.is_contiguous() else out if wide == torch.float32 else out.contiguous().to(wide)
        if accumulate:
            out.normal_()
        bias = torch.randn(O).to(dtype)
        A, B = oriented(product, left, right)
        expected = A.double() @ B.double() + (out.double() if accumulate else 0)
        scale = float((A.double().abs() @ B.double().abs()).max()) + 10
        if with_bias and product is Product.FORWARD:
            expected = expected + bias.double()
        db = backend.run(request, left, right, out=out, bias=bias if product is Product.FORWARD else None)
        assert float((out - expected).abs().max()) / scale < 3e-6, (request, T, I, O)
        if with_bias and product is Product.WGRAD:
            torch.testing.assert_close(db, left.double().sum(0).to(wide), rtol=1e-5, atol=1e-3)
        else:
            assert db is None
        assert torch.equal(left, kept[0])
        assert torch.equal(right, kept[1])


@pytest.mark.parametrize("backend", [brgemm, mkl], ids=lambda backend: backend.NAME)
@pytest.mark.parametrize("product", Product)
def test_no_fp32_copy_of_an_operand_and_none_of_the_buffer(backend: ModuleType, product: Product) -> None:
    """Nothing that torch writes in a fused write is fp32, or as large as an operand."""
    T, I, O = 2048, 512, 768  # noqa: E741
    left = torch.randn(T, I if product is Product.FORWARD else O).bfloat16()
    right = torch.randn(T if product is Product.WGRAD else O, I).bfloat16()
    out = torch.zeros(result_shape(product, left, right))
    request = request_for(product, accumulate=True)
    if (reason := backend.unsupported(request)) is not None:
        pytest.skip(reason)
    with Recorder() as seen:
        backend.run(request, left, right, out=out)
    largest = max((copy.written_bytes for copy in seen.copies()), default=0)
    assert largest <= max(left.nbytes, right.nbytes) / 2
    assert not [op for op in seen.operations if op.name in ("aten._to_copy", "aten.mm", "aten.addmm_")]


def test_many_micro_batches_stay_exact() -> None:
    """64 accumulated micro-batches against fp64: below 1e-6 relative, where bf16 products err by 1e-3."""
    torch.manual_seed(0)
    buffer, exact, rounded = torch.zeros(128, 96), torch.zeros(128, 96).double(), torch.zeros(128, 96)
    for _ in range(64):
        grad, x = torch.randn(256, 128).bfloat16(), torch.randn(256, 96).bfloat16()
        select.multiply(request_for(accumulate=True), grad, x, out=buffer)
        exact += grad.double().t() @ x.double()
        rounded += grad.t() @ x
    assert float((buffer - exact).norm() / exact.norm()) < 1e-6
    assert float((rounded - exact).norm() / exact.norm()) > 5e-4


def test_the_first_that_can_is_chosen() -> None:
    expected = next(b for b in (brgemm, mkl, reference) if b.unsupported(request_for()) is None)
    assert select.choose(request_for()).NAME == expected.NAME
    assert select.choose(request_for(dtype=torch.float64, output_dtype=torch.float64)).NAME == "reference"
    assert select.choose(request_for(dtype=torch.float16)).NAME in ("mkl", "reference")


def test_a_wish_is_heeded_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert select.choose(request_for(), wish="reference").NAME == "reference"
    with pytest.raises(ConfigError, match="the gemm backend 'mlk' is unknown, did you mean 'mkl'"):
        select.choose(request_for(), wish="mlk")
    with pytest.raises(ConfigError, match=r"'torch_cuda' cannot serve wgrad on cpu.*CUDA only; leave the choice open"):
        select.choose(request_for(), wish="torch_cuda")
    monkeypatch.setenv("MEGATRON_FROZEN_GEMM", "reference")
    assert select.choose(request_for()).NAME == "reference"
    monkeypatch.setenv("MEGATRON_FROZEN_GEMM", "apex")
    with pytest.raises(ConfigError, match="the gemm backend 'apex' cannot serve"):
        select.choose(request_for())


def test_a_wish_of_the_environment_is_heeded_for_small_products_too(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    monkeypatch.setattr(mkl, "unsupported", lambda request: None)
    monkeypatch.setattr(mkl, "run", lambda *args, **keywords: ran.append(args))
    operands = torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(2, 4, dtype=torch.bfloat16)
    select.multiply(request_for(accumulate=True), *operands, out=torch.zeros(3, 4))
    assert not ran
    monkeypatch.setenv("MEGATRON_FROZEN_GEMM", "mkl")
    select._chosen.cache_clear()
    select.multiply(request_for(accumulate=True), *operands, out=torch.zeros(3, 4))
    select._chosen.cache_clear()
    assert len(ran) == 1


def test_tensors_without_numbers_reach_no_kernel_that_takes_addresses() -> None:
    with FakeTensorMode():
        operands = torch.ones(512, 300, dtype=torch.bfloat16), torch.ones(512, 256, dtype=torch.bfloat16)
        product, _ = select.multiply(request_for(), *operands)
    assert (type(product), tuple(product.shape), product.dtype) == (FakeTensor, (300, 256), torch.float32)


def test_what_no_backend_serves() -> None:
    with pytest.raises(ConfigError, match=r"no gemm backend serves .*; give floating-point tensors"):
        select.choose(request_for(dtype=torch.int32, output_dtype=torch.int64))


@pytest.mark.parametrize("accumulate", [False, True])
def test_no_tokens(*, accumulate: bool) -> None:
    out = torch.full((5, 7), 3.0)
    _, db = select.multiply(
        request_for(accumulate=accumulate, with_bias=True),
        torch.randn(0, 5).bfloat16(),
        torch.randn(0, 7).bfloat16(),
        out=out,
    )
    assert torch.equal(out, torch.full((5, 7), 3.0 if accumulate else 0.0))
    assert db is not None
    assert torch.equal(db, torch.zeros(5))
    y, _ = select.multiply(
        request_for(Product.FORWARD, with_bias=True),
        torch.randn(4, 0).bfloat16(),
        torch.randn(5, 0).bfloat16(),
        bias=torch.arange(5.0).bfloat16(),
    )
    assert torch.equal(y, torch.arange(5.0).expand(4, 5))


def test_operands_that_do_not_fit() -> None:
    grad, x = torch.randn(6, 5).bfloat16(), torch.randn(6, 7).bfloat16()
    with pytest.raises(LayoutError, match="give one dtype, one device and sizes that fit"):
        select.multiply(request_for(), grad, x[:5])
    with pytest.raises(LayoutError, match="give one dtype, one device and sizes that fit"):
        select.multiply(request_for(), grad.float(), x)
    with pytest.raises(LayoutError, match=r"got a bias \[3\]; give one of shape \[4\]"):
        select.multiply(
            request_for(Product.FORWARD, with_bias=True), x, torch.randn(4, 7).bfloat16(), bias=torch.zeros(3)
        )
    with pytest.raises(LayoutError, match=r"got an output \[7, 5\] torch.float32 on cpu; give \[5, 7\]"):
        select.multiply(request_for(), grad, x, out=torch.zeros(7, 5))


def test_mkl_refuses_sizes_beyond_its_integers() -> None:
    huge, weight, out = (
        torch.empty_strided(size, stride, dtype=torch.bfloat16, device="meta")  # it refuses before it reads
        for size, stride in (((2, 3), (2**31, 1)), ((3, 4), (4, 1)), ((2, 4), (4, 1)))
    )
    with pytest.raises(LayoutError, match="its integers' limit; cut the tokens into parts"):
        mkl.run(request_for(Product.DGRAD), huge, weight, out=out)


def test_reasons() -> None:
    on_gpu = Request(
        product=Product.WGRAD, device_type="cuda", operand_dtype=torch.bfloat16, output_dtype=torch.float32
    )
    assert brgemm.unsupported(on_gpu) == "the kernel runs on the CPU"
    assert mkl.unsupported(on_gpu) == "MKL runs on the CPU"
    assert torch_cuda.unsupported(request_for()) == "torch has products with out_dtype on CUDA only"
    assert "float32 only" in (brgemm.unsupported(request_for(dtype=torch.float32)) or "")
    assert "float32 only" in (mkl.unsupported(request_for(dtype=torch.float32)) or "")


def test_old_torch_lacks_the_native_products(monkeypatch: pytest.MonkeyPatch) -> None:
    def reason(*, accumulate: bool) -> str | None:
        return torch_cuda.unsupported(
            Request(
                product=Product.WGRAD,
                device_type="cuda",
                operand_dtype=torch.bfloat16,
                output_dtype=torch.float32,
                accumulate=accumulate,
            )
        )

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for version, overwrites, accumulates in (
        ("2.7.1", False, False),
        ("2.9.1", True, False),
        ("2.10.0+cu128", True, True),
    ):
        monkeypatch.setattr(torch, "__version__", version)
        assert (reason(accumulate=False) is None, reason(accumulate=True) is None) == (overwrites, accumulates)


def test_native_products_keep_their_signature() -> None:
    """mm and addmm with out_dtype exist, have no CPU kernel, and take ``out`` as its own addend."""
    A, B, out = torch.randn(3, 4).bfloat16(), torch.randn(4, 5).bfloat16(), torch.zeros(3, 5)
    with pytest.raises(NotImplementedError):
        torch.mm(A, B, out_dtype=torch.float32, out=out)
    with pytest.raises(NotImplementedError):
        torch.addmm(out, A, B, out_dtype=torch.float32, out=out)


def test_the_table_gives_every_backend_of_the_device_a_line_per_product() -> None:
    rows = select.table("cpu")
    assert {row[0] for row in rows} == {"brgemm", "mkl", "reference"}
    assert len(rows) == 3 * 4
    assert all(reason == "" for name, _, reason in rows if name == "reference")
    for name, _, reason in select.table("cuda"):
        assert torch.cuda.is_available() or bool(reason) == (name != "reference")


def test_a_recorded_graph_holds_the_product_that_a_kernel_would_make_unseen() -> None:
    left, right = torch.randn(64, 300).bfloat16(), torch.randn(64, 200).bfloat16()
    graph = make_fx(partial(gemm.wgrad, dtype=torch.float32), tracing_mode="real")(left, right)
    again = torch.randn(64, 300).bfloat16(), torch.randn(64, 200).bfloat16()
    assert relative_error(graph(*again), again[0].double().t() @ again[1].double()) < 1e-6


@pytest.mark.skipif(brgemm.unsupported(request_for()) is not None, reason=str(brgemm.unsupported(request_for())))
def test_a_buffer_whose_rows_lie_64_mib_apart() -> None:
    """The block kernel ended the process there."""
    torch.manual_seed(0)
    left, right = torch.randn(300, 2).bfloat16(), torch.randn(300, 100).bfloat16()
    out = torch.zeros(2**24 + 100).as_strided((2, 100), (2**24, 1))
    brgemm.run(request_for(Product.WGRAD, accumulate=True), left, right, out=out)
    assert relative_error(out, left.double().t() @ right.double()) < 1e-6
