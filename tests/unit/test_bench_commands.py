"""The benchmarks at tiny sizes: what they write and print, and that the checks fail where a backend is wrong."""

from __future__ import annotations

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_frozen import kernels
from megatron_frozen.bench import commands, wgrad
from megatron_frozen.bench.backend_checks import CASES, check_backends
from megatron_frozen.bench.commands import NAMES
from megatron_frozen.bench.linear_cases import SMALL, cases
from megatron_frozen.bench.runner import STAMP
from megatron_frozen.cli import main
from megatron_frozen.gemm import reference, select
from megatron_frozen.gemm.request import Product, Request


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_wgrad(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "wgrad", "--small", "--repeats", "1", "--output", str(tmp_path)]) == 0
    rows = read(tmp_path / "wgrad.csv")
    assert set(rows[0]) >= {*STAMP, *wgrad.COLUMNS}
    assert all(row[column] for row in rows for column in STAMP)
    assert {row["threads"] for row in rows} == {"1", "2"}
    for row in rows:
        if row["kind"] == "time":
            is_exact = row["way"] not in (wgrad.BARE, wgrad.ADDED)
            assert (float(row["relative_error"]) < 1e-6) == is_exact, row
            assert float(row["median_ms"]) > 0
    targets = [row for row in rows if row["kind"] == "target"]
    assert len(targets) == 5 * 2 * len(wgrad.SMALL_SHAPES)
    assert {row["met"] for row in targets} <= {"yes", "no"}
    assert (tmp_path / "wgrad.png").stat().st_size > 1000
    printed = capsys.readouterr().out
    assert "at most 1.1" in printed
    assert "at least 4" in printed


def test_a_target_is_met_or_missed() -> None:
    def rows(*, ours: float, error: float) -> list[dict[str, object]]:
        times = {wgrad.OURS: ours, wgrad.BARE: 10.0, wgrad.ADDED: 16.0, wgrad.UPCAST: 43.0}
        rest = {"relative_error": error, "extra_mib": 1.0, "main_grad_mib": 4.0, "threads": 1}
        return [{"way": way, "median_ms": time, **rest} for way, time in times.items()]

    assert [row["met"] for row in wgrad.verdicts(rows(ours=10.5, error=1e-7))] == ["yes"] * 5
    assert [row["met"] for row in wgrad.verdicts(rows(ours=12.0, error=1e-3))] == ["no", "no", "no", "no", "yes"]


def test_gpu_check_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "gpu-check", "--device", "cpu", "--small", "--repeats", "1", "--output", str(tmp_path)]
    assert main(arguments) == 0
    rows = read(tmp_path / "gpu_check.csv")
    assert all(row[column] for row in rows for column in STAMP)
    checks = [row for row in rows if row["kind"] == "check"]
    assert {row["backend"] for row in checks} == {backend.NAME for backend in select.backends("cpu")}
    assert len(checks) == 3 * 2 * len(CASES)
    assert {row["outcome"] for row in checks} <= {"ok", "cannot"}
    assert all(row["outcome"] == "ok" for row in checks if row["backend"] == "reference")
    assert {row["case"] for row in rows} > {case.name for case in cases(SMALL)}
    assert any(row["way"] == wgrad.OURS and row["main_grad_mib"] for row in rows)
    assert "reference" in capsys.readouterr().out


def _run_reference(request: Request, left: torch.Tensor, right: torch.Tensor, **given: Any) -> torch.Tensor | None:
    return reference.run(request, left, right, **given)


def _through_bf16(request: Request, left: torch.Tensor, right: torch.Tensor, **given: Any) -> torch.Tensor | None:
    result = reference.run(request, left, right, **given)
    given["out"].copy_(given["out"].bfloat16())
    return result


def _keeps_nan(request: Request, left: torch.Tensor, right: torch.Tensor, **given: Any) -> torch.Tensor | None:
    """Overwrites by scaling with 0 and adding."""
    before = given["out"] * (1 if request.accumulate else 0)
    result = reference.run(request, left, right, **given)
    if not request.accumulate:
        given["out"].add_(before)
    return result


def _never_accumulates(request: Request, left: torch.Tensor, right: torch.Tensor, **given: Any) -> torch.Tensor | None:
    if request.accumulate:
        given["out"].zero_()
    return reference.run(request, left, right, **given)


def _ignores_strides(request: Request, left: torch.Tensor, right: torch.Tensor, **given: Any) -> torch.Tensor | None:
    """Reads addresses and sizes, as Transformer Engine does."""
    return reference.run(request, left.as_strided(left.shape, (left.shape[1], 1)), right, **given)


def _spills(request: Request, left: torch.Tensor, right: torch.Tensor, **given: Any) -> torch.Tensor | None:
    """Writes beside an output with gaps."""
    result = reference.run(request, left, right, **given)
    out = given["out"]
    if out.stride(0) > out.shape[1]:
        out.as_strided((1,), (1,), out.storage_offset() + out.shape[1]).zero_()
    return result


def _forgets_the_bias(request: Request, left: torch.Tensor, right: torch.Tensor, **given: Any) -> torch.Tensor | None:
    if request.product is Product.FORWARD:
        given["bias"] = torch.zeros(right.shape[0])
    result = reference.run(request, left, right, **given)
    return None if result is None else result.bfloat16()


def _crashes(request: Request, left: torch.Tensor, right: torch.Tensor, **given: Any) -> torch.Tensor | None:
    raise RuntimeError("Unable to find suitable algorithm")


WRONG = {
    _through_bf16: {"overwrite a NaN bucket", "64 micro-batches", "256, then 1", "dgrad", "forward"},
    _keeps_nan: {"overwrite a NaN bucket", "one token"},
    _never_accumulates: {"accumulate", "64 micro-batches", "256, then 1"},
    _ignores_strides: {"strided operands, overwrite", "forward, strided operands", "dgrad, strided operands"},
    _spills: {"rows apart in the output, overwrite", "rows apart in the output, accumulate"},
    _forgets_the_bias: {"forward with a bias of the operands' dtype", "bias gradient"},
    _crashes: {case.name for case in CASES if case.num_tokens},
}


def _install(monkeypatch: pytest.MonkeyPatch, run: Any) -> None:
    backend: Any = SimpleNamespace(NAME="suspect", unsupported=reference.unsupported, run=run)
    monkeypatch.setitem(select._ORDER, "cpu", (backend,))
    monkeypatch.setitem(select.BACKENDS, "suspect", backend)
    select._chosen.cache_clear()


@pytest.fixture(autouse=True)
def _forget_choices() -> Any:
    yield
    select._chosen.cache_clear()


@pytest.mark.parametrize("run", WRONG, ids=lambda run: run.__name__)
def test_a_wrong_backend_is_seen(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, run)
    bad = {row["check"] for row in check_backends("cpu", in_features=48, out_features=72) if row["outcome"] != "ok"}
    assert bad >= WRONG[run]
    assert run is _crashes or len(bad) < len(CASES)


def test_a_right_backend_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, _run_reference)
    assert {row["outcome"] for row in check_backends("cpu", in_features=48, out_features=72)} == {"ok"}


def test_a_failed_check_fails_the_command_after_the_file_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _install(monkeypatch, _through_bf16)
    arguments = ["bench", "gpu-check", "--device", "cpu", "--small", "--repeats", "1", "--output", str(tmp_path)]
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert "checks of matrix backends did not hold to 1e-05: suspect, overwrite a NaN bucket, bfloat16: wrong" in error
    assert any(row["outcome"] == "wrong" for row in read(tmp_path / "gpu_check.csv"))


def test_without_a_gpu_the_check_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "gpu-check"]) == 2
    assert "torch finds no CUDA device; give --device cpu" in capsys.readouterr().err


def test_help_says_what_each_name_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "--help"])
    assert stopped.value.code == 0
    lines = {line.split(maxsplit=1)[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert lines["rl-step"].split(maxsplit=1)[1].startswith("A step of reinforcement learning")
    assert all(len(lines[name].split()) > 3 for name in NAMES)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "wgard"], "invalid choice: 'wgard'"),
        (["bench", "wgrad", "--repeats", "0"], "not a whole number"),
        (["bench", "wgrad", "--repeats", "x"], "x is not a whole number above 0"),
    ],
)
def test_wrong_usage(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["wgrad", "--only", "x"], "--only chooses among the cases of linear and growth and was given to wgrad; leave"),
        (["all", "--only", "rank"], "among the cases of linear and growth and was given to all; leave it out"),
        (["lora-step", "--repeats", "2"], "lora-step takes as many steps as its figures need and no --repeats; leave"),
        (["rl-step", "--repeats", "2"], "rl-step takes as many steps as its figures need and no --repeats; leave"),
        (["report"], "report measures nothing and takes no --small, --repeats or --device; leave them out"),
        (["comm", "--device", "cuda"], "wgrad, linear, gpu-check and was given to comm, which runs on the CPU; leave"),
    ],
)
def test_an_option_that_would_not_be_heeded_is_refused(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments, "--small", "--output", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_a_folder_that_takes_no_files_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "BENCHES", dict.fromkeys(commands.BENCHES, (pytest.fail, "cpu")))
    folder = tmp_path / "file"
    folder.touch()
    for name in ("wgrad", "all"):
        assert main(["bench", name, "--small", "--output", str(folder)]) == 2
        assert f"no file can be made in {folder} (File exists); give another folder" in capsys.readouterr().err


def test_missing_kernels_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "BENCHES", {"wgrad": (lambda _: None, "cpu")})
    monkeypatch.setattr(kernels, "absent", lambda: "there is no compiler")
    assert main(["bench", "wgrad", "--output", str(tmp_path)]) == 0
    assert "without the kernels for this CPU: there is no compiler" in capsys.readouterr().err


def test_env_prints_the_backends(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("gemm backend"))
    assert len(lines) - start - 1 == len(select.table("cpu")) + len(select.table("cuda"))
    column = lines[start].index("serves it here")
    assert all(line[column:].startswith(("yes", "no: ")) for line in lines[start + 1 :])
