"""Commands whose output nobody reads to its end, as before `head`."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from megatron_frozen import cli
from megatron_frozen.cli import main


@pytest.mark.parametrize("arguments", [["env"], ["bench", "--help"]], ids=" ".join)
def test_output_that_nobody_reads_ends_a_command_quietly(arguments: list[str]) -> None:
    theirs, ours = os.pipe()
    os.close(theirs)
    with os.fdopen(ours, "wb") as unread:
        command = [sys.executable, "-m", "megatron_frozen", *arguments]
        ended = subprocess.run(command, stdout=unread, stderr=subprocess.PIPE, timeout=120, check=False)
    assert ended.stderr == b""
    assert ended.returncode == (141 if arguments == ["env"] else 0)  # argparse takes no notice


def test_another_pipe_that_broke_is_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise BrokenPipeError("the pipe of a worker")

    monkeypatch.setattr(cli, "facts_table", broken)
    assert main(["env"]) == 1
    assert "the pipe of a worker" in capsys.readouterr().err
