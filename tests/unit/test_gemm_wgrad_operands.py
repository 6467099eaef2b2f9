"""Weight gradients of operands that repeat their rows: fewer rows to multiply, the same values, in every dtype."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from megatron_frozen import gemm
from megatron_frozen.diagnostics import Recorder
from megatron_frozen.errors import LayoutError
from megatron_frozen.functional import linear_with_grad_accumulation_and_async_allreduce
from megatron_frozen.gemm.wgrad_operands import wgrad_operands
from megatron_frozen.testing import assert_no_worse_than, relative_error

S, B, OUT, IN = 6, 8, 5, 7
ALONE = (False, False, False)  # no fusion, no all-reduce, no sequence parallelism
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
ROUNDING = {BF16: 2.0**-8, FP32: 5e-7, FP64: 1e-15}
# Of dY and X: the dims that each has distinct rows along (the others have stride 0), and the order they lie in.
LAYOUTS = {
    "dY over the batch": ((S, 1), (0, 1)),
    "dY over the sequence": ((1, B), (0, 1)),
    "dY over all": ((1, 1), (0, 1)),
    "dY over the batch, X batch first": ((S, 1), (1, 0)),
}


def operands(layout: str, dtype: torch.dtype, *, in_features: int = IN) -> tuple[torch.Tensor, torch.Tensor]:
    distinct, order = LAYOUTS[layout]
    torch.manual_seed(0)
    grad = torch.randn(*distinct, OUT).to(dtype).expand(S, B, OUT)
    x = torch.randn(*((S, B)[dim] for dim in order), in_features).to(dtype).permute(*order, 2)
    return grad, x


def exact(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return grad.double().reshape(-1, grad.shape[-1]).t() @ x.double().reshape(-1, x.shape[-1])


@pytest.mark.parametrize("widen", [1, 40])
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize(
    ("dtype", "result"),
    [(BF16, BF16), (BF16, FP32), (BF16, FP64), (FP32, FP32), (FP32, FP64), (FP64, FP64)],
    ids=str,
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_gradient_is_as_near_fp64_as_with_rows_written_out(
    layout: str, dtype: torch.dtype, result: torch.dtype, *, swapped: bool, widen: int
) -> None:
    """At a width of 280 bf16 rows are summed by the compiled kernel, where there is one."""
    pair = operands(layout, dtype, in_features=widen * IN)
    grad, x = reversed(pair) if swapped else pair
    ours = gemm.wgrad(grad, x, dtype=result)
    assert ours.dtype == result
    assert relative_error(ours, exact(grad, x)) < ROUNDING[result]
    written_out = gemm.wgrad(grad.contiguous(), x.contiguous(), dtype=result)
    assert_no_worse_than({"dw": ours}, {"dw": written_out}, {"dw": exact(grad, x)})


@pytest.mark.parametrize(
    ("dtype", "result", "num_parts"),
    [(BF16, BF16, 2), (BF16, FP32, 3), (BF16, FP64, 7), (FP32, FP32, 1), (FP32, FP64, 3), (FP64, FP64, 1)],
    ids=str,
)
def test_rows_are_distinct_rows_times_the_parts_of_a_sum(
    dtype: torch.dtype, result: torch.dtype, num_parts: int
) -> None:
    grad, x = operands("dY over the batch", dtype)
    left, right = wgrad_operands(grad, x, dtype=result)
    assert (left.shape, right.shape) == ((S * num_parts, OUT), (S * num_parts, IN))
    assert left.dtype == right.dtype == dtype
    right, left = wgrad_operands(x, grad, dtype=result)
    assert (left.shape, right.shape) == ((S * num_parts, OUT), (S * num_parts, IN))


def test_a_narrower_result_does_not_narrow_the_sum() -> None:
    grad, x = operands("dY over the batch", FP64)
    _, right = wgrad_operands(grad, x, dtype=FP32)
    assert torch.equal(right, x.sum(1))


@pytest.mark.parametrize(
    ("dtype", "result", "fewest"), [(BF16, BF16, 3), (BF16, FP32, 4), (FP32, FP32, 2), (FP64, FP64, 2)], ids=str
)
def test_rows_are_summed_only_where_that_makes_them_fewer(dtype: torch.dtype, result: torch.dtype, fewest: int) -> None:
    for repeats in range(1, 6):
        grad, x = torch.randn(S, 1, OUT).to(dtype).expand(S, repeats, OUT), torch.randn(S, repeats, IN).to(dtype)
        left, _ = wgrad_operands(grad, x, dtype=result)
        assert (left.shape[0] < S * repeats) == (repeats >= fewest)


def test_two_parts_hold_a_sum_that_one_does_not() -> None:
    """2055 is 2048 in bf16: of one part, less 2048, nothing would be left."""
    x = torch.ones(2, 8, 1, dtype=BF16)
    x[0, 0], x[1] = 2048, 256
    grad = torch.tensor([1.0, -1.0]).to(BF16).view(2, 1, 1).expand(2, 8, 1)
    assert gemm.wgrad(grad, x).item() == 7


def test_an_fp64_result_is_summed_in_fp64() -> None:
    """1 beside 2^30 has no place in fp32, as the kernel sums."""
    x = torch.ones(1, 8, 4096, dtype=BF16)
    x[:, 0] = 2.0**30
    assert gemm.wgrad(torch.ones(1, 1, 1, dtype=BF16).expand(1, 8, 1), x, dtype=FP64).eq(2.0**30 + 7).all()


@pytest.mark.parametrize("lead", [(S, B + 1), (B, S), (S * B,), (S, B, 1)], ids=str)
def test_other_leading_dims_are_refused(lead: tuple[int, ...]) -> None:
    """Summed away, a dim of another size gave a gradient."""
    grad = torch.randn(S, 1, OUT).expand(S, B, OUT)
    with pytest.raises(LayoutError, match="give both operands the same leading dims"):
        gemm.wgrad(grad, torch.randn(*lead, IN))


def test_an_fp32_sum_is_not_copied() -> None:
    grad, x = operands("dY over the batch", FP32)
    with Recorder() as seen:
        gemm.wgrad(grad, x)
    assert seen.copied_bytes() == 0


def test_both_operands_repeat_rows() -> None:
    grad, x = torch.randn(S, 1, 1, OUT).expand(S, B, 3, OUT), torch.randn(S, 1, 3, IN).expand(S, B, 3, IN)
    assert relative_error(gemm.wgrad(grad, x), exact(grad, x)) < 5e-7
    few, many = torch.randn(4, 64, 1, OUT).to(BF16).expand(4, 64, 3, OUT), torch.randn(4, 1, 3, IN).to(BF16)
    left, _ = wgrad_operands(few, many.expand(4, 64, 3, IN), dtype=BF16)
    assert left.shape[0] == 3 * 4 * 3  # of 768: X repeats more rows than dY
    other = torch.randn(1, B, 3, IN).expand(S, B, 3, IN)
    assert relative_error(gemm.wgrad(grad, other), exact(grad, other)) < 5e-7


def test_rows_that_both_operands_repeat_are_counted_and_not_added() -> None:
    """torch's sum of 65536 equal rows was 5e-4 off."""
    torch.manual_seed(0)
    grad, x = torch.randn(17).expand(256, 256, 2, 17), torch.randn(2, 64).expand(256, 256, 2, 64)
    assert relative_error(gemm.wgrad(grad, x), exact(grad, x)) < 1e-6


def test_sums_that_cancel_but_for_one_row() -> None:
    """Of 4096 rows 16 digits do not hold the last: the gradient was 2."""
    x = torch.full((2, 4096, 1), 32.0).to(BF16)
    x[:, :513] = 33
    x[0, 600] = 33
    grad = torch.tensor([1.0, -1.0]).to(BF16).view(2, 1, 1).expand(2, 4096, 1)
    assert gemm.wgrad(grad, x).item() == 1


@pytest.mark.parametrize("repeats", [8, 16, 17, 64, 512])
def test_two_answers_to_one_prompt(repeats: int) -> None:
    """The rows of a positive and of a negative answer, all but the last alike."""
    torch.manual_seed(0)
    x = (torch.randn(1, repeats, 64) + 10).expand(2, -1, -1).clone().to(BF16)
    x[1, -1] = torch.randn(64).to(BF16)
    grad = torch.randn(1, 1, 32).to(BF16) * torch.tensor([1.0, -1.0]).to(BF16).view(2, 1, 1)
    grad = grad.expand(2, repeats, 32)
    assert_no_worse_than(
        {"dw": gemm.wgrad(grad, x)}, {"dw": gemm.wgrad(grad.contiguous(), x)}, {"dw": exact(grad, x)}, factor=1.25
    )


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_under_any_autocast(dtype: torch.dtype) -> None:
    """Under that of fp16, CUDA's default, torch refuses to put bf16 matrices beside each other."""
    grad, x = operands("dY over the batch", BF16)
    expected = gemm.wgrad(grad, x)
    with torch.autocast("cpu", dtype):
        assert torch.equal(gemm.wgrad(grad, x), expected)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # that the graph holds this input's sizes
@pytest.mark.parametrize("pre_dispatch", [False, True])
@pytest.mark.parametrize("width", [IN, 40 * IN])
def test_a_recorded_gradient_multiplies_all_rows(width: int, *, pre_dispatch: bool) -> None:
    """Of a graph that make_fx made inductor dropped the parts but the first; torch.jit.trace saw no kernel at all."""
    torch.manual_seed(0)
    x, grad = torch.randn(16, 64, width).to(BF16) + 10, torch.randn(16, 1, OUT)
    grad = (grad - grad.mean(0)).to(BF16)

    def gradient(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return gemm.wgrad(grad.expand(-1, 64, -1), x)

    expected = exact(grad.expand(-1, 64, -1), x)
    recorded = make_fx(gradient, pre_dispatch=pre_dispatch)(grad, x)
    assert relative_error(torch.compile(recorded)(grad, x), expected) < 2.0**-8
    torch._dynamo.reset()
    traced = torch.jit.trace(gradient, (grad, x))
    assert isinstance(traced, torch.jit.ScriptFunction)
    assert relative_error(traced(grad, x), expected) < 2.0**-8


def test_fp16_rows_are_written_out_since_their_sum_may_be_beyond_its_range() -> None:
    grad = torch.full((1, 1, 1), 2.0**-10, dtype=FP16).expand(S, B, 1)
    x = torch.full((S, B, 1), 60000.0, dtype=FP16)
    assert gemm.wgrad(grad, x).item() == pytest.approx(S * B * 60000 / 1024, rel=1e-3)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("in_gradient", [False, True])
def test_what_is_not_finite_stays_so(value: float, *, in_gradient: bool) -> None:
    grad, x = torch.randn(S, 1, OUT).to(BF16), torch.randn(S, B, IN).to(BF16)
    (grad if in_gradient else x)[2, 0, 1] = value
    ours = gemm.wgrad(grad.expand(S, B, OUT), x)
    plain = gemm.wgrad(grad.expand(S, B, OUT).contiguous(), x)
    assert torch.equal(ours.isfinite(), plain.isfinite())
    assert not ours.isfinite().all()


def test_no_rows_and_no_features() -> None:
    grad = torch.randn(1, 1, OUT).expand(0, B, OUT)
    assert torch.equal(gemm.wgrad(grad, torch.empty(0, B, IN)), torch.zeros(OUT, IN))
    assert gemm.wgrad(torch.randn(1, OUT).expand(B, OUT), torch.empty(B, 0)).shape == (OUT, 0)
    assert gemm.wgrad(torch.empty(1, 0).expand(B, 0), torch.randn(B, IN)).shape == (0, IN)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_gradient_keeps_all_digits(backend: str, dtype: torch.dtype) -> None:
    """Of the parts of a sum inductor kept the first: rows that cancel were 14 % off."""
    torch.manual_seed(0)
    x, grad = torch.randn(16, 64, 32).to(BF16) + 10, torch.randn(16, 1, OUT)
    grad = (grad - grad.mean(0)).to(BF16)

    def gradient(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return gemm.wgrad(grad.expand(-1, 64, -1), x, dtype=dtype)

    torch._dynamo.reset()
    compiled = torch.compile(gradient, fullgraph=True, backend=backend)(grad, x)
    torch._dynamo.reset()
    assert relative_error(compiled, exact(grad.expand(-1, 64, -1), x)) < (2.0**-8 if dtype is BF16 else 1e-5)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_batched_gradients(dtype: torch.dtype) -> None:
    x, weight = torch.randn(S, B, IN).to(dtype), torch.randn(OUT, IN).to(dtype).requires_grad_()
    output = linear_with_grad_accumulation_and_async_allreduce(x, weight, None, *ALONE).sum(1)
    upstream = torch.randn(3, S, OUT).to(dtype)
    (together,) = torch.autograd.grad(output, weight, upstream, is_grads_batched=True, retain_graph=True)
    for grad, ours in zip(upstream, together, strict=True):
        assert relative_error(ours, exact(grad[:, None].expand(S, B, OUT), x)) < ROUNDING[dtype]


def test_a_tensor_negated_in_name_only() -> None:
    grad, x = operands("dY over the batch", BF16, in_features=40 * IN)
    assert torch.equal(gemm.wgrad(grad, torch.ops.aten._neg_view(x)), gemm.wgrad(grad, -x))


def test_a_sum_over_the_batch_multiplies_distinct_rows_only() -> None:
    """dX has an eighth of the rows, dW a quarter: the distinct ones, once for each of two parts."""
    x = torch.randn(S, B, IN).to(BF16).requires_grad_()
    weight = torch.randn(OUT, IN).to(BF16).requires_grad_()
    output = linear_with_grad_accumulation_and_async_allreduce(x, weight, None, *ALONE).sum(1)
    with Recorder() as seen:
        torch.autograd.grad(output, (x, weight), torch.randn(S, OUT).to(BF16))
    products = [operation.shapes for operation in seen.operations if operation.name == "aten.mm"]
    assert sorted(products) == sorted([((S, OUT), (OUT, IN)), ((OUT, 2 * S), (2 * S, IN))])
    assert seen.count("aten.bmm") == 0


def test_main_grad_holds_what_the_contract_asks() -> None:
    grad, x = operands("dY over the batch", BF16)
    for accumulate in (False, True):
        main_grad = torch.randn(OUT, IN)
        expected = exact(grad, x) + (main_grad.double() if accumulate else 0)
        gemm.wgrad_into(main_grad, grad, x, accumulate=accumulate)
        assert relative_error(main_grad, expected) < 1e-6
