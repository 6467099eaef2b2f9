"""What `megatron-frozen diagnose` prints, and how it runs a script."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_frozen.cli import main
from megatron_frozen.diagnostics.diagnosing import diagnose_script
from megatron_frozen.diagnostics.findings import WORTH_SAYING, Fault, Finding, text_of
from megatron_frozen.errors import ConfigError
from tests.unit.diagnosis_toys import DGRAD


def _finding(ratio: float, *, calls: int = 3, module: str = "") -> Finding:
    return Finding(
        module=module, direction=DGRAD, fault=Fault.BATCHED, shape=(6, 2, 5), stride=(5, 30, 1), dtype=torch.bfloat16,
        matrix=(5, 8), calls=calls, as_run_s=ratio * 1e-3, folded_s=1e-3,
    )  # fmt: skip


def test_the_report_says_what_is_worth_it() -> None:
    findings = [_finding(50.0), _finding(WORTH_SAYING - 0.01, calls=1000)]
    lines = text_of(findings, num_products=2000, watched_s=12.0).splitlines()
    assert lines[0] == "2000 products seen in 12.0 s, 3 of them wasted 0.147 s:"
    assert lines[2].split() == ["0.147", "3", "50", "1", "batched", "dgrad", "(none)"]
    assert lines[3].strip() == "[6, 2, 5] strides [5, 30, 1] by [5, 8] bfloat16"
    assert len(lines) == 7
    assert max(map(len, lines)) <= 80
    nothing = text_of(findings[1:], num_products=7, watched_s=0.25)
    assert nothing.startswith("7 products seen in 0.2 s: none ran batched")
    failed = Finding(module="", direction=DGRAD, fault=Fault.BATCHED, shape=(6, 2, 5), stride=(5, 30, 1),
                     dtype=torch.float32, matrix=(5, 8), calls=1)  # fmt: skip
    assert (failed.ratio, failed.wasted_s) == (0, 0)


def test_layers_alike_stand_in_one_row() -> None:
    names = ["M.layers.0.up", "M.layers.11.up", "M.layers.0.down", "M.2b.up"]
    found = [_finding(2.0 + index, module=name) for index, name in enumerate(names)]
    rows = [line.split() for line in text_of(found, num_products=9, watched_s=1.0).splitlines()[2:-3:2]]
    assert [row[-1] for row in rows] == ["M.2b.up", "M.layers.*.up", "M.layers.*.down"]
    assert rows[1][:4] == ["0.009", "6", "2.5", "1"]


SCRIPT = """
import os, sys
import torch
if __name__ == "__main__":
    for _ in range(3):
        torch.matmul(torch.ones(2, 400, 64).transpose(0, 1), torch.ones(64, 900))
    if not os.fork():
        sys.exit()
    os.wait()
    print(__name__, sys.argv[1:])
    if "fail" in sys.argv:
        raise ValueError("its own error")
    sys.exit(5 if "exit" in sys.argv else 0)
"""


@pytest.mark.parametrize(("argument", "code"), [("--help", 0), ("fail", 1), ("exit", 5)])
def test_the_command_runs_a_script_as_it_is(argument: str, code: int, tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "megatron_frozen", "diagnose", str(script), argument],
        capture_output=True, text=True, check=False, timeout=180,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert done.stdout == f"__main__ ['{argument}']\n"
    assert done.stderr.count("3 products seen in ") == 1
    assert ("ValueError: its own error" in done.stderr) == (argument == "fail")
    assert "megatron-frozen: error" not in done.stderr


def test_the_first_and_the_last_rank_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "job.py"
    script.write_text("")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    diagnose_script([str(script)])
    assert capfd.readouterr().err.startswith("no products seen; they may run in other processes")
    monkeypatch.setenv("WORLD_SIZE", "3")
    for rank, report in (("0", "rank 0: no"), ("1", ""), ("2", "rank 2: no")):
        monkeypatch.setenv("RANK", rank)
        diagnose_script([str(script)])
        assert capfd.readouterr().err.partition(" products")[0] == report


def test_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="diagnose got nothing to run; give it a script or -m and a module"):
        diagnose_script([])
    assert main(["diagnose", "nowhere.py"]) == 2
    assert "diagnose was told to run nowhere.py, which is no file here" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["diagnose", "-h"])
    assert "megatron-frozen diagnose SCRIPT [ARGUMENT ...] | -m MODULE" in " ".join(capsys.readouterr().out.split())
