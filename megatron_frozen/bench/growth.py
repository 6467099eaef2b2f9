"""How a LoRA step grows: its time and memory as one size after the other is raised, beside the work that it is.

A small decoder (4 layers, hidden 256, bf16, fp32 adapters on all seven projections) on a CPU; memory is what one step
takes above what lay there before it. All steps of one size are timed in turn.

Tensor-parallel ranks share the threads that one process has: on two cores one rank runs on two threads, and two on one
each. Where the ranks do not take these threads without a remainder, only memory is judged. Each rank multiplies its
part of the work, which is counted over all; beside it, each sums over gloo, and does on its own what is not cut: norms,
rotation, the product with each projection's replicated factor, and Python's part of a step.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from functools import partial

import torch

from megatron_frozen.bench.growth_step import PointConfig, build_step, time_on_rank
from megatron_frozen.bench.runner import (
    BenchConfig,
    Row,
    extra_mib,
    medians_ms,
    shown,
    stamp,
    telling,
    text_table,
    write_csv,
)
from megatron_frozen.bench.targets import at_most, number
from megatron_frozen.errors import ConfigError
from megatron_frozen.io import write_panels
from megatron_frozen.testing import run_ranks

TENSOR_PARALLEL, DOCUMENTS = "tensor_parallel", "documents"
SIZES: dict[str, tuple[int, ...]] = {
    "sequence": (256, 512, 1024, 2048, 4096),
    "batch": (1, 2, 4, 8),
    "rank": (4, 8, 16, 32, 64, 128),
    "vocabulary": (2048, 8192, 32768, 65536),
    DOCUMENTS: (1, 2, 4, 8, 16, 32),
    TENSOR_PARALLEL: (1, 2, 4),
}
_AXES = {
    "sequence": "tokens of a row",
    "batch": "rows",
    "rank": "rank of the adapters",
    "vocabulary": "vocabulary",
    DOCUMENTS: "documents in a packed row",
    TENSOR_PARALLEL: "tensor-parallel ranks",
}
SMALL_SIZES = {size: values[:2] for size, values in SIZES.items()}
_BASE, _SMALL_BASE = PointConfig(), PointConfig(sequence=32, vocabulary=256, hidden=64, layers=1)
_LONG = 2048  # tokens of the row that documents are packed into, and of one whose work outweighs what ranks say
_MAX_REPEATS, _ROUNDS = 5, 3
_SLACK = 1.1
_MAX_LINEAR = 3.0  # growth of work that is drawn on a linear axis
COLUMNS = ("size", "value", "threads", "median_ms", "extra_mib", "gflop", "time_growth", "memory_growth", "work_growth")


def run(config: BenchConfig) -> None:
    """Measure, print tables, write growth.csv and growth.png.

    Raises ConfigError where ``config.only`` names no size.
    """
    mark = stamp(dataclasses.replace(config, device="cpu"))
    rows: list[Row] = []
    targets: list[Row] = []
    for size in SIZES:
        if config.only in size:
            measured = measure(size, config=config)
            print(text_table(measured, COLUMNS), end="\n\n", flush=True)
            rows += measured
            targets += verdicts(measured)
    if not rows:
        raise ConfigError(f"no size of this benchmark has '{config.only}' in its name; it raises {', '.join(SIZES)}")
    by_size = {size: [row for row in rows if row["size"] == size] for size in SIZES}
    draws = [partial(_draw, size=size, rows=measured) for size, measured in by_size.items() if measured]
    path = config.output / "growth.csv"
    with telling(text_table(targets, ("size", "figure", "value", "target", "met")), path=path):
        write_csv(path, [mark | row for row in rows + targets])
        write_panels(path.with_suffix(".png"), draws, num_columns=3)


def measure(size: str, *, config: BenchConfig) -> list[Row]:
    """Return a row for each value of ``size``, the other sizes staying as they are."""
    base = _SMALL_BASE if config.small else _BASE
    if size in (DOCUMENTS, TENSOR_PARALLEL) and not config.small:
        base = dataclasses.replace(base, sequence=_LONG)
    values = (SMALL_SIZES if config.small else SIZES)[size]
    points = {value: dataclasses.replace(base, **{size: value}) for value in values}
    config = dataclasses.replace(config, repeats=min(config.repeats, _MAX_REPEATS))
    measured = _on_ranks(points, config=config) if size == TENSOR_PARALLEL else _in_turn(points, config=config)
    rows: list[Row] = [
        {"kind": "time", "size": size, "value": value, "median_ms": time, "extra_mib": memory,
         "gflop": point.work() / 1e9, "threads": _threads_of_each(point), **dataclasses.asdict(point)}
        for (value, point), (time, memory) in zip(points.items(), measured, strict=True)
    ]  # fmt: skip
    for row in rows:
        for figure, growth in (("median_ms", "time"), ("extra_mib", "memory"), ("gflop", "work")):
            # a tiny step may fit in memory that is there, and take 0 MiB
            row[f"{growth}_growth"] = number(row, figure) / max(number(rows[0], figure), 1e-3)
    return rows


def _threads_of_each(point: PointConfig) -> int:
    """Return the threads of each rank, which together take those of this process, but not less than one each."""
    return max(torch.get_num_threads() // point.tensor_parallel, 1)


def _in_turn(points: dict[int, PointConfig], *, config: BenchConfig) -> list[tuple[float, float]]:
    steps = {str(value): build_step(point) for value, point in points.items()}
    times = medians_ms(steps, config=config)
    return [(times[name], extra_mib(step, device="cpu")) for name, step in steps.items()]


def _on_ranks(points: dict[int, PointConfig], *, config: BenchConfig) -> list[tuple[float, float]]:
    """Time each number of ranks, in turn; the slowest rank counts, and the one that takes most memory."""
    num_steps = max(config.repeats, 1)
    rounds: dict[int, list[tuple[float, float]]] = {value: [] for value in points}
    for _ in range(1 if config.small else _ROUNDS):
        for value, point in points.items():
            body = partial(time_on_rank, point=point, threads=_threads_of_each(point), num_steps=num_steps)
            ranks = run_ranks(value, body, timeout_s=600)
            rounds[value].append((max(time for time, _ in ranks), max(memory for _, memory in ranks)))
    return [tuple(map(statistics.median, zip(*each, strict=True))) for each in rounds.values()]


def verdicts(rows: Sequence[Row]) -> list[Row]:
    """Return how much faster than its work a step grew at worst in time, and than its size in memory.

    Each row after the first is judged beside the first; in time, where both run on as many threads in all. Where the
    work falls, time is to fall with it, although a part of it is fixed."""
    first, *later = rows
    of = {"size": first["size"], "from": first["value"], "to": rows[-1]["value"]}
    timed = [row for row in later if number(row, "tensor_parallel") * number(row, "threads") == first["threads"]]
    targets: list[Row] = []
    if timed:
        time = max(number(row, "time_growth") / number(row, "work_growth") for row in timed)
        of_time = of | {"to": timed[-1]["value"]}
        targets.append(at_most("growth of time over that of work, at worst", time, limit=_SLACK, of=of_time))
    memory = max(number(row, "memory_growth") / _allowed(row, first) for row in later)
    if not math.isnan(memory):
        targets.append(at_most("growth of memory over that of the size, at worst", memory, limit=_SLACK, of=of))
    return targets


def _allowed(row: Row, first: Row) -> float:
    """Return how far memory may grow: as the size does, and not at all with documents or ranks."""
    if row["size"] in (DOCUMENTS, TENSOR_PARALLEL):
        return 1.0
    return number(row, "value") / number(first, "value")


def _draw(axes, *, size: str, rows: Sequence[Row]) -> None:
    values = [number(row, "value") for row in rows]
    for growth, figure, unit in (
        ("time", "median_ms", "ms"),
        ("memory", "extra_mib", "MiB"),
        ("work", "gflop", "GFLOP"),
    ):
        times = [number(row, f"{growth}_growth") for row in rows]
        axes.plot(values, times, marker=".", label=f"{growth}, 1 = {shown(number(rows[0], figure))} {unit}")
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.set_xlabel(_AXES[size], fontsize=8)
    if max(number(row, "work_growth") for row in rows) > _MAX_LINEAR:
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter("{x:g}")
    else:
        axes.set_ylim(bottom=0)
    axes.set_ylabel("times the first", fontsize=8)
    axes.tick_params(labelsize=7)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize=7)
