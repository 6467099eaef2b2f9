"""What all measurements share: interleaved timing, memory, the stamp, tables and CSV files."""

from __future__ import annotations

import csv
import ctypes
import datetime
import gc
import math
import os
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from megatron_frozen.diagnostics.facts import aligned, cpu_name, installed_version
from megatron_frozen.errors import ConfigError
from megatron_frozen.io import atomic_write, write_picture
from megatron_frozen.kernels import absent

Row = dict[str, object]
REPEATS = 15
STAMP = ("date", "cpu", "device", "cores", "python", "torch", "megatron_frozen", "transformer_engine", "transformers",
         "peft", "threads", "kernels", "sizes", "cases")  # fmt: skip
COMMIT = "commit"
FULL, SMALL, ALL_CASES = "full", "small", "all"
_SAMPLE_S = 2e-3  # one sample of a short call is a loop of about this length
_MAX_CALLS = 50
_MIB = 2**20
_MAX_LABELLED, _MAX_TIMES = 24, 20  # bars with their values on them; the longest of the shortest on a linear axis
_RESET = Path("/proc/self/clear_refs")
_PACKAGE = Path(__file__).parents[1]
_GIT_S = 20.0  # the longest that git may take


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchConfig:
    """How a benchmark is run."""

    output: Path
    """Folder for its CSV and PNG files."""
    device: str = "cpu"
    """Device type, cpu or cuda."""
    repeats: int = REPEATS
    """Samples of each way; the median counts."""
    small: bool = False
    """Tiny sizes: the same code without the waiting, but for torch.compile's; its times mean nothing."""
    only: str = ""
    """Measure only the cases whose names contain this text, where a benchmark has cases."""

    def __post_init__(self) -> None:
        """Refuse what cannot be measured."""
        if self.repeats < 1:
            raise ConfigError(f"a benchmark of {self.repeats} repeats has no median; give 1 or more")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError(
                "this benchmark was asked to run on CUDA, and torch finds no CUDA device; give --device cpu"
            )


def medians_ms(ways: Mapping[str, Callable[[], object]], *, config: BenchConfig) -> dict[str, float]:
    """Return each way's median time of a call: samples go A B C A B C, so that what else the machine does hits all.

    Each way is called once before. A sample of a short call is the mean of a loop. On CUDA the device's own clock
    counts."""
    clock = _cuda_s if config.device == "cuda" else _cpu_s
    calls = {}
    for name, way in ways.items():
        clock(way, calls=1)
        calls[name] = min(max(math.ceil(_SAMPLE_S / clock(way, calls=1)), 1), _MAX_CALLS)
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(config.repeats):
        for name, way in ways.items():
            samples[name].append(clock(way, calls=calls[name]))
    return {name: statistics.median(times) * 1e3 for name, times in samples.items()}


def once_ms(way: Callable[[], object], *, config: BenchConfig) -> float:
    """Return the time of one call, the second, as the first one also sets up what it needs."""
    clock = _cuda_s if config.device == "cuda" else _cpu_s
    clock(way, calls=1)
    return clock(way, calls=1) * 1e3


def _cpu_s(way: Callable[[], object], *, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        way()
    return (time.perf_counter() - start) / calls


def _cuda_s(way: Callable[[], object], *, calls: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(calls):
        way()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / calls


def extra_mib(way: Callable[[], object], *, device: str) -> float:
    """Return how far memory rose above what it was before, during one call, in MiB.

    CUDA: by the allocator's own count. CPU: the highest resident size of the whole process, after free pages went back
    to the system, so memory of libraries and of other threads counts, and so does noise of some 0.1 MiB. NaN where the
    system does not tell."""
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        way()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / _MIB
    with peak_mib() as peak:
        before = _status_kib("VmRSS") / 1024 if _tells_peaks() else math.nan
        way()
    return peak() - before


@contextmanager
def peak_mib() -> Iterator[Callable[[], float]]:
    """Yield a function that returns the highest resident size of this process since the body began, in MiB.

    Free pages go back to the system first. NaN where the system does not tell."""
    if not _tells_peaks():
        yield lambda: math.nan
        return
    ctypes.CDLL(None).malloc_trim(0)
    _RESET.write_text("5")  # the highest size starts again from the present one (Linux, proc_pid_clear_refs(5))
    yield lambda: _status_kib("VmHWM") / 1024


def _tells_peaks() -> bool:
    return hasattr(ctypes.CDLL(None), "malloc_trim") and _RESET.exists()


def _status_kib(field: str) -> int:
    match = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"), re.MULTILINE)
    assert match is not None, f"the system does not tell {field}"
    return int(match[1])


@contextmanager
def num_threads(num: int) -> Iterator[None]:
    """Run the body on ``num`` of torch's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(num)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def stamp(config: BenchConfig) -> Row:
    """Return what a figure means nothing without: date, processors, versions, threads, whether the CPU's kernels are
    there, how much was measured, and of which commit. No path and no host name. Its columns are ``STAMP``, which all
    say something, and ``COMMIT``, which does in a git checkout."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "cpu": cpu_name(),
        "device": torch.cuda.get_device_name() if config.device == "cuda" else "cpu",
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "megatron_frozen": installed_version("megatron-frozen"),
        "transformer_engine": installed_version("transformer-engine"),
        "transformers": installed_version("transformers"),
        "peft": installed_version("peft"),
        "threads": torch.get_num_threads(),
        "kernels": "yes" if absent() is None else "no",
        "sizes": SMALL if config.small else FULL,
        "cases": config.only or ALL_CASES,
        COMMIT: commit(),
    }


@cache
def commit() -> str:
    """Return the short hash of the commit that this package runs from, with a + where files of the package differ.

    Asked once, as all of one run is of the code that it began with. Empty where the package is in no git checkout, or
    git is absent or does not answer."""
    try:
        _git("ls-files", "--error-unmatch", "__init__.py")  # it may be installed inside a checkout of something else
        return _git("rev-parse", "--short", "HEAD") + "+" * bool(_git("status", "--porcelain", "."))
    except (OSError, subprocess.SubprocessError):
        return ""


def _git(*arguments: str) -> str:
    command = ["git", "--no-optional-locks", "-C", str(_PACKAGE), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=_GIT_S).stdout.strip()


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write rows of any columns, in the order in which they first appear; a row without one leaves it empty."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    with atomic_write(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


@contextmanager
def telling(text: str, *, path: Path) -> Iterator[None]:
    """Print ``text``, a benchmark's tables, after the body has written them to ``path``.

    A full disk leaves the tables on the screen, and a reader that has gone leaves the file."""
    try:
        yield
    finally:
        print(text)
    print(f"\nwritten to {path}")


def text_table(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """Return the asked columns as aligned text; numbers with three digits that count."""
    return aligned([list(columns), *([shown(row.get(column, "")) for column in columns] for row in rows)])


def shown(value: object) -> str:
    """Return a number with three digits that count, and anything else as it is."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.2e}" if 0 < abs(value) < 1e-3 else f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def bar_picture(path: Path, groups: Mapping[str, Mapping[str, float]], *, title: str, label: str) -> None:
    """Draw groups of bars into a PNG file: from zero, so that lengths can be compared, and on a logarithmic axis only
    where the longest would hide the others. A few have their values on them."""
    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    values = [value for group in groups.values() for value in group.values()]

    def draw(axes) -> None:
        width = 0.8 / len(names)
        for index, name in enumerate(names):
            places = [place + index * width for place, group in enumerate(groups.values()) if name in group]
            bars = axes.bar(places, [group[name] for group in groups.values() if name in group], width, label=name)
            if len(values) <= _MAX_LABELLED:
                axes.bar_label(bars, fmt=shown, fontsize=7)
        axes.set_xticks(
            [place + 0.4 - width / 2 for place in range(len(groups))], list(groups), fontsize=6, rotation=30, ha="right"
        )
        if max(values) > _MAX_TIMES * min(values):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
        axes.set_ylabel(label)
        axes.set_title(title)
        axes.grid(visible=True, axis="y", alpha=0.3)
        if len(names) > 1:
            axes.legend(fontsize=7)

    write_picture(path, draw)
