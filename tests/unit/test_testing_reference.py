from __future__ import annotations

import math

import pytest
import torch

from megatron_frozen.testing import assert_close_to, assert_no_worse_than, relative_error

_REFERENCE = torch.tensor([3.0, 4.0], dtype=torch.float64)


def test_relative_error_is_a_ratio_of_norms() -> None:
    assert relative_error(torch.tensor([3.0, 4.5]), _REFERENCE) == pytest.approx(0.1)
    assert relative_error(torch.tensor([0.0, 2.0]), torch.zeros(2)) == 2.0
    assert relative_error(torch.zeros(0, 3), torch.zeros(0, 3)) == 0.0
    assert math.isnan(relative_error(torch.tensor([3.0, math.nan]), _REFERENCE))


def test_relative_error_refuses_another_shape() -> None:
    with pytest.raises(AssertionError, match=r"shape \[1, 2\] where \[2\] is expected"):
        relative_error(_REFERENCE[None], _REFERENCE)


def test_the_culprit_is_named_and_the_others_cleared() -> None:
    reference = {"y": _REFERENCE, "dx": _REFERENCE, "dw": None}
    assert_close_to({"y": _REFERENCE, "dx": _REFERENCE * 1.0001, "dw": None}, reference, tolerance=1e-3)
    with pytest.raises(AssertionError, match=r"^dx: relative error 0\.1, at most 0\.001 is allowed \(y, dw is right\)"):
        assert_close_to({"y": _REFERENCE, "dx": _REFERENCE * 1.1, "dw": None}, reference, tolerance=1e-3)


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (None, "y: absent, and a tensor is expected"),
        (_REFERENCE[None], r"y: shape \[1, 2\] where \[2\] is expected"),
        (_REFERENCE * math.nan, "y: relative error nan"),
    ],
)
def test_absence_shape_and_nan_are_faults(y: torch.Tensor | None, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_close_to({"y": y}, {"y": _REFERENCE}, tolerance=1.0)


def test_a_tensor_where_none_is_expected_and_other_names_are_faults() -> None:
    with pytest.raises(AssertionError, match="dw: a tensor, and none is expected"):
        assert_close_to({"dw": _REFERENCE}, {"dw": None}, tolerance=1.0)
    with pytest.raises(AssertionError, match="expected"):
        assert_close_to({"dx": _REFERENCE}, {"dw": _REFERENCE}, tolerance=1.0)


def test_no_worse_than_plain_torch_twice_over() -> None:
    reference, plain = {"y": _REFERENCE}, {"y": _REFERENCE * 1.01}
    assert_no_worse_than({"y": _REFERENCE * 1.019}, plain, reference)
    with pytest.raises(AssertionError, match="y: relative error"):
        assert_no_worse_than({"y": _REFERENCE * 1.03}, plain, reference)
