"""Timing, memory, stamps and tables of the benchmarks; no test here looks at how long something took."""

from __future__ import annotations

import csv
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure

from megatron_frozen.bench import runner
from megatron_frozen.bench.runner import (
    COMMIT,
    STAMP,
    BenchConfig,
    bar_picture,
    commit,
    medians_ms,
    num_threads,
    once_ms,
    stamp,
    telling,
    text_table,
    write_csv,
)
from megatron_frozen.errors import ConfigError


def test_samples_are_interleaved_and_the_median_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    called: list[str] = []
    seconds = {"a": iter([9.0, 1.0, 1.0, 2.0, 30.0]), "b": iter([9.0, 1.0, 5.0, 5.0, 4.0])}

    def clock(way: Callable[[], str], *, calls: int) -> float:
        name = way()
        called.append(name * calls)
        return next(seconds[name])

    monkeypatch.setattr(runner, "_cpu_s", clock)
    medians = medians_ms({"a": lambda: "a", "b": lambda: "b"}, config=BenchConfig(output=tmp_path, repeats=3))
    assert medians == {"a": 2e3, "b": 5e3}
    assert called[4:] == ["a", "b"] * 3


def test_short_calls_are_timed_in_a_loop(tmp_path: Path) -> None:
    calls = 0

    def way() -> None:
        nonlocal calls
        calls += 1

    assert medians_ms({"a": way}, config=BenchConfig(output=tmp_path, repeats=2))["a"] > 0
    assert calls == 2 + 2 * 50


def test_a_slow_way_is_timed_once_when_it_is_warm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seconds = iter([9.0, 2.0])  # the first call sets up what it needs
    monkeypatch.setattr(runner, "_cpu_s", lambda _, *, calls: calls * next(seconds))
    assert once_ms(lambda: None, config=BenchConfig(output=tmp_path)) == 2e3


def test_memory_of_one_call() -> None:
    """Only what lives at once counts, and what was there before does not.

    In a process of its own: late in a long one the allocator cuts even 64 MiB from what it has kept, and not always
    from the same place, so that both live in memory. In a new one they are mapped, and unmapped when freed.
    """
    code = """
import torch
from megatron_frozen.bench.runner import extra_mib

def way():
    torch.ones(2**24)
    return torch.ones(2**24)

held = torch.ones(2**24)
print(extra_mib(way, device="cpu"))
print(extra_mib(lambda: held.add_(1), device="cpu"))
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=300)
    new, in_place = map(float, done.stdout.split())
    if not math.isnan(new):
        assert 60 < new < 100
        assert in_place < 4


def test_threads_are_given_back() -> None:
    before = torch.get_num_threads()
    with num_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


def test_the_stamp_names_machine_and_versions_but_no_place(tmp_path: Path) -> None:
    mark = stamp(BenchConfig(output=tmp_path))
    versions = {"python", "torch", "megatron_frozen", "transformer_engine", "transformers", "peft"}
    assert set(mark) == {"date", "cpu", "cores", "device", "threads", "kernels", "sizes", "cases", "commit"} | versions
    assert tuple(mark) == (*STAMP, COMMIT)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", str(mark["date"]))
    assert mark["torch"] == torch.__version__
    assert not re.search(r"/(home|root|work|tmp|usr)/", str(mark))


def test_the_stamp_says_how_much_was_measured_and_by_which_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for why_not, said in ((None, "yes"), ("there is no C++ compiler here", "no")):
        monkeypatch.setattr(runner, "absent", lambda why_not=why_not: why_not)
        assert stamp(BenchConfig(output=tmp_path))["kernels"] == said
    whole, part = (stamp(BenchConfig(output=tmp_path, small=small, only="x" * small)) for small in (False, True))
    assert (whole["sizes"], whole["cases"]) == ("full", "all")
    assert (part["sizes"], part["cases"]) == ("small", "x")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that the stamp takes for the package's, and asks git about anew."""
    folder = tmp_path / "checkout/package"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    monkeypatch.setattr(runner, "_PACKAGE", folder)
    commit.cache_clear()
    yield folder
    commit.cache_clear()


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false")
    command = ["git", *who, "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.strip()


@pytest.mark.skipif(shutil.which("git") is None, reason="makes a checkout, and there is no git here")
def test_the_stamp_names_the_commit_of_the_package(package: Path) -> None:
    def asked() -> str:
        commit.cache_clear()
        return commit()

    git(package.parent, "init", "--quiet")
    assert asked() == "", "no commit yet"
    (package.parent / "results.csv").touch()
    git(package.parent, "add", "results.csv")
    git(package.parent, "commit", "--quiet", "-m", "all but the package")
    assert asked() == "", "installed inside a checkout of something else"
    git(package, "add", ".")
    git(package, "commit", "--quiet", "-m", "the package")
    head = git(package, "rev-parse", "--short", "HEAD")
    assert asked() == head
    (package.parent / "results.csv").write_text("that a benchmark wrote", encoding="utf-8")
    assert asked() == head
    (package / "__init__.py").write_text("edited = True", encoding="utf-8")
    assert asked() == f"{head}+"
    git(package, "commit", "--quiet", "-a", "-m", "edited")
    (package / "new.py").touch()
    assert commit() == f"{head}+", "all of one run is of the code that it began with"
    assert asked() == git(package, "rev-parse", "--short", "HEAD") + "+"


@pytest.mark.parametrize(
    "error", [FileNotFoundError("git"), subprocess.TimeoutExpired("git", 20)], ids=["none", "stuck"]
)
def test_the_stamp_names_no_commit_where_git_does_not_answer(
    error: Exception, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], **_: object) -> None:
        assert str(package) in command
        raise error

    monkeypatch.setattr(subprocess, "run", run)
    assert commit() == ""


def test_csv_and_table(tmp_path: Path) -> None:
    rows: list[runner.Row] = [{"a": 1.23456, "b": "x"}, {"a": 2e-7, "c": 12345.6}]
    write_csv(tmp_path / "deep/rows.csv", rows)
    with (tmp_path / "deep/rows.csv").open(encoding="utf-8") as file:
        assert list(csv.DictReader(file)) == [
            {"a": "1.23456", "b": "x", "c": ""},
            {"a": "2e-07", "b": "", "c": "12345.6"},
        ]
    assert text_table(rows, ("a", "b", "c")) == "a         b  c\n1.23      x\n2.00e-07     12346"


def test_tables_survive_a_file_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.csv"
    with pytest.raises(OSError, match="full"), telling("figures", path=path):
        raise OSError("full")
    assert capsys.readouterr().out == "figures\n"
    with telling("figures", path=path):
        assert capsys.readouterr().out == "", "a reader that has gone would end the command before"
    assert capsys.readouterr().out == f"figures\n\nwritten to {path}\n"


def test_picture(tmp_path: Path) -> None:
    bar_picture(tmp_path / "bars.png", {"g": {"a": 1.0, "b": 3.0}, "h": {"b": 2.0}}, title="t", label="ms")
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")


def test_bars_begin_at_zero_unless_one_would_hide_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    monkeypatch.setattr(runner, "write_picture", lambda _, draw: drawn.append(draw))
    for longest in (3.0, 300.0):
        axes = Figure().subplots()
        bar_picture(tmp_path / "bars.png", {"ours": {"step": 1.0}, "peer": {"step": longest}}, title="t", label="s")
        drawn.pop()(axes)
        assert axes.get_yscale() == ("linear" if longest == 3 else "log")
        assert [text.get_text() for text in axes.texts] == ["1", f"{longest:g}"]
        assert axes.get_legend() is None, "one kind of bar is what the label says"
        if longest == 3:
            assert axes.get_ylim()[0] == 0


def test_what_cannot_be_measured_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="a benchmark of 0 repeats has no median; give 1 or more"):
        BenchConfig(output=tmp_path, repeats=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="torch finds no CUDA device; give --device cpu"):
        BenchConfig(output=tmp_path, device="cuda")
