"""`bench linear` at tiny sizes: its cases, rows, counts and targets; no test here looks at how long something took."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from megatron_frozen.bench import linear, linear_cases
from megatron_frozen.bench.linear import BARE, BOTH, DGRAD, FLATTEN, FORWARD, OLD, OURS, TORCH
from megatron_frozen.bench.linear_cases import FULL, HALF, Case, cases
from megatron_frozen.bench.runner import STAMP, BenchConfig, Row
from megatron_frozen.cli import main
from megatron_frozen.diagnostics import Recorder
from megatron_frozen.gemm import peers
from megatron_frozen.layout import fold_leading

SMALL = cases(linear_cases.SMALL)


def test_cases() -> None:
    for chosen, num_swept in ((SMALL, 11), (cases(HALF), 11), (cases(FULL), 20)):
        names = [case.name for case in chosen]
        assert len(names) == len(set(names)) == num_swept + 2 + 2 + 1
        assert sum("x" in name for name in names) == num_swept


def test_a_gpu_multiplies_the_shapes_that_others_stand_for() -> None:
    shapes = {("x".join(map(str, (*case.lead, case.out_features))), case.in_features) for case in cases(FULL)}
    for case in cases(HALF):
        if case.stands_for:
            shape, _, in_features = case.stands_for.removesuffix(" in").partition(", ")
            assert (shape, int(in_features)) in shapes
    assert ("512x1x151936", 896) in shapes
    assert not any(case.stands_for for case in cases(FULL))


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_a_layout_keeps_values_and_lies_as_the_case_says(case: Case) -> None:
    dense = torch.randn(*case.lead, case.out_features)
    given = case.layout(dense)
    assert given.shape == dense.shape
    assert case.repeats > 1 or torch.equal(given, dense)
    _, fold = fold_leading(given)
    assert fold.is_view == case.folds
    assert fold.repeats == case.repeats
    assert case.in_order or not fold.is_natural


def test_logits_lie_as_megatron_hands_them_over() -> None:
    """The dim of size 1 has the stride of its place, at which matmul does not fold."""
    case = next(case for case in SMALL if case.name == "logits, transposed leading")
    dense = torch.randn(*case.lead, case.out_features)
    assert case.layout(dense).stride() == (case.out_features, dense.numel(), 1)
    with Recorder() as seen:
        peers.batched(case.layout(dense), torch.randn(case.out_features, 8))
    assert seen.count("aten.bmm") == 1


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, str]]]:
    folder = tmp_path_factory.mktemp("linear")
    assert main(["bench", "linear", "--small", "--repeats", "1", "--output", str(folder)]) == 0
    with (folder / "linear.csv").open(encoding="utf-8") as file:
        return folder, list(csv.DictReader(file))


def test_rows_are_stamped_and_whole(written: tuple[Path, list[dict[str, str]]]) -> None:
    folder, rows = written
    assert all(row[column] for row in rows for column in STAMP)
    times = {(row["case"], row["product"], row["way"]): row for row in rows if row["kind"] == "time"}
    for case in SMALL:
        for product, ways in ((FORWARD, {OLD}), (DGRAD, {OLD}), (BOTH, set())):
            for way in ways | {FLATTEN, OURS, BARE}:
                row = times.pop((case.name, product, way))
                assert float(row["median_ms"]) > 0
                assert not row["relative_error"] or float(row["relative_error"]) < 1e-2
    assert {way for _, _, way in times} == {TORCH, OURS}
    assert (folder / "linear.png").read_bytes().startswith(b"\x89PNG")


def test_ours_copies_nothing_where_no_copy_is_needed(written: tuple[Path, list[dict[str, str]]]) -> None:
    _, rows = written
    ours = [row for row in rows if row["way"] == OURS and row["copied_bytes"]]
    assert len(ours) == 3 * len(SMALL)
    assert {row["batched_products"] for row in ours} == {"0"}
    for row in ours:
        if (
            row["product"] == BOTH and row["repeats"] != "1"
        ):  # dY's rows for each part, and the parts without our kernels
            assert int(row["copied_bytes"]) < 2 * math.prod(map(int, row["shape"].split("x"))), row
        else:
            assert (int(row["copied_bytes"]) == 0) == (row["needs_copy"] == "False"), row
    flat = [row for row in rows if row["way"] == FLATTEN and row["product"] == DGRAD]
    copied = {case.name for case in SMALL if not (case.folds and case.in_order)}
    copied.remove("strided hidden 24x8x64")  # a reshape takes it as it is, and the product copies it unseen
    assert {row["case"] for row in flat if int(row["copied_bytes"])} == copied


def test_the_time_of_a_slow_old_way_is_that_of_an_eighth_times_8(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    case = next(case for case in SMALL if case.name.startswith("transposed leading"))
    seen: list[int] = []

    def once_ms(way: Callable[[], torch.Tensor], *, config: BenchConfig) -> float:
        seen.append(way().shape[0])
        return 100.0 if len(seen) == 1 else 2.0

    monkeypatch.setattr(linear, "once_ms", once_ms)
    rows = linear._measure(case, DGRAD, config=BenchConfig(output=tmp_path, repeats=1))
    assert seen[0] == case.lead[0] // 8
    old = next(row for row in rows if row["way"] == OLD)
    assert (old["median_ms"], old["samples"]) == (800.0, 0)
    assert "copied_bytes" not in old


def test_an_old_way_that_takes_no_time_is_sampled_like_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """However far above the bare product it is, as at tiny sizes."""
    case = next(case for case in SMALL if case.name.startswith("transposed leading"))
    times = iter((12.0, 0.1))
    monkeypatch.setattr(linear, "once_ms", lambda *_, **__: next(times))
    rows = linear._measure(case, DGRAD, config=BenchConfig(output=tmp_path, repeats=1))
    assert {row["samples"] for row in rows} == {1}


def measured(times: Mapping[str, float], **more: object) -> list[Row]:
    same: Row = {"case": "c", "product": DGRAD, "shape": "", "in_features": 1, "out_features": 1, "needs_copy": False}
    return [
        {**same, "way": way, "median_ms": time, "repeats": 1, "copied_bytes": 0, **more} for way, time in times.items()
    ]


def met(rows: list[Row]) -> list[object]:
    return [row["met"] for row in linear.verdicts(rows)]


def test_targets() -> None:
    good = {OLD: 100.0, FLATTEN: 20.0, OURS: 10.4, BARE: 10.0}
    assert met(measured(good)) == ["yes"] * 3
    assert met(measured(good | {OURS: 12.0})) == ["no", "yes", "yes"]
    assert met(measured(good | {OURS: 12.0}, needs_copy=True)) == ["yes", "yes"]
    assert met(measured(good | {FLATTEN: 10.0}, copied_bytes=64)) == ["yes", "no", "no"]
    assert met(measured(good, repeats=8)) == ["yes", "yes", "no", "yes"]
    control = {"case": "control, x"}
    assert met(measured(good | {OLD: 10.5}, **control)) == ["yes"] * 4
    assert met(measured(good, **control)) == ["yes", "yes", "yes", "no"]
    assert met(measured({TORCH: 10.0, OURS: 13.0})) == ["yes"]
    assert met(measured({TORCH: 10.0, OURS: 13.1})) == ["no"]


def test_only_a_known_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "linear", "--small", "--repeats", "1", "--output", str(tmp_path), "--only"]
    assert main([*arguments, "rank 4, slice"]) == 0
    with (tmp_path / "linear.csv").open(encoding="utf-8") as file:
        assert {row["case"] for row in csv.DictReader(file)} == {"rank 4, slice of dim 1"}
    assert main([*arguments, "rank 5"]) == 2
    assert "no case of this benchmark has 'rank 5' in its name" in capsys.readouterr().err
