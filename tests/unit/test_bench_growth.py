"""`bench growth` at tiny sizes: rows, the work it counts, and its targets; nothing looks at how long a step took."""

from __future__ import annotations

import csv
import dataclasses
import math
from functools import partial
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from torch.utils.flop_counter import FlopCounterMode

from megatron_frozen.bench import growth, growth_step
from megatron_frozen.bench.growth_step import PointConfig, build_step
from megatron_frozen.bench.runner import STAMP, BenchConfig, Row, num_threads
from megatron_frozen.cli import main

TINY = PointConfig(sequence=32, vocabulary=256, hidden=64, layers=2, rank=4)


def test_work_of_the_products_is_what_runs() -> None:
    """Against torch's own count, which does not see attention on a CPU."""
    step = build_step(TINY)
    with FlopCounterMode(display=False) as seen:
        step()
    squares = 7 * TINY.sequence**2 * TINY.hidden * TINY.layers
    counted = {str(op): flops for op, flops in seen.get_flop_counts()["Global"].items()}
    products = sum(flops for name, flops in counted.items() if "mm" in name)
    # It sees no product into fp32, as the factors' gradients are, and the first layer's q, k and v need no dX.
    assert 0.9 * (TINY.work() - squares) < products <= TINY.work() - squares


def test_work_grows_as_it_should() -> None:
    def work(**sizes: int) -> float:
        return dataclasses.replace(TINY, **sizes).work()

    assert work(batch=2) == 2 * TINY.work()
    assert work(tensor_parallel=2) == TINY.work()
    assert 2 * TINY.work() < work(sequence=64) < 4 * TINY.work()
    squares = 7 * 32**2 * 64 * 2
    assert TINY.work() - work(documents=4) == squares * 3 / 4
    assert work(vocabulary=512) - TINY.work() == 4 * 32 * 256 * 64


def test_a_step_trains() -> None:
    step = build_step(dataclasses.replace(TINY, documents=2))
    losses = [float(step()) for _ in range(8)]
    assert losses[-1] < losses[0]


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "growth", "--small", "--repeats", "1", "--output", str(tmp_path), "--only"]
    assert main([*arguments, "documents"]) == 0
    with (tmp_path / "growth.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert all(row[column] for row in rows for column in STAMP)
    times = [row for row in rows if row["kind"] == "time"]
    assert [(row["size"], row["value"], row["documents"]) for row in times] == [
        ("documents", "1", "1"),
        ("documents", "2", "2"),
    ]
    assert float(times[0]["time_growth"]) == 1
    assert all(float(row["median_ms"]) > 0 for row in times)
    assert (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG")
    assert main([*arguments, "depth"]) == 2
    assert "no size of this benchmark has 'depth' in its name" in capsys.readouterr().err


def test_pictures_have_units(tmp_path: Path) -> None:
    rows = growth.measure("rank", config=BenchConfig(output=tmp_path, repeats=1, small=True))
    axes = Figure().subplots()
    growth._draw(axes, size="rank", rows=rows)
    assert axes.get_xlabel() == "rank of the adapters"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["4", "8"]
    names = [text.split(", 1 = ") for text in axes.get_legend_handles_labels()[1]]
    assert [(name, first.split()[1]) for name, first in names] == [("time", "ms"), ("memory", "MiB"), ("work", "GFLOP")]
    assert set(growth._AXES) == set(growth.SIZES)


def test_tensor_parallel_ranks(tmp_path: Path) -> None:
    rows = growth.measure("tensor_parallel", config=BenchConfig(output=tmp_path, repeats=1, small=True))
    assert [row["tensor_parallel"] for row in rows] == [1, 2]
    assert rows[0]["gflop"] == rows[1]["gflop"]


def test_ranks_share_the_threads_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank runs on both, two on one each, and so do four, whose time is not judged."""
    asked: list[tuple[int, int]] = []

    def ranks(num_ranks: int, body: partial, *, timeout_s: float) -> list[tuple[float, float]]:
        del timeout_s
        asked.append((num_ranks, body.keywords["threads"]))
        return [(1.0, 1.0)] * num_ranks

    monkeypatch.setattr(growth, "run_ranks", ranks)
    with num_threads(2):
        rows = growth.measure("tensor_parallel", config=BenchConfig(output=tmp_path))
    assert asked == [(1, 2), (2, 1), (4, 1)] * 3
    assert [row["threads"] for row in rows] == [2, 1, 1]
    assert [row["to"] for row in growth.verdicts(rows)] == [2, 4]


def test_a_rank_runs_on_the_threads_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(growth_step, "build_step", lambda _: lambda: seen.append(torch.get_num_threads()))
    monkeypatch.setattr(growth_step, "initialize_model_parallel", lambda _: None)
    with num_threads(1):
        growth_step.time_on_rank(0, 1, point=TINY, threads=2, num_steps=3)
        assert torch.get_num_threads() == 1
    assert seen == [2] * 6, "warm, timed, and the one whose memory counts"


def rows_of(size: str, values: tuple[int, ...], **growths: tuple[float, ...]) -> list[Row]:
    rows: list[Row] = [{"size": size, "value": value, "tensor_parallel": 1, "threads": 2} for value in values]
    for name in ("time", "memory", "work"):
        for row, grown in zip(rows, growths.get(name, (1.0,) * len(values)), strict=True):
            row[f"{name}_growth"] = grown
    return rows


def met(rows: list[Row]) -> list[object]:
    return [row["met"] for row in growth.verdicts(rows)]


def test_targets() -> None:
    good = rows_of("sequence", (256, 512), time=(1, 2.2), memory=(1, 2), work=(1, 2.1))
    assert met(good) == ["yes", "yes"]
    assert met(rows_of("sequence", (256, 512), time=(1, 2.4), memory=(1, 2.3), work=(1, 2.1))) == ["no", "no"]
    assert met(rows_of("documents", (1, 2), time=(1, 0.76), work=(1, 0.7))) == ["yes", "yes"], "less work, less time"
    assert met(rows_of("documents", (1, 2), time=(1, 0.78), work=(1, 0.7))) == ["no", "yes"]
    assert met(rows_of("documents", (1, 2), memory=(1, 1.2))) == ["yes", "no"]
    assert met(rows_of("batch", (1, 2), memory=(math.nan, math.nan))) == ["yes"], "where the system does not tell"


def test_the_row_that_others_are_judged_beside_is_not_judged() -> None:
    rows = rows_of("batch", (1, 2, 4), time=(1, 1.2, 2.8), memory=(1, 1.5, 2), work=(1, 2, 4))
    assert [row["value"] for row in growth.verdicts(rows)] == [2.8 / 4, 1.5 / 2]


@pytest.mark.parametrize(
    ("threads", "is_met"),
    [((2, 1, 1), ["yes", "yes"]), ((4, 2, 1), ["no", "yes"]), ((1, 1, 1), ["yes"]), ((3, 1, 1), ["yes"])],
    ids=["on two cores", "on four", "on one", "which two and four do not share evenly"],
)
def test_time_is_judged_on_as_many_threads(threads: tuple[int, ...], is_met: list[str]) -> None:
    rows = rows_of("tensor_parallel", (1, 2, 4), time=(1, 0.9, 3))
    for row, num in zip(rows, threads, strict=True):
        row |= {"tensor_parallel": row["value"], "threads": num}
    assert met(rows) == is_met
