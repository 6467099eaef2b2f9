"""The ranks of a command: the process groups that torchrun's variables ask for, and nothing at all without torchrun."""

from __future__ import annotations

import ctypes
import datetime
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from megatron_frozen.comm import destroy_model_parallel, initialize_model_parallel
from megatron_frozen.environment import launched_rank
from megatron_frozen.errors import ParallelError

_PR_SET_PDEATHSIG = 1  # of Linux's prctl.h


@contextmanager
def parallel_ranks(*, tensor_model_parallel_size: int, timeout_s: float) -> Iterator[torch.device]:
    """Set up the tensor- and data-parallel groups around the body and yield this rank's device.

    Objects and CPU tensors travel by gloo, CUDA tensors by NCCL. After an exception the groups of several ranks
    are left as they are: taking them down can mean waiting for ranks that are gone, and the process ends anyway.
    Raises ParallelError if the ranks do not meet.
    """
    _, world_size, local_rank = launched_rank()
    if dist.is_torchelastic_launched():
        _end_with_parent()
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    ours = world_size > 1 and not dist.is_initialized()
    if ours:
        try:
            dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout_s))
        except (ValueError, dist.DistError) as error:
            raise ParallelError(
                f"the {world_size} ranks did not meet at MASTER_ADDR and MASTER_PORT ({error}); "
                "start all of them, at one address whose port is free"
            ) from error
    initialize_model_parallel(tensor_model_parallel_size, distributed_timeout_minutes=timeout_s / 60)
    try:
        yield device
    except BaseException:
        if world_size == 1:
            destroy_model_parallel()
        raise
    destroy_model_parallel()
    if ours:
        dist.destroy_process_group()


def _end_with_parent() -> None:
    """Let Linux send SIGTERM to this process when torchrun ends.

    Killed with SIGKILL, torchrun cannot end its ranks, which would train on and hold their output folder. A torchrun
    that is gone before this call is found out when the ranks meet, as it serves the place where they do.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died in between
        os.kill(os.getpid(), signal.SIGTERM)


def is_lost_rank(error: Exception) -> bool:
    """Whether a collective failed since another rank is gone or stuck. Gloo's errors are bare RuntimeErrors."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
