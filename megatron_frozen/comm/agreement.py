"""Agreement: what fails on one rank fails on all of them, at once and with the rank and the cause named."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from megatron_frozen.comm.collectives import broadcast_object, gather_objects
from megatron_frozen.comm.groups import WORLD, AnyGroup, global_rank, group_rank, group_size
from megatron_frozen.errors import MegatronFrozenError, ParallelError

T = TypeVar("T")


def raise_together(error: Exception | None, *, group: AnyGroup = WORLD, doing: str) -> None:
    """Raise on every rank of ``group`` if ``error`` is set on any: two small collectives, reached by every rank.

    A rank with an error of its own raises that one; the others raise ParallelError naming the first failed rank, as
    numbered among all ranks, and its cause. If all ranks failed alike with a user's error, each raises its own."""
    said = f"{type(error).__name__}: {error}" if error is not None else None
    if isinstance(error, MegatronFrozenError):
        said = str(error)
    for rank, message in enumerate(gather_objects(said, group=group)):
        if message is not None:
            if error is not None:
                raise error
            raise ParallelError(f"rank {global_rank(rank, group=group)} failed while {doing}: {message}")


@contextmanager
def together(*, group: AnyGroup = WORLD, doing: str) -> Iterator[None]:
    """Run a body that holds no collective of ``group`` itself; if it raises on one rank, it raises on all."""
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    raise_together(error, group=group, doing=doing)


def on_first_rank(work: Callable[[], T], *, group: AnyGroup = WORLD, doing: str) -> T:
    """Run ``work`` on rank 0 of ``group`` alone and return its picklable result on all; if it raises, all raise."""
    if group_size(group) == 1:
        return work()
    pickled = b""
    with together(group=group, doing=doing):  # pickling fails in here too, before the others wait for the result
        if group_rank(group) == 0:
            pickled = pickle.dumps(work())
    return pickle.loads(broadcast_object(pickled, group=group))
