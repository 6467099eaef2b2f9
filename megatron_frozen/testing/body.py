"""A body on one rank: a fresh process group around it, a known state of the process before it, its outcome after it."""

from __future__ import annotations

import datetime
import os
import pickle
import random
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from megatron_frozen.comm import destroy_model_parallel


class RankError(AssertionError):
    """A body did not end well on every rank. `failures` maps each rank at fault to what is known about it."""

    def __init__(self, message: str, *, failures: dict[int, str] | None = None) -> None:
        super().__init__(message)
        self.failures = failures or {}


@dataclass(frozen=True, kw_only=True)
class Request:
    """One body for one rank. `job` is the pickled pair of the body and its further arguments."""

    rank: int
    local_rank: int
    world_size: int
    backend: str
    timeout_s: float
    job: bytes
    path: list[str] = field(default_factory=lambda: list(sys.path))


def rank_device() -> torch.device:
    """Where a body puts its tensors: on its rank's GPU; on the CPU where the process sees none, as ranks of gloo do."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def run_body(request: Request, store: Store) -> tuple[bool, Any, float]:
    """Run the body; return whether it ended well, its pickled value or the traceback, and when it ended."""
    try:
        return _run_in_group(request, store)
    except BaseException:
        return False, traceback.format_exc(), time.monotonic()


def _run_in_group(request: Request, store: Store) -> tuple[bool, Any, float]:
    sys.path[:] = request.path
    with _clean_process(request):
        if "nccl" in request.backend:
            torch.cuda.set_device(request.local_rank)
        dist.init_process_group(
            request.backend,
            store=store,
            rank=request.rank,
            world_size=request.world_size,
            timeout=datetime.timedelta(seconds=request.timeout_s),
        )
        try:
            body, args = pickle.loads(request.job)
            return True, _pickled(body(request.rank, request.world_size, *args)), time.monotonic()
        except BaseException:  # SystemExit too: the parent must hear of it
            # Timed before our group goes away, since that makes the peers fail too and they are not the culprits.
            return False, traceback.format_exc(), time.monotonic()
        finally:
            _destroy_groups()


def _pickled(value: Any) -> bytes:
    """Plain pickle copies tensors by value; multiprocessing's own pickler would share memory that dies with us."""
    try:
        return pickle.dumps(value)
    except Exception as error:
        raise RankError(f"the return value cannot be pickled ({error}): return plain values or tensors.") from error


def _destroy_groups() -> None:
    destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def _clean_process(request: Request) -> Iterator[None]:
    """Gives the body fixed seeds and torchrun's variables, and takes back what it changes in the process."""
    environment, folder, dtype = dict(os.environ), os.getcwd(), torch.get_default_dtype()
    num_threads = torch.get_num_threads()
    os.environ.update(
        RANK=str(request.rank),
        LOCAL_RANK=str(request.local_rank),
        WORLD_SIZE=str(request.world_size),
        # Else a rank whose body sends nothing takes its groups down while its peers still connect, and they fail.
        TORCH_DIST_INIT_BARRIER="1",
    )
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        torch.set_num_threads(num_threads)
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(True)


def name_ranks(ranks: list[int]) -> str:
    """Return `rank 1`, or `ranks 0, 2`."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
