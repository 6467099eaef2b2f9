"""Linter, formatter and type checker as tests, and the rules about the repository's files. Each with a control."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gates import tree
from tests.gates.source import ROOT

# The wheel brings pyright and node, so nothing is fetched at run time; the version check would try to.
_OFFLINE = {"PYRIGHT_PYTHON_IGNORE_WARNINGS": "1", "PYRIGHT_PYTHON_GLOBAL_NODE": "0"}


def _tool(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *arguments], cwd=cwd, env=os.environ | _OFFLINE, capture_output=True, text=True
    )


def _settings() -> str:
    return str(ROOT / "pyproject.toml")


def test_ruff_finds_nothing() -> None:
    result = _tool("ruff", "check", ".")
    assert result.returncode == 0, result.stdout + result.stderr


def test_ruff_finds_a_boolean_trap_and_an_unused_import(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("import os\n\n\ndef f(flag: bool): ...\n")
    result = _tool("ruff", "check", "--config", _settings(), str(tmp_path))
    assert result.returncode == 1
    assert {"F401", "FBT001"} <= set(re.findall(r"\b[A-Z]+\d+\b", result.stdout)), result.stdout


def test_ruff_format_changes_nothing() -> None:
    result = _tool("ruff", "format", "--check", ".")
    assert result.returncode == 0, result.stdout + result.stderr


def test_ruff_format_notices_bad_layout(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("x=  1\n")
    assert _tool("ruff", "format", "--check", "--config", _settings(), str(tmp_path)).returncode == 1


def test_pyright_finds_nothing() -> None:
    result = _tool("pyright")
    assert result.returncode == 0, result.stdout + result.stderr


def test_pyright_finds_a_wrong_type(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        (ROOT / "pyproject.toml").read_text().replace('include = ["megatron_frozen", ', 'include = ["bad.py", ')
    )
    (tmp_path / "bad.py").write_text("x: int = 'three'\n")
    result = _tool("pyright", cwd=tmp_path)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "bad.py" in result.stdout


def test_no_file_names_a_machine_or_a_registry() -> None:
    faults = []
    for path in tree.tracked_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a picture
        faults += tree.text_faults(str(path.relative_to(ROOT)), text)
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("text", ["see /roo" + "t/x", "cd /wor" + "k/main", "https://pypi.or" + "g/simple"])
def test_machine_path_or_registry_is_caught(text: str) -> None:
    assert tree.text_faults("notes.md", f"first line\n{text}")[0].startswith("notes.md:2: a ")


def test_no_file_is_bulk() -> None:
    faults = [
        fault
        for path in tree.tracked_files()
        for fault in tree.bulk_faults(str(path.relative_to(ROOT)), path.stat().st_size)
    ]
    assert not faults, "\n".join(faults)


def test_bulk_is_caught() -> None:
    assert tree.bulk_faults("model.safetensors", 10)
    assert tree.bulk_faults("data.jsonl", 2**20 + 1)
    assert not tree.bulk_faults("data.jsonl", 2**20)


def test_project_files_are_there() -> None:
    names = "README.md CHANGELOG.md LICENSE Makefile Dockerfile requirements-dev.txt setup.py pyproject.toml .ci/run"
    assert not [name for name in names.split() if not (ROOT / name).is_file()]
    assert "## [Unreleased]" in (ROOT / "CHANGELOG.md").read_text()
    assert os.access(ROOT / ".ci/run", os.X_OK)


def test_documents_lead_somewhere() -> None:
    makefile = (ROOT / "Makefile").read_text()
    documents = [path for path in tree.tracked_files() if path.suffix == ".md"]
    assert documents
    faults = []
    for path in documents:
        text = path.read_text(encoding="utf-8")
        faults += tree.link_faults(path.name, text, folder=path.parent)
        faults += tree.make_target_faults(path.name, text, makefile=makefile)
    assert not faults, "\n".join(faults)


def test_dead_link_and_unknown_make_target_are_caught(tmp_path: Path) -> None:
    assert tree.link_faults("a.md", "see [this](gone.md#part) and [that](https://x.y)", folder=tmp_path)
    assert tree.make_target_faults("a.md", "run `make loar`", makefile="lora: x\n")
    assert not tree.make_target_faults("a.md", "run `make lora`", makefile="lora: x\n")


def test_development_pins_are_exact_and_leave_torch_to_the_index() -> None:
    lines = (ROOT / "requirements-dev.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert not [line for line in pins if not re.fullmatch(r"[\w.-]+==[\w.]+", line)]
    assert "torch==2.13.0" in pins


def test_the_package_pins_no_torch_and_names_no_apex() -> None:
    text = (ROOT / "setup.py").read_text()
    assert re.findall(r'"torch[^"]*"', text) == ['"torch>=2.8"']
    assert '"apex' not in text
