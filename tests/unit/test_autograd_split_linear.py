"""The split linear product: values and counts of each freezing pattern, layout, dtype and buffer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_frozen.diagnostics import Recorder
from megatron_frozen.errors import ConfigError, LayoutError
from megatron_frozen.functional import linear_with_split_parameters
from megatron_frozen.storage import split_rows
from megatron_frozen.testing import relative_error

SIZES = [3, 4, 5]
IN, OUT = 7, sum(SIZES)
FROZEN = [(), (0,), (1,), (2,), (0, 2), (0, 1, 2)]


def new_parts(full: Tensor, *, frozen: tuple[int, ...] = (), adjacent: bool = True) -> list[Any]:
    cut = split_rows(full.clone(), SIZES) if adjacent else [part.clone() for part in full.split(SIZES)]
    return [torch.nn.Parameter(part, requires_grad=i not in frozen) for i, part in enumerate(cut)]


def layouts() -> dict[str, tuple[Tensor, Tensor]]:
    """X and dY whose leading dims are [6, 3]."""
    x = torch.randn(6, 3, IN)
    return {
        "dense": (x, torch.randn(6, 3, OUT)),
        "transposed": (torch.randn(3, 6, IN).transpose(0, 1), torch.randn(3, 6, OUT).transpose(0, 1)),
        "unlike": (x, torch.randn(3, 6, OUT).transpose(0, 1)),
        "expanded": (x, torch.randn(3, OUT).expand(6, 3, OUT)),
        "one element": (x, torch.ones(()).expand(6, 3, OUT)),
        "hidden strided": (x, torch.randn(6, OUT, 3).transpose(1, 2)),
        "no tokens": (torch.randn(0, 3, IN), torch.randn(0, 3, OUT)),
    }


@pytest.mark.parametrize("frozen", FROZEN, ids=str)
@pytest.mark.parametrize("layout", layouts())
def test_values_and_counts(layout: str, frozen: tuple[int, ...]) -> None:
    x, g = layouts()[layout]
    full, full_bias = torch.randn(OUT, IN), torch.randn(OUT)
    weights, biases = new_parts(full, frozen=frozen), new_parts(full_bias, frozen=(1,))
    x = x.requires_grad_()
    with Recorder() as seen:
        y = linear_with_split_parameters(x, weights, biases)
        y.backward(g)
    assert seen.count("aten.bmm") == 0
    assert seen.count("aten.cat") == 0
    assert seen.count("aten.addmm") == 1
    assert seen.count("aten.mm") == 1 + (len(frozen) < 3)
    wide = [tensor.detach().double().requires_grad_() for tensor in (x, full, full_bias)]
    torch.nn.functional.linear(*wide).backward(g.double())
    reference_x, reference_w, reference_b = (tensor.grad for tensor in wide)
    assert reference_x is not None
    assert reference_w is not None
    assert reference_b is not None
    torch.testing.assert_close(y.double(), torch.nn.functional.linear(*wide), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.grad, reference_x.float(), rtol=1e-5, atol=1e-5)
    for i, (part, reference) in enumerate(zip(weights, reference_w.float().split(SIZES), strict=True)):
        if i in frozen:
            assert part.grad is None
        else:
            torch.testing.assert_close(part.grad, reference, rtol=1e-5, atol=1e-5)
    for i, (part, reference) in enumerate(zip(biases, reference_b.float().split(SIZES), strict=True)):
        if i == 1:
            assert part.grad is None
        else:
            torch.testing.assert_close(part.grad, reference, rtol=1e-5, atol=1e-5)


def test_rows_of_frozen_parts_leave_the_weight_gradients_product() -> None:
    x, g = torch.randn(6, IN, requires_grad=True), torch.randn(6, OUT)
    for frozen, columns in {(0,): 9, (1,): 8, (2,): 7, (0, 2): 4}.items():
        weights = new_parts(torch.randn(OUT, IN), frozen=frozen)
        y = linear_with_split_parameters(x, weights)
        with Recorder() as seen:
            y.backward(g)
        products = [operation.shapes for operation in seen.operations if operation.name == "aten.mm"]
        assert products == [((6, OUT), (OUT, IN)), ((columns, 6), (6, IN))]


def test_a_frozen_weight_keeps_no_input() -> None:
    x = torch.randn(6, IN, requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        linear_with_split_parameters(x, new_parts(torch.randn(OUT, IN), frozen=(0, 1, 2)))
    assert all(tensor.data_ptr() != x.data_ptr() for tensor in saved)


@pytest.mark.parametrize("adjacent", [True, False])
@pytest.mark.parametrize("frozen", FROZEN[:-1], ids=str)
def test_each_part_has_a_buffer_of_its_own(frozen: tuple[int, ...], adjacent: bool) -> None:  # noqa: FBT001
    full = torch.randn(OUT, IN).bfloat16()
    weights = new_parts(full, frozen=frozen)
    buffers = new_parts(torch.full((OUT, IN), 7.0), adjacent=adjacent)
    for weight, buffer in zip(weights, buffers, strict=True):
        weight.main_grad, weight.grad_added_to_main_grad = buffer.detach(), False
    x, g = torch.randn(32, IN).bfloat16(), torch.randn(32, OUT).bfloat16()
    for _ in range(2):
        linear_with_split_parameters(x, weights, gradient_accumulation_fusion=True).backward(g)
    reference = 7 + 2 * (g.double().t() @ x.double())
    for i, (weight, rows) in enumerate(zip(weights, reference.split(SIZES), strict=True)):
        assert weight.grad_added_to_main_grad is (i not in frozen)
        if i in frozen:
            assert (weight.main_grad == 7).all()
            assert weight.grad is None
        else:
            assert relative_error(weight.main_grad, rows) < 1e-6


def test_buffers_that_adjoin_are_written_by_one_product() -> None:
    for adjacent, expected in ((True, 1), (False, 3)):
        weights = new_parts(torch.randn(OUT, IN).bfloat16())
        buffers = new_parts(torch.zeros(OUT, IN), adjacent=adjacent)
        for weight, buffer in zip(weights, buffers, strict=True):
            weight.main_grad = buffer.detach()
        y = linear_with_split_parameters(torch.randn(8, IN).bfloat16(), weights, gradient_accumulation_fusion=True)
        with Recorder() as seen:
            y.backward(torch.randn(8, OUT).bfloat16())
        assert seen.count("aten.addmm_") == expected


def test_nothing_is_written_before_all_buffers_are_known_to_fit() -> None:
    for wrong, message in (
        ("missing", r"weight of shape \[5, 7\] trains and has neither a main_grad buffer"),
        ("int", "floating-point buffer, float32 by preference"),
        ("shape", "give a buffer of the weight's shape"),
        ("swapped", "give a buffer of the weight's shape"),
    ):
        weights = new_parts(torch.randn(OUT, IN))
        for weight in weights:
            weight.main_grad = torch.full_like(weight, 3.0)
        del weights[2].main_grad
        if wrong == "swapped":  # they adjoin, and together they would fit
            for weight, buffer in zip(weights, split_rows(torch.full((OUT, IN), 3.0), [4, 3, 5]), strict=True):
                weight.main_grad = buffer
        elif wrong != "missing":
            weights[2].main_grad = torch.zeros(5, IN, dtype=torch.int32) if wrong == "int" else torch.zeros(4, IN)
        y = linear_with_split_parameters(torch.randn(8, IN), weights, gradient_accumulation_fusion=True)
        with pytest.raises((ConfigError, LayoutError), match=message):
            y.sum().backward()
        assert all((weight.main_grad == 3).all() for weight in weights[:2])


@pytest.mark.parametrize("flag", [None, False])
def test_a_weight_that_is_two_parts_is_overwritten_once(flag: bool | None) -> None:  # noqa: FBT001
    weight: Any = torch.nn.Parameter(torch.randn(3, IN))
    weight.main_grad, weight.overwrite_main_grad = torch.full((3, IN), 7.0), True
    if flag is not None:
        weight.grad_added_to_main_grad = flag
    x, g = torch.randn(6, IN), torch.randn(6, 6)
    linear_with_split_parameters(x, [weight, weight], gradient_accumulation_fusion=True).backward(g)
    assert relative_error(weight.main_grad, (g[:, :3] + g[:, 3:]).double().t() @ x.double()) < 1e-6


def test_a_part_frozen_after_the_forward_is_not_written() -> None:
    weights = new_parts(torch.randn(OUT, IN))
    for weight, buffer in zip(weights, split_rows(torch.full((OUT, IN), 7.0), SIZES), strict=True):
        weight.main_grad = buffer
    x, g = torch.randn(6, IN), torch.randn(6, OUT)
    y = linear_with_split_parameters(x, weights, gradient_accumulation_fusion=True)
    weights[1].requires_grad = False
    del weights[1].main_grad
    y.backward(g)
    for i, rows in enumerate((7 + g.double().t() @ x.double()).split(SIZES)):
        if i != 1:
            assert relative_error(weights[i].main_grad, rows) < 1e-6


def test_gradients_come_in_each_parts_dtype() -> None:
    x, g = torch.randn(6, IN, requires_grad=True), torch.randn(6, OUT)
    weights = [torch.nn.Parameter(torch.randn(3, IN)), torch.nn.Parameter(torch.randn(9, IN, dtype=torch.bfloat16))]
    biases = [torch.nn.Parameter(torch.randn(3)), torch.nn.Parameter(torch.randn(9, dtype=torch.bfloat16))]
    linear_with_split_parameters(x, weights, biases).backward(g)
    for part, reference in zip(weights, (g.t() @ x).split([3, 9]), strict=True):
        assert part.grad is not None
        assert part.grad.dtype == part.dtype
        assert relative_error(part.grad, reference) < (1e-6 if part.dtype == torch.float32 else 4e-3)
    for part in biases:
        assert part.grad is not None
        assert part.grad.dtype == part.dtype


def test_gradients_may_be_wider_than_the_parts() -> None:
    weights = new_parts(torch.randn(OUT, IN).bfloat16())
    for weight in weights[1:]:
        weight.grad_dtype = torch.float32
    x, g = torch.randn(64, IN).bfloat16(), torch.randn(64, OUT).bfloat16()
    linear_with_split_parameters(x, weights).backward(g)
    assert [weight.grad.dtype for weight in weights] == [torch.bfloat16, torch.float32, torch.float32]
    for weight, rows in zip(weights[1:], (g.double().t() @ x.double()).split(SIZES)[1:], strict=True):
        assert relative_error(weight.grad, rows) < 1e-6


def test_options_of_the_other_linears_hold() -> None:
    full = torch.randn(OUT, IN).bfloat16()
    x = torch.randn(6, IN).bfloat16().requires_grad_()
    y = linear_with_split_parameters(x, new_parts(full, frozen=(0, 1, 2)), output_dtype=torch.float32)
    assert y.dtype == torch.float32
    assert relative_error(y, x.double() @ full.double().t()) < 1e-6
    with torch.autocast("cpu", torch.bfloat16):
        cast = linear_with_split_parameters(torch.randn(6, IN), new_parts(torch.randn(OUT, IN)))
    assert cast.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("weights", "biases", "message"),
    [
        ([], [], "a split linear product got 0 weights"),
        ([torch.randn(3, IN)] * 2, [torch.randn(3)], "got 2 weights and 1 biases"),
        ([torch.randn(3, IN), torch.randn(3, 6)], [], "give matrices with one number of input features"),
        ([torch.randn(IN)] * 2, [], r"shapes \[\[7\], \[7\]\]; give matrices"),
        ([torch.randn(1, IN, IN)] * 2, [], "give matrices with one number of input features"),
        ([torch.randn(3, IN), torch.randn(4, IN)], [torch.randn(4), torch.randn(3)], "each weight a vector of as many"),
        ([torch.randn(3, IN)], [torch.randn(1)], r"biases of shapes \[\[1\]\] for weights of \[3\] rows"),
        ([torch.randn(3, 6)] * 2, [], "the last dim of the input must be 6"),
        ([torch.randn(3, IN), torch.randn(3, IN).double()], [], "cast them to one dtype"),
    ],
    ids=["none", "biases", "widths", "vectors", "batches", "swapped biases", "one bias", "input", "dtypes"],
)
def test_operands_that_do_not_fit_are_refused(weights: list[Tensor], biases: list[Tensor], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        linear_with_split_parameters(torch.randn(4, IN), weights, biases)


def test_autocast_is_refused_for_a_fused_part() -> None:
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(ConfigError, match="cast copy has no main_grad"),
    ):
        linear_with_split_parameters(
            torch.randn(4, IN), new_parts(torch.randn(OUT, IN)), gradient_accumulation_fusion=True
        )
