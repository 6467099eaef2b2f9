"""Split layers in every combination of memory, bias, freezing and main_grad, compiled and not, on one and two ranks.

Each case runs two steps with adjacent parts and, without compiling again, two with disjoint ones, and compares Y, dX
and each gradient with plain torch on the joined weight; concatenations and products are counted by the profiler.
Without compiling, the cross product is run whole. Compiled, it is 144 graphs per number of ranks, which take minutes;
each backend runs 12 in which every pair of settings occurs, and no two backends the same 12.
"""

from __future__ import annotations

import pytest

from megatron_frozen.testing import run_ranks
from tests.unit.split_ranks import (
    BACKENDS,
    KINDS,
    all_cases,
    check_case,
    check_modes,
    check_on_ranks,
    covering_cases,
)


@pytest.mark.parametrize("fused", [False, True], ids=["grad", "main_grad"])
@pytest.mark.parametrize("kind", KINDS)
def test_on_one_rank(kind: str, *, fused: bool) -> None:
    for case in all_cases(kind, fused=fused):
        check_case(case)


@pytest.mark.parametrize("fused", [False, True], ids=["grad", "main_grad"])
@pytest.mark.parametrize("kind", KINDS)
def test_on_two_ranks(kind: str, *, fused: bool) -> None:
    chosen = all_cases(kind, fused=fused)
    assert run_ranks(2, check_on_ranks, chosen) == [len(chosen)] * 2


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_on_one_rank(kind: str, backend: str) -> None:
    for case in covering_cases(kind, backend=backend):
        check_case(case)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_on_two_ranks(kind: str, backend: str) -> None:
    chosen = covering_cases(kind, backend=backend)
    assert run_ranks(2, check_on_ranks, chosen) == [len(chosen)] * 2


def test_the_compiled_cases_pair_every_two_settings() -> None:
    for backend in BACKENDS:
        chosen = [case for kind in KINDS for case in covering_cases(kind, backend=backend)]
        settings = [(case.kind, case.frozen, case.bias, case.fused) for case in chosen]
        for i, j in [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]:
            values = [{setting[index] for setting in settings} for index in (i, j)]
            assert len({(setting[i], setting[j]) for setting in settings}) == len(values[0]) * len(values[1])


@pytest.mark.parametrize(("mode", "backend"), [("column", None), ("row", None), (None, None), ("row", "aot_eager")])
def test_parallel_modes_on_two_ranks(mode: str | None, backend: str | None) -> None:
    """Column, row and whole layers with and without sequence parallelism; a row layer is no norm's."""
    run_ranks(2, check_modes, mode, backend)
