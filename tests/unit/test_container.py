"""The container's files, read without Docker: what the Dockerfile copies, runs and builds on; and the install script
around a stand-in for Python. CI runs the script itself, in an environment of its own.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from tests.gates.source import PACKAGE, ROOT
from tests.gates.tree import tracked_files

_INSTALL = ROOT / "docker" / "install.sh"

Stage = list[tuple[str, str]]
BASES = ("base-gpu", "base-cpu")
RECIPE = "base-${ON}"
"""The stage without a name of its own, which is built on either base."""


def stages() -> dict[str, Stage]:
    """Return the (instruction, arguments) of each stage, the first of them its FROM; what stands above under ""."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    name = ""
    found: dict[str, Stage] = {name: []}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        instruction, _, arguments = line.partition(" ")
        if instruction == "FROM":
            name = arguments.rpartition(" AS ")[2]
            found[name] = []
        found[name].append((instruction, arguments))
    return found


def arguments_of(stage: Stage, instruction: str) -> list[str]:
    return [arguments for name, arguments in stage if name == instruction]


def test_one_recipe_on_two_pinned_bases() -> None:
    found = stages()
    assert list(found) == ["", *BASES, RECIPE]
    gpu, cpu = (arguments_of(found[name], "FROM")[0] for name in BASES)
    assert re.fullmatch(r"nvcr\.io/nvidia/pytorch:\d{2}\.\d{2}-py3 AS base-gpu", gpu)
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim AS base-cpu", cpu)
    assert found[""] == [("ARG", "ON=gpu")]
    built = re.findall(r"docker build --build-arg ON=(\w+)", (ROOT / "Makefile").read_text())
    assert sorted(f"base-{on}" for on in built) == sorted(BASES)


def test_it_installs_by_the_script_alone_and_ends_as_a_user() -> None:
    stage = stages()[RECIPE]
    runs = arguments_of(stage, "RUN")
    assert [run for run in runs if "install.sh" in run] == ['docker/install.sh "$EXTRA"']
    assert not [run for part in stages().values() for run in arguments_of(part, "RUN") if "pip" in run]
    (user,) = arguments_of(stage, "USER")
    assert user not in {"root", "0"}
    assert any(f"useradd --create-home --uid 10001 {user}" in run for run in runs)
    last_run = max(index for index, (name, _) in enumerate(stage) if name == "RUN")
    assert stage.index(("USER", user)) > last_run


def test_what_is_copied_is_there_and_let_in() -> None:
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignore
    sources = [source for line in arguments_of(stages()[RECIPE], "COPY") for source in line.split()[:-1]]
    assert {"docker", PACKAGE, "tests", "examples", "requirements-dev.txt"} <= set(sources)
    assert not [source for source in sources if not (ROOT / source).exists()]
    assert {line.removeprefix("!") for line in ignore if line.startswith("!")} == set(sources)


def test_every_folder_of_the_package_is_installed() -> None:
    """An install takes the folders with an __init__.py only, whatever an import from the source tree finds."""
    folders = {path.parent for path in (ROOT / PACKAGE).rglob("*.py")}
    assert len(folders) > 10
    assert not [str(folder) for folder in folders if not (folder / "__init__.py").is_file()]


def test_scripts_are_shell_and_may_be_run() -> None:
    scripts = [path for path in tracked_files() if path.suffix in {".sh", ".sbatch"}]
    assert len(scripts) >= 3
    for script in [*scripts, ROOT / ".ci" / "run"]:
        assert os.access(script, os.X_OK), script
        assert script.read_text().startswith("#!/usr/bin/env bash\n"), script
        done = subprocess.run(["bash", "-n", script], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


_STAND_IN = """#!/bin/sh
# A Python whose versions before and after lie in two files; it writes down what pip is asked for, and constraints.
cd "$(dirname "$0")" || exit
if [ "$1" = - ]; then
    cat > /dev/null
    if [ -e asked ]; then cat after; else touch asked; cat before; fi
elif [ "$2" = pip ]; then
    echo "$@" >> calls
    for word; do
        if [ "$last" = --constraint ]; then cat "$word" >> constraints; fi
        last=$word
    done
else
    echo "$@"
fi
"""


def _install(folder: Path, before: str, after: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    python = folder / "python"
    python.write_text(_STAND_IN)
    python.chmod(0o755)
    (folder / "before").write_text(before)
    (folder / "after").write_text(after)
    environment = {**os.environ, "PYTHON": str(python)}
    return subprocess.run([_INSTALL, *arguments], env=environment, capture_output=True, text=True, check=False)


_TORCH = "torch==2.12.0a0+abc.nv26.03\nnumpy==1.26.4\n"


def test_a_torch_that_is_there_is_the_constraint(tmp_path: Path) -> None:
    done = _install(tmp_path, _TORCH, f"{_TORCH}apex==0.1\n")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "constraints").read_text() == _TORCH
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [call.split()[-1] for call in calls][1:] == ["megatron-frozen[train]"]
    assert "--no-deps" in calls[0].split()
    assert done.stdout == "-m megatron_frozen env\n"


def test_a_torch_that_changed_is_refused(tmp_path: Path) -> None:
    done = _install(tmp_path, _TORCH, "torch==2.13.0\nnumpy==1.26.4\n")
    assert done.returncode == 1
    assert "torch==2.12.0a0+abc.nv26.03 was installed, and another version is now" in done.stderr
    assert not done.stdout


def test_without_a_torch_all_is_pinned(tmp_path: Path) -> None:
    done = _install(tmp_path, "numpy==2.4.5\n", "torch==2.13.0\nnumpy==2.4.6\n", "test")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "constraints").read_text() == (ROOT / "requirements-dev.txt").read_text()
    assert "megatron-frozen[test]" in (tmp_path / "calls").read_text()
