"""Comparison with a reference that names the culprit: y, dx, dw, db are judged apart and reported together."""

from __future__ import annotations

from collections.abc import Mapping

import torch

_ERROR_FLOOR = torch.finfo(torch.float32).eps

Tensors = Mapping[str, torch.Tensor | None]


def relative_error(actual: torch.Tensor, reference: torch.Tensor) -> float:
    """|actual - reference| / |reference| in Frobenius norms, in fp64; the absolute error where the reference is 0.

    Raises AssertionError if the shapes differ. A NaN anywhere gives NaN, which no tolerance admits.
    """
    assert actual.shape == reference.shape, f"shape {list(actual.shape)} where {list(reference.shape)} is expected"
    difference = (actual.double() - reference.double()).norm().item()
    size = reference.double().norm().item()
    return difference / size if size > 0 else difference


def assert_close_to(actual: Tensors, reference: Tensors, *, tolerance: float) -> None:
    """Asserts a relative error of at most `tolerance` for each name; None ("no gradient") equals None only."""
    assert_within(actual, reference, tolerances=dict.fromkeys(reference, tolerance))


def assert_no_worse_than(actual: Tensors, plain: Tensors, reference: Tensors, *, factor: float = 2.0) -> None:
    """Asserts that each error against the fp64 `reference` is at most `factor` times that of `plain` torch."""
    errors = {
        name: relative_error(tensor, expected)
        for name, expected in reference.items()
        if expected is not None and (tensor := plain[name]) is not None
    }
    assert_within(
        actual, reference, tolerances={name: factor * max(error, _ERROR_FLOOR) for name, error in errors.items()}
    )


def assert_within(actual: Tensors, reference: Tensors, *, tolerances: Mapping[str, float]) -> None:
    """Asserts the same names on both sides, and each relative error within its own tolerance."""
    assert actual.keys() == reference.keys(), f"got {sorted(actual)}, expected {sorted(reference)}"
    faults = {name: fault for name in reference if (fault := _fault(name, actual, reference, tolerances))}
    fine = ", ".join(name for name in reference if name not in faults) or "nothing"
    assert not faults, "; ".join(f"{name}: {fault}" for name, fault in faults.items()) + f" ({fine} is right)"


def _fault(name: str, actual: Tensors, reference: Tensors, tolerances: Mapping[str, float]) -> str | None:
    value, expected = actual[name], reference[name]
    if value is None or expected is None:
        if value is expected:
            return None
        return "absent, and a tensor is expected" if value is None else "a tensor, and none is expected"
    if value.shape != expected.shape:
        return f"shape {list(value.shape)} where {list(expected.shape)} is expected"
    error = relative_error(value, expected)
    if error <= tolerances[name]:
        return None
    return f"relative error {error:.3g}, at most {tolerances[name]:.3g} is allowed"
