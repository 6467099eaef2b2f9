"""Atomic files and folders: complete under their name, or nothing; killed writers, failing writers, two writers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from megatron_frozen.errors import CheckpointError
from megatron_frozen.io import atomic_folder, atomic_write, read_json, write_json
from tests.unit.disk_limit import largest_file


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def fill_and_fail(writer: AbstractContextManager[Path], *, file: str) -> None:
    with writer as temporary:
        (temporary / file).write_text("new")
        raise RuntimeError("in the body")


def killed_writer(tmp_path: Path, *, kind: str) -> None:
    """Leave behind what a writer of `tmp_path/target` leaves that is killed in the middle of its body."""
    write = 'temporary.write_text("half")' if kind == "atomic_write" else '(temporary / "half").write_text("half")'
    script = textwrap.dedent(f"""
        import os, signal
        from megatron_frozen.io import {kind}
        with {kind}({str(tmp_path / "target")!r}) as temporary:
            {write}
            os.kill(os.getpid(), signal.SIGKILL)
    """)
    result = subprocess.run([sys.executable, "-c", script], timeout=300, check=False)
    assert result.returncode == -signal.SIGKILL


def test_file_appears_at_the_end_and_replaces_the_old_one(tmp_path):
    target = tmp_path / "new" / "target"
    for text in ("first", "second"):
        before = target.read_text() if target.exists() else None
        with atomic_write(target) as temporary:
            temporary.write_text(text)
            assert (target.read_text() if target.exists() else None) == before
        assert target.read_text() == text
    assert names(target.parent) == ["target"]


def test_file_has_its_suffix_from_the_start_and_ordinary_permissions(tmp_path):
    with atomic_write(tmp_path / "x.png") as temporary:
        assert temporary.name == "x.png"
        temporary.touch(mode=0o600)
    (tmp_path / "plain").touch()
    assert (tmp_path / "x.png").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_failing_body_leaves_the_old_file_and_nothing_else(tmp_path):
    (tmp_path / "target").write_text("old")
    with pytest.raises(RuntimeError, match="in the body"):
        fill_and_fail(atomic_write(tmp_path / "target"), file="")
    assert names(tmp_path) == ["target"]
    assert (tmp_path / "target").read_text() == "old"


def test_folder_appears_at_the_end_with_ordinary_permissions(tmp_path):
    target = tmp_path / "target"
    target.mkdir()  # an empty folder is as good as none
    with atomic_folder(target) as temporary:
        (temporary / "inner").mkdir()
        (temporary / "inner" / "file").write_text("x")
        assert names(target) == []
    assert (target / "inner" / "file").read_text() == "x"
    assert names(tmp_path) == ["target"]
    (tmp_path / "plain").mkdir()
    assert target.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_failing_body_leaves_no_folder(tmp_path):
    with pytest.raises(RuntimeError, match="in the body"):
        fill_and_fail(atomic_folder(tmp_path / "target"), file="file")
    assert names(tmp_path) == []


def test_full_folder_is_refused_before_the_body_and_replaced_when_asked(tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    (target / "old").write_text("x")
    with (
        pytest.raises(CheckpointError, match="already holds files; give an empty or new folder"),
        atomic_folder(target),
    ):
        pytest.fail("the body ran")
    with atomic_folder(target, replace=True) as temporary:
        (temporary / "new").write_text("y")
        assert names(target) == ["old"]
    assert names(target) == ["new"]
    assert names(tmp_path) == ["target"]


@pytest.mark.parametrize("kind", ["atomic_write", "atomic_folder"])
def test_killed_writer_leaves_only_a_temporary_that_the_next_writer_removes(tmp_path, kind):
    killed_writer(tmp_path, kind=kind)
    (left,) = names(tmp_path)
    assert left.startswith(".target.tmp-")
    if kind == "atomic_write":
        with atomic_write(tmp_path / "target") as temporary:
            temporary.write_text("whole")
    else:
        with atomic_folder(tmp_path / "target") as temporary:
            (temporary / "whole").write_text("whole")
    assert names(tmp_path) == ["target"]


def test_temporary_of_a_living_writer_and_of_another_target_stay(tmp_path):
    killed_writer(tmp_path, kind="atomic_write")
    with atomic_write(tmp_path / "other") as first:
        first.write_text("first")
        with atomic_write(tmp_path / "other") as second:
            second.write_text("second")
        assert first.read_text() == "first"
    assert (tmp_path / "other").read_text() == "first"
    assert len(names(tmp_path)) == 2  # the abandoned temporary of `target` is not `other`'s to remove


@pytest.mark.parametrize(
    ("writer", "target", "message"),
    [
        (atomic_write, "folder", "is a folder, and a file must be written there"),
        (atomic_folder, "file", "is a file, and a folder must be written there"),
        (atomic_write, "file/below", "cannot write .*below .*; check the path and its permissions"),
    ],
)
def test_target_of_the_wrong_kind(tmp_path, writer, target, message):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match=message), writer(tmp_path / target):
        pytest.fail("the body ran")


@pytest.mark.parametrize("kind", ["atomic_write", "atomic_folder"])
def test_file_that_the_system_cuts_off_is_named_and_leaves_nothing(tmp_path, kind):
    with (
        largest_file(num_bytes=100),
        pytest.raises(
            CheckpointError, match=r"cannot write .*target \(.*File too large.*\); .*and free some space on its disk"
        ),
        {"atomic_write": atomic_write, "atomic_folder": atomic_folder}[kind](tmp_path / "target") as temporary,
    ):
        (temporary if kind == "atomic_write" else temporary / "inner").write_text("x" * 200)
    assert names(tmp_path) == []


def test_json_round_trip_keeps_unicode(tmp_path):
    value = {"a": [1, 2.5, None], "b": "Ġ漢"}
    write_json(tmp_path / "x.json", value)
    assert read_json(tmp_path / "x.json") == value
    assert "Ġ漢" in (tmp_path / "x.json").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"cannot read .*x\.json \(No such file or directory\); check the path"),
        (b'{"a": ', r"x\.json is not valid JSON .*; repair it or copy it again"),
        (b"\xff\xfe", r"x\.json is not valid JSON"),
        (b'{"a": ' + b"[" * 200_000, r"x\.json is not valid JSON .*recursion"),
        (b"[1]", r"x\.json holds a JSON list, and must hold an object"),
    ],
)
def test_bad_json_names_the_file(tmp_path, content, message):
    if content is not None:
        (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        read_json(tmp_path / "x.json")


def test_a_temporary_taken_before_its_lock_is_made_again(tmp_path, monkeypatch):
    """The one race: another writer deletes the new temporary between its making and its locking."""
    real_open, taken = os.open, []

    def open_after_another_writer(path, flags, *args, **kwargs):
        if not taken and ".tmp-" in str(path) and flags == os.O_RDONLY:
            taken.append(path)
            os.rmdir(path)
        return real_open(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", open_after_another_writer)
    with atomic_write(tmp_path / "target") as temporary:
        temporary.write_text("whole")
    assert len(taken) == 1
    assert names(tmp_path) == ["target"]
