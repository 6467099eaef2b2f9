"""LinearWithFrozenWeight on one rank: values against fp64, recorded operations, dtypes, options, what it saves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megatron_frozen import LinearWithFrozenWeight, linear_with_frozen_weight
from megatron_frozen.diagnostics import Recorder
from megatron_frozen.errors import ConfigError, LayoutError
from megatron_frozen.testing import relative_error

NUM_IN, NUM_OUT = 7, 5

# name -> gradient of a [6, 3, 5], [6, 1, 5] or [6, 3, 2, 5] output: cases 1, 2 and 5, and the layouts of design.md
LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "contiguous": lambda: torch.randn(6, 3, NUM_OUT),
    "leading dims transposed": lambda: torch.randn(3, 6, NUM_OUT).transpose(0, 1),
    "first dim expanded": lambda: torch.randn(3, NUM_OUT).expand(6, 3, NUM_OUT),
    "middle dim expanded": lambda: torch.randn(6, 1, NUM_OUT).expand(6, 3, NUM_OUT),
    "last two dims swapped": lambda: torch.randn(6, NUM_OUT, 3).transpose(1, 2),
    "logits of batch 1": lambda: torch.randn(1, 6, NUM_OUT).transpose(0, 1),
    "size-1 dim of big stride": lambda: torch.randn(60000).as_strided((6, 1, NUM_OUT), (NUM_OUT, 9999, 1)),
    "gap after a size-1 dim": lambda: torch.randn(200).as_strided((6, 1, NUM_OUT), (20, NUM_OUT, 1)),
    "foldable rows apart": lambda: torch.randn(6, 3, 2 * NUM_OUT)[..., :NUM_OUT],
    "strided hidden": lambda: torch.randn(6, 3, 2 * NUM_OUT)[..., ::2],
    "partly collapsible slice": lambda: torch.randn(6, 4, NUM_OUT)[:, :3],
    "everything expanded": lambda: torch.ones(()).expand(6, 3, NUM_OUT),
    "rank 4, middle dims outermost": lambda: torch.randn(700).as_strided((6, 3, 2, NUM_OUT), (15, 5, 90, 1)),
    "rank 4, transposed": lambda: torch.randn(2, 3, 6, NUM_OUT).permute(2, 1, 0, 3),
    "rank 4, expanded": lambda: torch.randn(6, 1, 2, NUM_OUT).expand(6, 3, 2, NUM_OUT),
}
# Those whose distinct rows cannot be laid out as one strided matrix are copied, once.
COPIED = {"last two dims swapped", "strided hidden", "partly collapsible slice", "everything expanded"}
DENSE_COPY_BYTES = {"everything expanded": NUM_OUT * 4}  # one row


def weight_and_bias(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a frozen weight and a trainable bias."""
    return torch.randn(NUM_OUT, NUM_IN).to(dtype), torch.randn(NUM_OUT).to(dtype).requires_grad_()


def frozen(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, **options: bool) -> torch.Tensor:
    """Call the public function on one rank."""
    return linear_with_frozen_weight(
        x,
        weight,
        bias,
        gradient_accumulation_fusion=False,
        allreduce_dgrad=False,
        sequence_parallel=False,
        **options,  # pyright: ignore[reportArgumentType]
    )


def input_like(grad: torch.Tensor) -> torch.Tensor:
    """Return an input for an output of ``grad``'s leading dims."""
    return torch.randn(*grad.shape[:-1], NUM_IN, requires_grad=True)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("in_fp32", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_backward_is_one_gemm_without_copies(name: str, *, in_fp32: bool, with_bias: bool) -> None:
    torch.manual_seed(0)
    grad = LAYOUTS[name]()
    untouched = grad.clone()
    weight, bias = weight_and_bias()
    x = input_like(grad)
    y = frozen(x, weight, bias if with_bias else None, dgrad_in_fp32=in_fp32)
    with Recorder() as seen:
        dx, db = torch.autograd.grad(y, (x, bias), grad, allow_unused=not with_bias)
    assert seen.count("aten.mm") == 1
    assert seen.count("aten.bmm") == 0
    dense_bytes = DENSE_COPY_BYTES.get(name, grad.numel() * grad.element_size())
    assert seen.copied_bytes() == (dense_bytes if name in COPIED else 0)
    assert dx.shape == x.shape
    wide = untouched.double()
    assert relative_error(dx, torch.einsum("...o,oi->...i", wide, weight.double())) < 1e-6
    if with_bias:
        assert relative_error(db, wide.reshape(-1, NUM_OUT).sum(0)) < 1e-6
    assert torch.equal(grad, untouched)


@pytest.mark.parametrize("name", LAYOUTS)
def test_forward_is_one_gemm_without_copies(name: str) -> None:
    torch.manual_seed(0)
    x = LAYOUTS[name]().detach().requires_grad_()
    weight = torch.randn(3, NUM_OUT)
    with Recorder() as seen:
        y = frozen(x, weight)
    assert (seen.count("aten.mm"), seen.count("aten.bmm")) == (1, 0)
    dense_bytes = DENSE_COPY_BYTES.get(name, x.numel() * x.element_size())
    written_out = y.numel() * y.element_size() if "expanded" in name else 0  # an output's elements are all its own
    assert seen.copied_bytes() == written_out + (dense_bytes if name in COPIED else 0)
    assert relative_error(y, torch.einsum("...i,oi->...o", x.double(), weight.double())) < 1e-6


@pytest.mark.parametrize(
    "name",
    [
        "leading dims transposed",
        "first dim expanded",
        "middle dim expanded",
        "last two dims swapped",
        "rank 4, middle dims outermost",
        "rank 4, transposed",
        "rank 4, expanded",
    ],
)
def test_control_a_bare_matmul_batches(name: str) -> None:
    """Case 1: what the tests above assert is absent is there without the fold."""
    with Recorder() as seen:
        torch.matmul(LAYOUTS[name](), torch.randn(NUM_OUT, NUM_IN))
    assert seen.count("aten.bmm") == 1


@pytest.mark.parametrize("shape", [(NUM_IN,), (4, NUM_IN), (0, 1, NUM_IN), (2, 0, 3, NUM_IN)])
def test_any_rank_and_no_tokens(shape: tuple[int, ...]) -> None:
    """Case 16 on one rank: zero tokens give zero gradients of the right shapes."""
    weight, bias = weight_and_bias()
    x = torch.randn(shape, requires_grad=True)
    y = frozen(x, weight, bias)
    assert y.shape == (*shape[:-1], NUM_OUT)
    y.backward(torch.ones_like(y))
    assert x.grad is not None
    assert x.grad.shape == shape
    assert bias.grad is not None
    assert torch.equal(bias.grad, torch.full_like(bias, x.numel() / NUM_IN))


def test_the_sum_of_a_broadcast_gradient() -> None:
    """Case 5: y.sum() hands over one stored element; each row of dX is the column sum of W, db counts 18 tokens."""
    weight, bias = weight_and_bias()
    x = torch.randn(6, 3, NUM_IN, requires_grad=True)
    frozen(x, weight, bias).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, weight.sum(0).expand(6, 3, NUM_IN))
    assert bias.grad is not None
    assert torch.equal(bias.grad, torch.full_like(bias, 18))


def test_two_outputs_joined_before_the_loss() -> None:
    """Case 5: slices of a larger gradient."""
    weight, _ = weight_and_bias()
    x = torch.randn(6, 3, NUM_IN, requires_grad=True)
    joined = torch.cat([frozen(x, weight), frozen(2 * x, weight)], dim=1)
    grad = torch.randn_like(joined)
    joined.backward(grad)
    torch.testing.assert_close(x.grad, grad[:, :3] @ weight + 2 * grad[:, 3:] @ weight)


def test_a_trainable_bias_under_a_frozen_weight_learns() -> None:
    """Case 6: db is 18 everywhere; a frozen bias and the weight get none."""
    weight, bias = weight_and_bias()
    x = torch.randn(6, 3, NUM_IN)
    y = frozen(x, weight, bias)
    y.backward(torch.ones(6, 3, NUM_OUT))
    assert bias.grad is not None
    assert torch.equal(bias.grad, torch.full((NUM_OUT,), 18.0))
    assert weight.grad is None
    y = frozen(x.requires_grad_(), weight, bias.detach())
    y.backward(torch.ones(6, 3, NUM_OUT))
    flat = frozen(x[0].detach(), weight, bias.detach().requires_grad_())
    assert flat.shape == (3, NUM_OUT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_dtypes_are_as_near_fp64_as_plain_torch(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, bias = weight_and_bias(dtype)
    x = torch.randn(6, 3, NUM_IN).to(dtype).requires_grad_()
    grad = torch.randn(3, 6, NUM_OUT).to(dtype).transpose(0, 1)
    y = frozen(x, weight, bias)
    dx, db = torch.autograd.grad(y, (x, bias), grad)
    assert (y.dtype, dx.dtype, db.dtype) == (dtype, dtype, dtype)
    plain_y = torch.nn.functional.linear(x, weight, bias)
    plain_dx, plain_db = torch.autograd.grad(plain_y, (x, bias), grad)
    exact_y = x.double() @ weight.double().t() + bias.double()
    exact_dx, exact_db = grad.double() @ weight.double(), grad.double().sum((0, 1))
    tiny = torch.finfo(dtype).eps
    for what, ours, plain, exact in (
        ("y", y, plain_y, exact_y),
        ("dx", dx, plain_dx, exact_dx),
        ("db", db, plain_db, exact_db),
    ):
        assert relative_error(ours, exact) <= 2 * relative_error(plain, exact) + tiny, what


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("through_environment", [False, True])
def test_dgrad_in_fp32(monkeypatch: pytest.MonkeyPatch, *, through_environment: bool, in_order: bool) -> None:
    """Case 3: the option returns g.float() @ W.float() cast back, by one mm."""
    torch.manual_seed(0)
    weight, _ = weight_and_bias(torch.bfloat16)
    grad = torch.randn(6, 3, NUM_OUT) if in_order else torch.randn(3, 6, NUM_OUT).transpose(0, 1)
    grad = grad.bfloat16()
    x = torch.randn(6, 3, NUM_IN).bfloat16().requires_grad_()
    if through_environment:
        monkeypatch.setenv("MEGATRON_TRUE_ON_POLICY_LINEAR_DGRAD_FP32", "1")
    y = frozen(x, weight, dgrad_in_fp32=not through_environment)
    with Recorder() as seen:
        (dx,) = torch.autograd.grad(y, x, grad)
    assert (seen.count("aten.mm"), seen.count("aten.bmm")) == (1, 0)
    expected = torch.mm(grad.float().reshape(-1, NUM_OUT), weight.float()).bfloat16().view(6, 3, NUM_IN)
    assert torch.equal(dx, expected)


@pytest.mark.parametrize("dgrad_in_fp32", [False, True])
def test_autocast(*, dgrad_in_fp32: bool) -> None:
    """Operands are cast as F.linear's are; a backward inside autocast keeps its own dtypes."""
    torch.manual_seed(0)
    weight, bias = weight_and_bias()
    x = torch.randn(6, 3, NUM_IN, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = frozen(x, weight, bias, dgrad_in_fp32=dgrad_in_fp32)
        expected = torch.nn.functional.linear(x, weight, bias)
        assert torch.equal(y, expected)
        grad = torch.randn_like(y)
        dx, db = torch.autograd.grad(y, (x, bias), grad)
    plain_dx, plain_db = torch.autograd.grad(expected, (x, bias), grad)
    assert (dx.dtype, db.dtype) == (torch.float32, torch.float32)
    exact = grad.double() @ weight.bfloat16().double()
    assert relative_error(dx, exact) <= 2 * relative_error(plain_dx, exact) + 1e-6
    assert torch.equal(db, plain_db)


@pytest.mark.parametrize("in_order", [False, True])
def test_a_backward_inside_autocast_keeps_the_operands_dtype(*, in_order: bool) -> None:
    weight, _ = weight_and_bias()
    x = torch.randn(6, 3, NUM_IN, requires_grad=True)
    grad = torch.randn(6, 3, NUM_OUT) if in_order else torch.randn(3, 6, NUM_OUT).transpose(0, 1)
    y = frozen(x, weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (dx,) = torch.autograd.grad(y, x, grad)
    assert dx.dtype == torch.float32
    assert relative_error(dx, grad.double() @ weight.double()) < 1e-6


def test_the_switch_of_the_sum_is_read_where_ranks_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """At each call, and the one of the product on one rank too."""
    weight, _ = weight_and_bias()
    x = torch.randn(6, 3, NUM_IN)
    monkeypatch.setenv("MEGATRON_TRUE_ON_POLICY_DGRAD_ALLREDUCE_FP32", "yes")
    assert torch.equal(frozen(x, weight), torch.nn.functional.linear(x, weight))
    monkeypatch.setenv("MEGATRON_TRUE_ON_POLICY_LINEAR_DGRAD_FP32", "yes")
    with pytest.raises(ConfigError, match="LINEAR_DGRAD_FP32 is 'yes'; it takes 0 or 1"):
        frozen(x, weight)


def test_only_the_weight_is_saved() -> None:
    weight, bias = weight_and_bias()
    x = torch.randn(6, 3, NUM_IN, requires_grad=True)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        frozen(x, weight, bias)
    assert [tensor.data_ptr() for tensor in saved] == [weight.data_ptr()]


def test_the_output_may_be_written_into() -> None:
    """F.linear's output may; autograd forbids it for a view that a custom function returns."""
    weight, _ = weight_and_bias()
    for x in (
        torch.randn(6, 3, NUM_IN),
        torch.randn(3, 6, NUM_IN).transpose(0, 1),
        torch.randn(NUM_IN).expand(6, 3, 7),
    ):
        leaf = x.detach().requires_grad_()
        y = frozen(leaf, weight)
        y.add_(1).relu_()
        (dx,) = torch.autograd.grad(y.sum(), leaf)
        expected = ((x @ weight.t() + 1) > 0).float() @ weight
        torch.testing.assert_close(dx, expected)


def test_double_backward_is_refused() -> None:
    weight, _ = weight_and_bias()
    x = torch.randn(6, 3, NUM_IN, requires_grad=True)
    (dx,) = torch.autograd.grad(frozen(x, weight).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_megatrons_call_of_the_class() -> None:
    """The autograd class takes upstream's five arguments."""
    from_upstream = torch.randn(6, 3, NUM_IN, requires_grad=True)
    weight, bias = weight_and_bias()
    y = LinearWithFrozenWeight.apply(from_upstream, weight, bias, False, None)  # noqa: FBT003
    torch.testing.assert_close(y, torch.nn.functional.linear(from_upstream, weight, bias))
    y.sum().backward()


def test_bad_operands() -> None:
    weight, bias = weight_and_bias()
    with pytest.raises(LayoutError, match=r"operands of dtypes .*cast them to one dtype"):
        frozen(torch.randn(2, NUM_IN).bfloat16(), weight)
    with pytest.raises(LayoutError, match="the last dim of the input must be 7"):
        frozen(torch.randn(2, 6), weight, bias)
    with pytest.raises(ConfigError, match="which has no weight gradient to put off; leave them None"):
        linear_with_frozen_weight(torch.randn(2, NUM_IN), weight, None, False, False, False, None, [])  # noqa: FBT003
    with pytest.raises(ConfigError, match="a reduce-scatter already sums the input gradient"):
        linear_with_frozen_weight(torch.randn(2, NUM_IN), weight, None, False, True, True)  # noqa: FBT003
    with pytest.warns(DeprecationWarning, match="async_grad_allreduce is ignored"):
        linear_with_frozen_weight(
            torch.randn(2, NUM_IN),
            weight,
            None,
            gradient_accumulation_fusion=False,
            allreduce_dgrad=False,
            sequence_parallel=False,
            async_grad_allreduce=True,
        )


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", [(6, 3, NUM_IN), (6, 1, NUM_IN), (6, NUM_IN), (NUM_IN,), (2, 3, 2, NUM_IN)], ids=str)
def test_the_output_of_any_rank_may_be_written_into(shape: tuple[int, ...], with_bias: bool) -> None:  # noqa: FBT001
    weight, bias = weight_and_bias()
    x = torch.randn(*shape, requires_grad=True)
    y = frozen(x, weight, bias if with_bias else None)
    assert not y._is_view()
    y.mul_(2).sum().backward()
    assert x.grad is not None
    assert relative_error(x.grad, (2 * weight.double().sum(0)).expand(shape)) < 1e-6


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_input_of_any_layout_takes_one_product(name: str) -> None:
    x = LAYOUTS[name]()
    weight = torch.randn(NUM_IN, NUM_OUT)
    with Recorder() as seen:
        y = frozen(x, weight)
    assert (seen.count("aten.mm"), seen.count("aten.bmm"), seen.count("aten.addmm")) == (1, 0, 0)
    assert relative_error(y, (x.double().unsqueeze(-2) * weight.double()).sum(-1)) < 1e-6
