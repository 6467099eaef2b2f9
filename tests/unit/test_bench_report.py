"""The results page, and the command that runs every benchmark and writes it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from megatron_frozen.bench import commands
from megatron_frozen.bench.runner import BenchConfig, Row, stamp, write_csv
from megatron_frozen.bench.targets import at_least, at_most, number
from megatron_frozen.cli import main
from megatron_frozen.errors import MegatronFrozenError

CONFIG = BenchConfig(output=Path())


def fill(folder: Path) -> None:
    mark = stamp(CONFIG)
    rows: list[Row] = [mark | {"kind": "time", "way": "ours|new", "median_ms": 12.3456, "unused": ""}]
    rows += [mark | {"kind": "time", "way": str(index), "median_ms": 1e-5} for index in range(500)]
    rows += [mark | at_most("ratio", 1.04, limit=1.05, of={"shape": "8x8"})]
    rows += [mark | at_least("gain", 2.0, limit=4, of={"shape": "8x8"})]
    write_csv(folder / "wgrad.csv", rows)
    write_csv(folder / "gpu_check.csv", [mark | {"kind": "check", "check": "x", "outcome": "ok"}])
    (folder / "wgrad.png").write_bytes(b"\x89PNG")


def test_page(tmp_path: Path) -> None:
    fill(tmp_path)
    assert main(["bench", "report", "--output", str(tmp_path)]) == 0
    page = (tmp_path / "README.md").read_text(encoding="utf-8")
    lines = page.splitlines()
    assert [line for line in lines if line.startswith("## ")] == ["## wgrad", "## gpu_check"]
    summary = {line.split(" | ")[0]: line for line in lines if line.startswith("| [")}
    assert "| 1 of 2 |" in summary["| [wgrad](#wgrad)"]
    mark = stamp(CONFIG)
    for fact in ("cpu", "torch", "python", "megatron_frozen"):
        assert f"| {mark[fact]} |" in summary["| [gpu_check](#gpu_check)"]
    assert "| 8x8 | ratio | 1.04 | at most 1.05 | yes |" in lines
    assert "| 8x8 | gain | 2 | at least 4 | no |" in lines
    assert "![wgrad](wgrad.png)" in lines
    assert "![gpu_check](gpu_check.png)" not in lines
    assert "| ours\\|new | 12.3 |" in lines
    assert "| 0 | 1.00e-05 |" in lines
    assert "the first 400 of 501" in page
    assert "unused" not in page
    assert "fp32 buffer" in page  # what the benchmark's module says of itself
    assert "One unattended run on a GPU" in page  # also of a file whose name has an underscore
    assert "Shape suffixes" not in page


def test_a_note_stands_under_the_targets_of_its_benchmark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path)
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "wgrad.md").write_text("\n**gain** misses by half.\n\n- Tried: ünrolling.\n\n", encoding="utf-8")
    (notes / "lora_step.md").write_text("Not run here.", encoding="utf-8")
    pages = []
    for _ in range(2):
        assert main(["bench", "report", "--output", str(tmp_path)]) == 0
        pages.append((tmp_path / "README.md").read_bytes())
    assert pages[0] == pages[1]
    page = pages[0].decode()
    before, after = page.split("\n\n**gain** misses by half.\n\n- Tried: ünrolling.\n\n")
    assert before.endswith("| 8x8 | gain | 2 | at least 4 | no |")
    assert after.startswith("<details><summary>All rows: time")
    assert "Not run here" not in page
    assert f"left out: {notes / 'lora_step.md'}, as there is no lora_step.csv" in capsys.readouterr().out


def test_what_differs_between_stamps_tells_rows_apart(tmp_path: Path) -> None:
    stamps = [stamp(CONFIG) | {"threads": threads, "date": f"2026-01-0{threads}"} for threads in (1, 2)]
    write_csv(tmp_path / "wgrad.csv", [mark | at_most("ratio", 1.0, limit=2, of={"shape": "8"}) for mark in stamps])
    assert main(["bench", "report", "--output", str(tmp_path)]) == 0
    lines = (tmp_path / "README.md").read_text(encoding="utf-8").splitlines()
    header = lines.index("| threads | shape | figure | value | target | met |")
    assert lines[header + 2 :][:2] == [f"| {threads} | 8 | ratio | 1 | at most 2 | yes |" for threads in (1, 2)]


def test_the_summary_names_the_commits_that_were_measured(tmp_path: Path) -> None:
    for name, commits in {"wgrad": ("1a2b3c4",), "linear": ("1a2b3c4", "5d6e7f8+"), "comm": ("",)}.items():
        marks = [stamp(CONFIG) | {"commit": commit} for commit in commits]
        write_csv(
            tmp_path / f"{name}.csv", [mark | at_most("ratio", 1.0, limit=2, of={"shape": "8"}) for mark in marks]
        )
    assert main(["bench", "report", "--output", str(tmp_path)]) == 0
    lines = (tmp_path / "README.md").read_text(encoding="utf-8").splitlines()
    assert any(line.startswith("| benchmark | targets met | commit | date |") for line in lines)
    assert [line.split(" | ")[2] for line in lines if line.startswith("| [")] == ["1a2b3c4", "1a2b3c4, 5d6e7f8+", ""]
    assert lines.count("| shape | figure | value | target | met |") == 2
    assert lines.count("| commit | shape | figure | value | target | met |") == 1, "where it tells rows apart"


def test_what_is_no_result_of_the_whole_benchmark_is_said(tmp_path: Path) -> None:
    configs = {"wgrad": CONFIG, "linear": dataclasses.replace(CONFIG, small=True, only="rank 4")}
    for name, config in configs.items():
        write_csv(tmp_path / f"{name}.csv", [stamp(config) | at_most("ratio", 1.0, limit=2, of={"shape": "8"})])
    assert main(["bench", "report", "--output", str(tmp_path)]) == 0
    whole, part = (tmp_path / "README.md").read_text(encoding="utf-8").split("\n## ")[1:]
    said = ["Tiny sizes, which only try the code: these figures are no results.", "with 'rank 4' in their names"]
    assert [text in part for text in said] == [True, True]
    assert [text in whole for text in said] == [False, False]


def test_files_from_before_a_column_of_the_stamp_still_make_a_page(tmp_path: Path) -> None:
    old = {column: value for column, value in stamp(CONFIG).items() if column not in ("kernels", "sizes", "cases")}
    write_csv(tmp_path / "wgrad.csv", [old | at_most("ratio", 1.0, limit=2, of={"shape": "8"})])
    assert main(["bench", "report", "--output", str(tmp_path)]) == 0
    page = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "| threads |\n" in page
    assert "**" not in page


def test_a_folder_without_results_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "report", "--output", str(tmp_path)]) == 2
    assert "no CSV file lies in" in capsys.readouterr().err


@pytest.mark.parametrize(
    "broken",
    [
        b"",
        b"kind,met\n",
        b"kind,met\ntarget,yes\nti",
        b"kind,met\ntarget,yes,8x8\n",
        b"kind,met\ntarget,\xff\n",
        "kind,met\ntarget,yes\n".encode("utf-16"),
        b"kind,met\n" + b"x" * 200_000 + b",yes\n",  # more than a field may hold
    ],
    ids=["empty", "no row", "cut off", "one field more", "bytes", "utf-16", "no end"],
)
def test_a_file_that_is_not_whole_is_named(broken: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path)
    (tmp_path / "linear.csv").write_bytes(broken)
    assert main(["bench", "report", "--output", str(tmp_path)]) == 2
    assert f"{tmp_path / 'linear.csv'} is cut off or no CSV file of a benchmark; run" in capsys.readouterr().err
    assert not (tmp_path / "README.md").exists()


def test_a_file_that_a_spreadsheet_saved_makes_the_same_page(tmp_path: Path) -> None:
    fill(tmp_path)
    pages = []
    for mark in (b"", b"\xef\xbb\xbf"):
        (tmp_path / "wgrad.csv").write_bytes(mark + (tmp_path / "wgrad.csv").read_bytes())
        assert main(["bench", "report", "--output", str(tmp_path)]) == 0
        pages.append((tmp_path / "README.md").read_bytes())
    assert pages[0] == pages[1]


def test_all_runs_what_needs_no_gpu_and_names_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def fails(config: BenchConfig) -> None:
        ran.append("fails")
        raise MegatronFrozenError("no peer is installed")

    def works(config: BenchConfig) -> None:
        ran.append("works")
        write_csv(config.output / "works.csv", [stamp(CONFIG) | at_most("ratio", 1, limit=2, of={})])

    monkeypatch.setattr(commands, "BENCHES", {"fails": (fails, "cpu"), "works": (works, "cpu"), "gpu": (fails, "cuda")})
    assert main(["bench", "all", "--output", str(tmp_path)]) == 1
    assert ran == ["fails", "works"]
    assert "1 of these benchmarks ended early, see above (fails: no peer is installed)" in capsys.readouterr().err
    assert "[works](#works) | 1 of 1 |" in (tmp_path / "README.md").read_text(encoding="utf-8")


def test_all_ends_where_nobody_reads_its_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def unread(config: BenchConfig) -> None:
        ran.append("unread")
        raise BrokenPipeError

    monkeypatch.setattr(commands, "BENCHES", {"first": (unread, "cpu"), "second": (unread, "cpu")})
    assert main(["bench", "all", "--output", str(tmp_path)]) == 1
    assert ran == ["unread"]


def test_a_target() -> None:
    row = at_most("ratio", 1.0, limit=1.0, of={"shape": "x"})
    assert row == {
        "kind": "target", "shape": "x", "figure": "ratio", "value": 1.0, "target": "at most 1", "met": "yes"
    }  # fmt: skip
    assert at_least("gain", 1.0, limit=1.5, of={})["met"] == "no"
    assert number(row, "value") == 1.0
