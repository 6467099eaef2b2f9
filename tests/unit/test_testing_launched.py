"""`run_ranks` on the ranks of torchrun, in one launch: what passes, fails and is skipped, and what is said then."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

import pytest
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from megatron_frozen.testing import RankError
from megatron_frozen.testing.launched import LaunchedRanks, choose_backend
from tests.gates.source import ROOT

_TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "pytest"]
_PYTEST = ["-p", "megatron_frozen.testing.launched", "-p", "no:cacheprovider", "-rA", "tests/unit/launched_cases.py"]


@pytest.fixture(scope="module")
def output() -> str:
    """What one run of the cases says."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*_TORCHRUN, *_PYTEST], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def test_one_process_runs_each_test_once(output: str) -> None:
    outcomes = dict(re.findall(r"^(?:PASSED|FAILED) \S+::(\w+)(.*)", output, re.MULTILINE))
    assert len(outcomes) == 7
    assert "4 passed, 1 skipped" in output
    assert output.count("test session starts") == 1
    passed = re.findall(r"^PASSED \S+::(\w+)", output, re.MULTILINE)
    assert passed[0] == "test_every_rank_runs_and_large_tensors_come_back"
    assert passed[-1] == "test_after_those_that_failed"


def test_too_few_ranks_are_a_reason_to_skip(output: str) -> None:
    assert re.search(r"^SKIPPED .*: needs 3 ranks, torchrun gave 2$", output, re.MULTILINE)


def test_failing_rank_is_named_with_its_traceback(output: str) -> None:
    assert re.search(r"_fail_on_1 failed on ranks? 1.* of 2", output)
    assert "in _fail_on_1" in output
    assert "ValueError: row 7 is broken" in output
    assert "the return value cannot be pickled" in output


def test_ranks_that_do_not_meet_fail_in_time(output: str) -> None:
    assert re.search(r"_wait_for_ever failed on rank 0 of 2\.", output)


class _Alone(LaunchedRanks):
    """Rank 0 of two whose other rank never answers."""

    def __init__(self) -> None:
        self._store = HashStore()
        self.rank, self.local_rank, self.world_size, self.backend = 0, 0, 2, "gloo"
        self._numbers = iter(range(9))
        self._is_out_of_step = False


def test_rank_that_never_ends_is_named_and_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_frozen.testing.launched._GRACE_S", 0.1)
    monkeypatch.setattr("megatron_frozen.testing.launched.run_body", lambda *_: (True, b"", time.monotonic()))
    ranks = _Alone()
    with pytest.raises(RankError, match="a body did not end on rank 1 of 2, which torchrun started") as caught:
        ranks.run(b"", world_size=2, timeout_s=0.1, name="a body")
    assert list(caught.value.failures) == [1]
    with pytest.raises(RankError, match="another did not run: an earlier body still runs on a rank"):
        ranks.run(b"", world_size=2, timeout_s=0.1, name="another")


def test_the_machine_chooses_the_backend() -> None:
    assert choose_backend(3, num_gpus=0) == "gloo"
    assert choose_backend(3, num_gpus=4) == "cpu:gloo,cuda:nccl"
    with pytest.raises(RankError, match="started a rank 4 on a machine that shows 4 GPUs: start at most that many"):
        choose_backend(4, num_gpus=4)
