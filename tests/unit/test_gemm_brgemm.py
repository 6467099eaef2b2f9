"""How the block kernel is spread over torch's threads."""

from __future__ import annotations

import contextlib
import signal
import threading
import time

import pytest
import torch
from torch._subclasses import FakeTensorMode

from megatron_frozen.gemm import brgemm
from megatron_frozen.gemm.brgemm import _cuts, on_threads

CUTS = [slice(start, start + 1) for start in range(8)]


@pytest.fixture
def two_threads() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_each_cut_is_worked_on_once_and_by_two_threads() -> None:
    done, workers = [], set()

    def work(cut: slice) -> None:
        time.sleep(0.05)  # leaves cuts for the other thread
        workers.add(threading.get_ident())
        done.append(cut.start)

    on_threads(work, CUTS)
    assert sorted(done) == list(range(8))
    assert len(workers) == (1 if brgemm.symbol("GOMP_parallel") is None else 2)


@pytest.mark.usefixtures("two_threads")
def test_an_error_in_a_thread_is_raised_by_the_caller() -> None:
    def work(cut: slice) -> None:
        if cut.start == 5:
            raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"):
        on_threads(work, CUTS)


@pytest.mark.filterwarnings("ignore:Exception ignored on calling ctypes callback")  # what ctypes prints as it drops one
@pytest.mark.usefixtures("two_threads")
def test_no_interruption_is_lost() -> None:
    """A signal that comes while C runs is handled where Python is entered next: in front of the callback's try."""
    matrix, num_handled, num_raised = torch.ones(200, 200), 0, 0

    def interrupt(*_: object) -> None:
        nonlocal num_handled
        num_handled += 1
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for attempt in range(30):
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.001 * (attempt % 5 + 1))
                while num_handled == attempt:
                    on_threads(lambda _: torch.mm(matrix, matrix), CUTS)
            except KeyboardInterrupt:
                num_raised += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert num_raised == num_handled == 30


@pytest.mark.usefixtures("two_threads")
def test_without_torchs_threads_the_caller_does_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(brgemm, "symbol", lambda *_: None)
    done: list[tuple[int, int]] = []
    on_threads(lambda cut: done.append((cut.start, threading.get_ident())), CUTS)
    assert done == [(start, threading.get_ident()) for start in range(8)]


@pytest.mark.parametrize("surroundings", ["float64", "bfloat16", "device", "fake"])
def test_the_trial_does_not_depend_on_where_it_first_happens(surroundings: str) -> None:
    """A trial in another dtype or at an address of nothing crashed, or turned the backend off for good."""
    expected = brgemm.absent()
    dtype = torch.get_default_dtype()
    mode = {"device": torch.device("meta"), "fake": FakeTensorMode()}.get(surroundings, contextlib.nullcontext())
    try:
        torch.set_default_dtype(getattr(torch, surroundings, dtype) if "float" in surroundings else dtype)
        with mode:
            assert brgemm.absent.__wrapped__() == expected
    finally:
        torch.set_default_dtype(dtype)


@pytest.mark.parametrize("size", [1, 127, 128, 129, 256, 1000, 4096])
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_cuts_cover_a_side_in_blocks_within_the_limit(
    size: int, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    cuts = _cuts(size, limit=256)
    assert [index for cut in cuts for index in range(cut.start, cut.stop)] == list(range(size))
    assert all(cut.stop - cut.start <= 256 for cut in cuts)
    assert len(cuts) >= min(num_threads, -(-size // brgemm.PANEL))
