"""`bench linear` at tiny sizes: its cases, rows, counts and targets; no test here looks at how long something took."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from megatron_frozen.bench import linear, linear_cases
from megatron_frozen.bench.linear import BARE, BOTH, DGRAD, DISTINCT, FLATTEN, FORWARD, OLD, OURS, TORCH
from megatron_frozen.bench.linear_cases import FULL, HALF, Case, cases
from megatron_frozen.bench.runner import STAMP, BenchConfig, Row
from megatron_frozen.cli import main
from megatron_frozen.diagnostics import Recorder
from megatron_frozen.gemm import peers
from megatron_frozen.layout import fold_leading

SMALL = cases(linear_cases.SMALL)
PRODUCTS = (FORWARD, DGRAD, BOTH)


def starting(name: str) -> Case:
    return next(case for case in SMALL if case.name.startswith(name))


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


def test_the_control_has_its_full_size_and_few_samples_on_a_cpu() -> None:
    half, full = cases(HALF)[-1], cases(FULL)[-1]
    assert half == replace(full, max_samples=3)
    assert (half.lead, half.out_features, half.in_features) == ((4096, 1), 10240, 8192)
    assert {case.max_samples for case in (*cases(HALF)[:-1], *cases(FULL), *SMALL)} == {None}


def test_no_more_samples_than_the_case_takes(tmp_path: Path) -> None:
    case = replace(SMALL[-1], max_samples=1)
    rows = linear._measure(case, DGRAD, config=BenchConfig(output=tmp_path, repeats=2))
    assert {row["samples"] for row in rows} == {1}
    rows = linear._measure(SMALL[-1], DGRAD, config=BenchConfig(output=tmp_path, repeats=2))
    assert {row["samples"] for row in rows} == {2}


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
    case = starting("logits, transposed leading")
    dense = torch.randn(*case.lead, case.out_features)
    assert case.layout(dense).stride() == (case.out_features, dense.numel(), 1)
    with Recorder() as seen:
        peers.batched(case.layout(dense), torch.randn(case.out_features, 8))
    assert seen.count("aten.bmm") == 1


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("name", ["contiguous", "transposed leading"])
def test_old_way_multiplies_one_token_after_the_other_but_for_dw(name: str, product: str) -> None:
    """Megatron-core gave dY to matmul as it lay, and flattened both operands of dW."""
    _, ways = linear._ways(starting(name), product, device="cpu")
    with Recorder() as seen:
        results = linear._tensors(ways[OLD]())
    num_products = 1 + (product == BOTH)
    num_batched = int(name != "contiguous")
    assert (seen.count("aten.bmm"), seen.count("aten.mm")) == (num_batched, num_products - num_batched)
    for old, bare in zip(results, linear._tensors(ways[BARE]()), strict=True):
        assert torch.allclose(old.reshape(bare.shape), bare, rtol=1e-2, atol=1e-1)


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_distinct_rows_are_multiplied_once_and_contiguous(case: Case, product: str) -> None:
    given, ways = linear._ways(case, product, device="cpu")
    assert (DISTINCT in ways) == (case.repeats > 1) == case.name.startswith("expanded middle")
    if DISTINCT not in ways:
        return
    with Recorder() as seen:
        results = linear._tensors(ways[DISTINCT]())
    assert seen.count("aten.mm") == 1 + (product == BOTH)
    assert (seen.count("aten.bmm"), seen.copied_bytes()) == (0, 0)
    bare = linear._tensors(ways[BARE]())
    every, rows = bare[0].view(*case.lead, -1), results[0]
    assert rows.shape == (case.lead[0], every.shape[-1])
    assert torch.allclose(rows.unsqueeze(1).expand_as(every), every, rtol=1e-2, atol=1e-1)
    way = ways[DISTINCT]
    assert isinstance(way, partial)
    assert way.args[0].is_contiguous()
    assert torch.equal(way.args[0], given[:, 0])
    if product == BOTH:
        grad_RO, input_RI = way.args[2]
        assert grad_RO.is_contiguous()
        assert input_RI.is_contiguous()
        assert grad_RO.shape == (2 * case.lead[0], case.out_features)  # two bf16 parts of a sum in fp32
        assert input_RI.shape == (2 * case.lead[0], case.in_features)
        assert torch.allclose(results[1], bare[1], rtol=1e-2, atol=2e-1)


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
        for product in PRODUCTS:
            for way in (OLD, FLATTEN, OURS, BARE, *((DISTINCT,) if case.repeats > 1 else ())):
                row = times.pop((case.name, product, way))
                assert float(row["median_ms"]) > 0
                assert (row["relative_error"] == "") == (way == DISTINCT or row["samples"] == "0")
                assert not row["relative_error"] or float(row["relative_error"]) < 1e-2
    assert {way for _, _, way in times} == {TORCH, OURS}
    assert (folder / "linear.png").read_bytes().startswith(b"\x89PNG")


def test_the_floor_under_ours_is_that_of_the_distinct_rows(written: tuple[Path, list[dict[str, str]]]) -> None:
    _, rows = written
    floors = ("time of ours over the bare product's", "time of ours over that of the distinct rows")
    found = {(row["case"], row["product"]): row for row in rows if row["figure"] in floors}
    for case in SMALL:
        for product in PRODUCTS:
            row = found.pop((case.name, product))
            assert row["figure"] == floors[case.repeats > 1]
            if case.repeats > 1:
                assert row["target"] == ("at most 1.05" if product == DGRAD else "at most 1.25")
    assert not found


def test_ours_copies_nothing_where_no_copy_is_needed(written: tuple[Path, list[dict[str, str]]]) -> None:
    _, rows = written
    ours = [row for row in rows if row["way"] == OURS and row["copied_bytes"]]
    assert len(ours) == 3 * len(SMALL)
    assert {row["batched_products"] for row in ours} == {"0"}
    for row in ours:
        sums_rows = row["product"] == BOTH and row["repeats"] != "1"
        if sums_rows:  # dY's rows are copied for each part, and the parts without our kernels
            assert int(row["copied_bytes"]) < 2 * math.prod(map(int, row["shape"].split("x"))), row
        else:
            assert (int(row["copied_bytes"]) == 0) == (row["needs_copy"] == "False"), row
    flat = [row for row in rows if row["way"] == FLATTEN and row["product"] == DGRAD]
    copied = {case.name for case in SMALL if not (case.folds and case.in_order)}
    copied.remove("strided hidden 24x8x64")  # a reshape takes it as it is, and the product copies it unseen
    assert {row["case"] for row in flat if int(row["copied_bytes"])} == copied


@pytest.mark.parametrize("product", PRODUCTS)
def test_the_time_of_a_slow_old_way_is_that_of_an_eighth_times_8(
    product: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    case = starting("transposed leading")
    seen: list[int] = []

    def once_ms(way: Callable[[], object], *, config: BenchConfig) -> float:
        seen.append(linear._tensors(way())[0].shape[0])
        return 100.0 if len(seen) == 1 else 2.0

    monkeypatch.setattr(linear, "once_ms", once_ms)
    rows = linear._measure(case, product, config=BenchConfig(output=tmp_path, repeats=1))
    assert seen[0] == case.lead[0] // 8
    old = next(row for row in rows if row["way"] == OLD)
    assert (old["median_ms"], old["samples"]) == (800.0, 0)
    assert "copied_bytes" not in old


def test_an_old_way_that_takes_no_time_is_sampled_like_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """However far above the bare product it is, as at tiny sizes."""
    case = starting("transposed leading")
    times = iter((12.0, 0.1))
    monkeypatch.setattr(linear, "once_ms", lambda *_, **__: next(times))
    rows = linear._measure(case, DGRAD, config=BenchConfig(output=tmp_path, repeats=1))
    assert {row["samples"] for row in rows} == {1}


def test_an_old_way_of_one_product_is_not_tried_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It can't be slow, and a call of the control takes long."""
    monkeypatch.delattr(linear, "once_ms")
    rows = linear._measure(starting("control"), BOTH, config=BenchConfig(output=tmp_path, repeats=1))
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
    repeating = good | {BARE: 80.0, DISTINCT: 10.0}
    assert met(measured(repeating, repeats=8)) == ["yes", "yes", "no", "yes"]
    assert met(measured(repeating | {DISTINCT: 9.0}, repeats=8)) == ["no", "yes", "no", "yes"]
    assert met(measured(repeating | {DISTINCT: 9.0}, repeats=8, needs_copy=True)) == ["yes", "yes", "no"]
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
