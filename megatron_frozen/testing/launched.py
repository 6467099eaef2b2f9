"""`run_ranks` on the ranks that torchrun started: rank 0 runs the tests, the others run the bodies that it hands out.

`torchrun --nproc-per-node N -m pytest FOLDER` starts pytest N times. A conftest of the folder takes pytest's hook from
here, and from then on one of the N is pytest and the others are its ranks: a test runs once, and what needs no ranks
runs as it does without torchrun. Requests and answers travel through torchrun's own store, so that each body has a
default process group of as many ranks as it asked for, on NCCL where there are GPUs (gloo for CPU tensors beside it).
"""

from __future__ import annotations

import atexit
import datetime
import itertools
import os
import pickle
import sys
import time
import unittest
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.rendezvous import rendezvous

from megatron_frozen.testing.body import RankError, Request, name_ranks, run_body

_GRACE_S = 30.0  # how much longer than its collectives a body may take
_IDLE_S = 30 * 24 * 3600  # rank 0 may run tests without ranks for as long as it likes
_PIECE_BYTES = 4 * 2**20  # the store takes no message above 8 MiB
_OTHER_VARIABLES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
_VARIABLE_PREFIXES = ("TORCHELASTIC_", "GROUP_", "ROLE_", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What rank 0 asks of all others; a world size of 0 ends them."""

    world_size: int
    timeout_s: float = 0
    job: bytes = b""
    path: tuple[str, ...] = ()


class LaunchedRanks:
    """This process's place among the ranks of torchrun, which all go through the same numbered jobs."""

    def __init__(self) -> None:
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.backend = choose_backend(self.local_rank, num_gpus=torch.cuda.device_count())
        self._store, self.rank, self.world_size = next(rendezvous("env://"))
        # What tests start, or set up in this process, is theirs and no part of torchrun's world.
        for name in list(os.environ):
            if name in _OTHER_VARIABLES or name.startswith(_VARIABLE_PREFIXES):
                del os.environ[name]
        self._numbers = itertools.count()
        self._is_out_of_step = False

    def serve(self) -> None:
        """Run the bodies that rank 0 hands out, until it ends them."""
        for number in self._numbers:
            job: _Job = self._get(f"job {number}", timeout_s=_IDLE_S)
            if not job.world_size:
                return
            if self.rank < job.world_size:
                answer = self._answer(job, number=number)
                self._set(f"answer {number} of {self.rank}", answer)

    def end(self) -> None:
        """Let the other ranks end."""
        self._set(f"job {next(self._numbers)}", _Job(world_size=0))

    def run(self, job: bytes, *, world_size: int, timeout_s: float, name: str) -> list[Any]:
        """Do what `run_ranks` says, on the first `world_size` ranks, of which this one is the first."""
        if world_size > self.world_size:
            raise unittest.SkipTest(f"needs {world_size} ranks, torchrun gave {self.world_size}")
        if self._is_out_of_step:
            raise RankError(f"{name} did not run: an earlier body still runs on a rank, so start torchrun anew.")
        number = next(self._numbers)
        request = _Job(world_size=world_size, timeout_s=timeout_s, job=job, path=tuple(sys.path))
        self._set(f"job {number}", request)
        answers = {0: self._answer(request, number=number)}
        deadline = time.monotonic() + timeout_s + _GRACE_S
        stuck = []
        for rank in range(1, world_size):
            key = f"answer {number} of {rank}"
            try:
                answers[rank] = self._get(key, timeout_s=max(1.0, deadline - time.monotonic()))
            except dist.DistStoreError:
                stuck.append(rank)
        for rank in range(1, world_size):
            self._forget(f"answer {number} of {rank}")
        failures = {rank: answer for rank, answer in answers.items() if not answer[0]}
        if not stuck and not failures:
            return [pickle.loads(answers[rank][1]) for rank in range(world_size)]
        self._is_out_of_step = bool(stuck)
        raise _error(failures, stuck=stuck, world_size=world_size, name=name)

    def _answer(self, job: _Job, *, number: int) -> tuple[bool, Any, float]:
        request = Request(
            rank=self.rank,
            local_rank=self.local_rank,
            world_size=job.world_size,
            backend=self.backend,
            timeout_s=job.timeout_s,
            job=job.job,
            path=list(job.path),
        )
        with warnings.catch_warnings():
            warnings.simplefilter("default")  # rank 0 is within a test, where pytest may make them errors
            answer = run_body(request, PrefixStore(f"group {number}", self._store))
        if not answer[0] and "nccl" in self.backend:
            # The others may wait for this rank until NCCL ends their processes, and the report of rank 0 with them.
            print(f"rank {self.rank} of {job.world_size} failed:\n{answer[1]}", file=sys.stderr, flush=True)
        return answer

    def _set(self, key: str, value: Any) -> None:
        data = pickle.dumps(value)
        pieces = [data[start : start + _PIECE_BYTES] for start in range(0, len(data), _PIECE_BYTES)]
        for index, piece in enumerate(pieces):
            self._store.set(f"{key}, piece {index}", piece)  # pyright: ignore[reportArgumentType] (bytes do)
        self._store.set(key, str(len(pieces)))

    def _get(self, key: str, *, timeout_s: float) -> Any:
        self._store.wait([key], datetime.timedelta(seconds=timeout_s))
        num_pieces = int(self._store.get(key))
        return pickle.loads(b"".join(self._store.get(f"{key}, piece {index}") for index in range(num_pieces)))

    def _forget(self, key: str) -> None:
        if self._store.check([key]):
            for index in range(int(self._store.get(key))):
                self._store.delete_key(f"{key}, piece {index}")


def choose_backend(local_rank: int, *, num_gpus: int) -> str:
    """Return torch.distributed's name of the backends for this rank: with GPUs NCCL, and gloo for CPU tensors.

    RankError if there are GPUs, and none for this rank.
    """
    if not num_gpus:
        return "gloo"
    if local_rank >= num_gpus:
        raise RankError(
            f"torchrun started a rank {local_rank} on a machine that shows {num_gpus} GPUs: start at most that many, "
            "or hide the GPUs with CUDA_VISIBLE_DEVICES= to run on CPUs."
        )
    return "cpu:gloo,cuda:nccl"


def _error(failures: dict[int, Any], *, stuck: list[int], world_size: int, name: str) -> RankError:
    in_order = sorted(failures, key=lambda rank: failures[rank][2])
    texts = {rank: failures[rank][1].rstrip() for rank in in_order}
    order = ", the first to fail named first" if len(texts) > 1 else ""
    lines = [f"{name} failed on {name_ranks(in_order)} of {world_size}{order}."] if texts else []
    if stuck:
        lines.append(f"{name} did not end on {name_ranks(stuck)} of {world_size}, which torchrun started.")
    sections = [f"--- rank {rank} ---\n{text}" for rank, text in texts.items()]
    return RankError("\n".join(lines + sections), failures=texts | dict.fromkeys(stuck, "it did not end"))


_JOINED: list[LaunchedRanks] = []


def launched_by_torchrun() -> LaunchedRanks | None:
    """Return the ranks of torchrun if this process joined them, which it does once."""
    return _JOINED[0] if _JOINED else None


def pytest_cmdline_main(config: Any) -> int | None:
    """pytest's hook around a whole run: under torchrun, ranks above 0 serve instead of running tests.

    Nothing happens without torchrun.
    """
    del config
    if not dist.is_torchelastic_launched():
        return None
    ranks = LaunchedRanks()
    if ranks.rank > 0:
        ranks.serve()
        return 0
    _JOINED.append(ranks)
    atexit.register(ranks.end)
    return None
