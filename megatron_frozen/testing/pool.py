"""A standing pool of rank processes, so that a distributed unit test costs milliseconds instead of a torch import.

Spawned (never forked), rendezvous through a file (no ports to collide), one fresh process group per body, a timeout on
everything. Workers live as long as the pytest process; the pool is thrown away only when a rank is stuck or dead.
"""

from __future__ import annotations

import atexit
import faulthandler
import itertools
import multiprocessing as mp
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from megatron_frozen.testing.body import RankError, Request, name_ranks, run_body
from megatron_frozen.testing.launched import launched_by_torchrun

DEVICE_OF_BACKEND = {"gloo": "cpu", "nccl": "cuda"}
"""The one list that device and backend come from; a test that wants NCCL parametrizes over its keys."""

_GRACE_S = 5.0  # how long the other ranks get to finish by themselves once one has failed
_DUMP_S = 10.0  # how long a stuck rank gets to begin to write its stack, on however busy a machine
_REST_S = 0.5  # and to write the rest of it
_LOG_TAIL_CHARS = 4000


def run_ranks(
    world_size: int, body: Callable[..., Any], *args: Any, timeout_s: float = 120, backend: str | None = None
) -> list[Any]:
    """Runs `body(rank, world_size, *args)` on `world_size` processes and returns every rank's return value, by rank.

    The default process group is initialised before the body and destroyed after it, model-parallel state with it. Each
    body starts with torch, `random` and the process environment in the same state (seed 0, one torch
    thread); RANK, LOCAL_RANK and WORLD_SIZE are set as torchrun sets them.

    Args:
        world_size: number of ranks, 1 or more.
        body: a function at module level of an importable module (spawned processes import it by name).
        args: picklable; each rank gets its own copy. Tensors travel by value, both ways.
        timeout_s: seconds until the ranks that have not finished are reported and the pool is killed.
        backend: a key of `DEVICE_OF_BACKEND`. None: the ranks that torchrun started, on NCCL where there are GPUs, if
            `megatron_frozen.testing.launched` joined them; else gloo on CPUs.

    Raises:
        RankError: a rank raised (its traceback is in the message), died, hung, or returned what cannot be pickled; or
            the request itself cannot run.
        unittest.SkipTest: torchrun started fewer ranks.
    """
    launched_ranks = launched_by_torchrun() if backend is None else None
    backend = backend or "gloo"
    _check_request(world_size, body=body, backend=backend)
    try:
        job = pickle.dumps((body, args))
    except Exception as error:
        raise RankError(
            f"{_name(body)} and its arguments must be picklable to reach the ranks ({error}): "
            "make the body a function at module level and pass plain values or tensors."
        ) from error
    if launched_ranks is not None:
        return launched_ranks.run(job, world_size=world_size, timeout_s=timeout_s, name=_name(body))
    pool = _POOLS[DEVICE_OF_BACKEND[backend]]
    pool.grow(world_size)
    return pool.run(job, world_size=world_size, timeout_s=timeout_s, backend=backend, name=_name(body))


def _name(body: Callable[..., Any]) -> str:
    return getattr(body, "__qualname__", repr(body))


def _check_request(world_size: int, *, body: Callable[..., Any], backend: str) -> None:
    if world_size < 1:
        raise RankError(f"{_name(body)} was asked to run on {world_size} ranks: ask for 1 or more.")
    if backend not in DEVICE_OF_BACKEND:
        raise RankError(f"backend {backend!r} is not one of {', '.join(DEVICE_OF_BACKEND)}.")
    num_devices = torch.cuda.device_count() if DEVICE_OF_BACKEND[backend] == "cuda" else world_size
    if world_size > num_devices:
        raise RankError(f"{world_size} {backend} ranks need {world_size} GPUs and this machine has {num_devices}.")


# ---------------------------------------------------------------------------------------------- the parent's side


@dataclass(frozen=True, kw_only=True)
class _Request:
    """What goes through the pipe: a request, and the file where its ranks meet."""

    body: Request
    store: str


@dataclass(slots=True)
class _Worker:
    process: SpawnProcess
    pipe: Connection
    log: Path
    log_start: int = 0

    def log_tail(self) -> str:
        """What the rank printed during this body, stdout and stderr together."""
        with self.log.open("rb") as file:
            file.seek(self.log_start)
            text = file.read().decode(errors="replace").strip()
        return text[-_LOG_TAIL_CHARS:]


@dataclass(slots=True)
class _Answers:
    values: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    failed_at_s: dict[int, float] = field(default_factory=dict)
    dead: bool = False

    def missing(self, world_size: int) -> list[int]:
        return [rank for rank in range(world_size) if rank not in self.values and rank not in self.failures]


class _Pool:
    """The workers of this process. Any world size up to the number of workers runs on the first ones."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._workers: list[_Worker] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._job_numbers = itertools.count()

    def grow(self, num_workers: int) -> None:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="megatron_frozen_pool_")
        context = mp.get_context("spawn")
        for index in range(len(self._workers), num_workers):
            ours, theirs = context.Pipe()
            log = Path(self._folder.name, f"rank_{index}.log")
            log.touch()
            arguments = (theirs, str(log), self._device)
            process = context.Process(target=_serve, args=arguments, name=f"rank {index}", daemon=True)
            process.start()
            theirs.close()  # else the death of the worker would not show as an end of file
            self._workers.append(_Worker(process=process, pipe=ours, log=log))

    def kill(self) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.pipe.close()
        self._workers.clear()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def run(self, job: bytes, *, world_size: int, timeout_s: float, backend: str, name: str) -> list[Any]:
        assert self._folder is not None
        store = Path(self._folder.name, f"store_{next(self._job_numbers)}")
        answers = _Answers()
        try:
            for rank, worker in enumerate(self._workers[:world_size]):
                worker.log_start = worker.log.stat().st_size
                body = Request(
                    rank=rank,
                    local_rank=rank,
                    world_size=world_size,
                    backend=backend,
                    # Longer than the parent waits: the parent's report is the better one. Not endless: no orphan stays.
                    timeout_s=timeout_s + 60,
                    job=job,
                )
                _send(worker, _Request(body=body, store=str(store)), answers=answers)
            self._collect(answers, world_size=world_size, timeout_s=timeout_s)
        except BaseException:  # also KeyboardInterrupt and pytest-timeout: the ranks are in an unknown state
            self.kill()
            raise
        stuck = answers.missing(world_size)
        if not stuck and not answers.failures:
            store.unlink(missing_ok=True)
            return [answers.values[rank] for rank in range(world_size)]
        error = self._error(answers, stuck=stuck, world_size=world_size, timeout_s=timeout_s, name=name)
        if stuck or answers.dead:
            self.kill()
        raise error

    def _collect(self, answers: _Answers, *, world_size: int, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while missing := answers.missing(world_size):
            if answers.failures:
                deadline = min(deadline, time.monotonic() + _GRACE_S)
            pipes = {self._workers[rank].pipe: rank for rank in missing}
            ready = wait(list(pipes), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                return
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = pipes[pipe]
                _receive(self._workers[rank], rank=rank, answers=answers)

    def _error(self, answers: _Answers, *, stuck: list[int], world_size: int, timeout_s: float, name: str) -> RankError:
        in_order = sorted(answers.failures, key=lambda rank: answers.failed_at_s[rank])
        failures = {rank: answers.failures[rank] for rank in in_order}
        order = ", the first to fail named first" if len(failures) > 1 else ""
        lines = [f"{name} failed on {name_ranks(in_order)} of {world_size}{order}." if failures else ""]
        if stuck:
            why = "after another rank had failed" if failures else f"within {timeout_s:g} s"
            lines.append(f"{name} did not finish on {name_ranks(stuck)} of {world_size} {why}.")
            self._dump_stacks(stuck)
        sections = [f"--- rank {rank} ---\n{text.rstrip()}" for rank, text in failures.items()]
        for rank in stuck:
            text = f"not finished; it was here:\n{self._workers[rank].log_tail()}"
            sections.append(f"--- rank {rank} ---\n{text}")
            failures[rank] = text
        for rank in in_order:
            if not answers.dead and (printed := self._workers[rank].log_tail()):
                sections.append(f"--- rank {rank} printed ---\n{printed}")
        return RankError("\n".join([line for line in lines if line] + sections), failures=failures)

    def _dump_stacks(self, ranks: list[int]) -> None:
        """faulthandler answers the signal from C, so that a rank stuck in a collective still says where."""
        silent = {}
        for worker in (self._workers[rank] for rank in ranks):
            if worker.process.pid is not None and worker.process.is_alive():
                silent[worker.log] = worker.log.stat().st_size
                os.kill(worker.process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + _DUMP_S
        while any(log.stat().st_size == size for log, size in silent.items()) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(_REST_S)


def _send(worker: _Worker, request: _Request, *, answers: _Answers) -> None:
    try:
        worker.pipe.send_bytes(pickle.dumps(request))
    except OSError:
        _record_death(worker, rank=request.body.rank, answers=answers)


def _receive(worker: _Worker, *, rank: int, answers: _Answers) -> None:
    try:
        ok, value, ended_at_s = pickle.loads(worker.pipe.recv_bytes())
    except (EOFError, ConnectionError):
        _record_death(worker, rank=rank, answers=answers)
        return
    if ok:
        answers.values[rank] = pickle.loads(value)
    else:
        answers.failures[rank] = value
        answers.failed_at_s[rank] = ended_at_s


def _record_death(worker: _Worker, *, rank: int, answers: _Answers) -> None:
    worker.process.join(timeout=_GRACE_S)
    printed = worker.log_tail() or "it printed nothing"
    answers.failures[rank] = f"the process ended with exit code {worker.process.exitcode}; last lines:\n{printed}"
    answers.failed_at_s[rank] = time.monotonic()
    answers.dead = True


_POOLS = {device: _Pool(device) for device in DEVICE_OF_BACKEND.values()}
for _pool in _POOLS.values():
    atexit.register(_pool.kill)


# ---------------------------------------------------------------------------------------------- the worker's side


def _serve(pipe: Connection, log: str, device: str) -> None:
    """The life of a worker: one body after another, until the parent closes the pipe."""
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C belongs to the parent, which then kills the pool
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # several ranks of gloo may outnumber the GPUs, and need none
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a container's host name need not resolve
    while True:
        try:
            request = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        answer = run_body(request.body, FileStore(request.store, request.body.world_size))
        sys.stdout.flush()
        pipe.send_bytes(pickle.dumps(answer))
