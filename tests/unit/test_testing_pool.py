from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_frozen.testing import RankError, rank_device, run_ranks


def _sum_of_ranks(rank: int, world_size: int, start: torch.Tensor) -> torch.Tensor:
    total = start + rank
    dist.all_reduce(total)
    assert dist.get_world_size() == world_size
    return total


def _fail_on(rank: int, world_size: int, failing_rank: int) -> None:
    if rank == failing_rank:
        raise ValueError(f"row 7 is broken on rank {rank}")
    dist.barrier()  # the others wait here for a rank that never comes


def _fail_everywhere(rank: int, world_size: int) -> None:
    print("a line that the rank printed")
    raise ValueError(f"no rank of {world_size} likes this, {rank} neither")


def _fail_while_the_other_sleeps(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("the other rank will never know")
    _sleep_for_ever()


def _hang_on(rank: int, world_size: int, hanging_rank: int) -> int:
    if rank == hanging_rank:
        _sleep_for_ever()
    return rank


def _sleep_for_ever() -> None:
    time.sleep(3600)


def _die_on(rank: int, world_size: int, dying_rank: int) -> int:
    if rank == dying_rank:
        print("last words", flush=True)
        os._exit(3)
    return rank


def _exit(rank: int, world_size: int) -> None:
    sys.exit("leaving early")


def _return_a_lock(rank: int, world_size: int) -> object:
    return threading.Lock()


def _pid(rank: int, world_size: int) -> int:
    return os.getpid()


def _dirty_the_process(rank: int, world_size: int) -> None:
    os.environ["LEFT_BEHIND"] = "1"
    os.chdir("/")
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    dist.new_group([0])


def _state(rank: int, world_size: int) -> dict[str, object]:
    return {
        "left_behind": os.environ.get("LEFT_BEHIND"),
        "cwd": os.getcwd(),
        "dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
        "rank": os.environ["RANK"],
        "gpus": os.environ["CUDA_VISIBLE_DEVICES"],
        "device": rank_device().type,
        "random": torch.rand(3),
    }


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_rank_runs_and_tensors_come_back_by_value(world_size: int) -> None:
    start = torch.full((2, 3), 0.5)
    results = run_ranks(world_size, _sum_of_ranks, start)
    expected = torch.full((2, 3), 0.5 * world_size + sum(range(world_size)))
    assert len(results) == world_size
    for result in results:
        torch.testing.assert_close(result, expected, rtol=0, atol=0)
    torch.testing.assert_close(start, torch.full((2, 3), 0.5))


def test_the_pool_stands_between_bodies() -> None:
    assert run_ranks(2, _pid) == run_ranks(3, _pid)[:2]


def test_bodies_leave_nothing_behind() -> None:
    run_ranks(2, _dirty_the_process)
    first, second = run_ranks(2, _state)
    assert first["left_behind"] is None
    assert first["cwd"] == os.getcwd()
    assert first["dtype"] is torch.float32
    assert first["grad"] is True
    assert first["threads"] == 1
    assert (first["rank"], second["rank"]) == ("0", "1")
    assert (first["gpus"], first["device"]) == ("", "cpu")
    torch.testing.assert_close(first["random"], second["random"], rtol=0, atol=0)


def test_failing_rank_is_named_with_its_traceback_while_others_wait_for_it() -> None:
    run_ranks(2, _pid)  # workers take a while to start
    began = time.monotonic()
    with pytest.raises(RankError, match=r"(?s)_fail_on failed on ranks? 1.*ValueError: row 7 is broken") as caught:
        run_ranks(2, _fail_on, 1, timeout_s=300)
    assert time.monotonic() - began < 150
    assert "in _fail_on" in caught.value.failures[1]
    assert next(iter(caught.value.failures)) == 1  # the culprit comes first, rank 0 only lost its peer
    assert run_ranks(2, _hang_on, 99) == [0, 1]  # and the pool is usable again


def test_rank_that_outlives_a_failure_is_reported_as_stuck() -> None:
    with pytest.raises(RankError, match="did not finish on rank 0 of 2 after another rank had failed") as caught:
        run_ranks(2, _fail_while_the_other_sleeps)
    assert list(caught.value.failures) == [1, 0]
    assert "the other rank will never know" in caught.value.failures[1]
    assert "_sleep_for_ever" in caught.value.failures[0]


def test_failure_on_every_rank_keeps_the_pool() -> None:
    pids = run_ranks(2, _pid)
    with pytest.raises(
        RankError, match=r"(?s)failed on ranks (0, 1|1, 0) of 2.*a line that the rank printed"
    ) as caught:
        run_ranks(2, _fail_everywhere)
    assert sorted(caught.value.failures) == [0, 1]
    assert run_ranks(2, _pid) == pids


def test_hanging_rank_times_out_and_says_where_it_was() -> None:
    run_ranks(2, _pid)  # workers take a while to start
    with pytest.raises(RankError, match=r"_hang_on did not finish on rank 1 of 2 within 4.5 s") as caught:
        run_ranks(2, _hang_on, 1, timeout_s=4.5)
    assert "_sleep_for_ever" in caught.value.failures[1]
    assert 0 not in caught.value.failures
    assert run_ranks(2, _hang_on, 99) == [0, 1]


def test_fewer_ranks_than_asked_is_a_failure() -> None:
    with pytest.raises(RankError, match=r"(?s)failed on rank 0 of 2.*exit code 3; last lines:\nlast words"):
        run_ranks(2, _die_on, 0)
    assert run_ranks(2, _die_on, 99) == [0, 1]


def test_a_rank_that_exits_is_a_failure() -> None:
    with pytest.raises(RankError, match="leaving early"):
        run_ranks(2, _exit)


def test_unpicklable_return_value_is_a_failure() -> None:
    with pytest.raises(RankError, match="the return value cannot be pickled"):
        run_ranks(2, _return_a_lock)


def test_body_must_be_importable() -> None:
    with pytest.raises(RankError, match="and its arguments must be picklable to reach the ranks"):
        run_ranks(2, lambda rank, world_size: rank)


def test_impossible_requests_are_refused() -> None:
    with pytest.raises(RankError, match="was asked to run on 0 ranks: ask for 1 or more"):
        run_ranks(0, _pid)
    with pytest.raises(RankError, match=r"backend 'mpi' is not one of gloo, nccl\."):
        run_ranks(2, _pid, backend="mpi")
    with pytest.raises(RankError, match=r"4096 nccl ranks need 4096 GPUs and this machine has \d"):
        run_ranks(4096, _pid, backend="nccl")


def test_workers_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    script = tmp_path / "starts_a_pool.py"
    script.write_text(
        "import os\n"
        "from megatron_frozen.testing import run_ranks\n"
        "def body(rank, world_size): return os.getpid()\n"
        "if __name__ == '__main__': print(*run_ranks(2, body), flush=True)\n"
    )
    output = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=True)
    pids = [int(word) for word in output.stdout.split()]
    assert len(pids) == 2
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
