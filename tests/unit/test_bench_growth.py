"""`bench growth` at tiny sizes: rows, the work it counts, and its targets; nothing looks at how long a step took."""

from __future__ import annotations

import csv
import dataclasses
import math
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from torch.utils.flop_counter import FlopCounterMode

from megatron_frozen.bench import growth
from megatron_frozen.bench.growth_step import PointConfig, build_step
from megatron_frozen.bench.runner import STAMP, BenchConfig, Row
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


def rows_of(size: str, values: tuple[int, ...], **growths: tuple[float, ...]) -> list[Row]:
    rows: list[Row] = [{"size": size, "value": value} for value in values]
    for name in ("time", "memory", "work"):
        for row, grown in zip(rows, growths.get(name, (1.0,) * len(values)), strict=True):
            row[f"{name}_growth"] = grown
    return rows


def met(rows: list[Row], *, num_cores: int = 2) -> list[object]:
    return [row["met"] for row in growth.verdicts(rows, num_cores=num_cores)]


def test_targets() -> None:
    good = rows_of("sequence", (256, 512), time=(1, 2.2), memory=(1, 2), work=(1, 2.1))
    assert met(good) == ["yes", "yes"]
    assert met(rows_of("sequence", (256, 512), time=(1, 2.4), memory=(1, 2.3), work=(1, 2.1))) == ["no", "no"]
    assert met(rows_of("documents", (1, 2), time=(1, 0.95), work=(1, 0.7))) == ["yes", "yes"], "less work, less time"
    assert met(rows_of("documents", (1, 2), memory=(1, 1.2))) == ["yes", "no"]
    crowded = rows_of("tensor_parallel", (1, 2, 4), time=(1, 0.6, 3))
    assert met(crowded) == ["yes", "yes"]
    assert met(crowded, num_cores=4) == ["no", "yes"]
    assert met(rows_of("batch", (1, 2), memory=(math.nan, math.nan))) == ["yes"], "where the system does not tell"
