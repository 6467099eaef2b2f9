"""Training steps of several ways, each in a process of its own, one step at a time in turn.

A process of its own gives each way its own peak of memory and its own compiler; taking turns lets whatever else the
machine does hit all of them. The peak leaves out a way's first step, which may compile.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import torch

from megatron_frozen.bench.runner import peak_mib
from megatron_frozen.errors import MegatronFrozenError

Step = Callable[[int], Mapping[str, float]]
"""From the step's number to figures of it, such as its loss."""
Build = Callable[[], Step]
"""Makes the way in its process; picklable."""
_ANSWER_S = 900.0  # longer than any step or compilation here


@dataclass(kw_only=True)
class Run:
    """What the steps of one way came to."""

    figures: list[Mapping[str, float]] = field(default_factory=list)
    """What each step returned, with its time under ``seconds``."""
    peak_mib: float = 0.0
    """Highest resident size of the process since the end of its first step; NaN where the system does not count it from
    there."""

    def all(self, figure: str) -> list[float]:
        """Return one figure of all steps."""
        return [figures[figure] for figures in self.figures]

    def median(self, figure: str, *, after: int) -> float:
        """Return its median over the steps after the first ``after``, which warm up and compile."""
        return statistics.median(self.all(figure)[after:])


class _Worker:
    def __init__(self, build: Build, *, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._end, theirs = context.Pipe()
        self._process: BaseProcess = context.Process(target=_serve, args=(theirs, build, threads), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, question: int | None) -> Mapping[str, float]:
        """Return the figures of the step of that number; for None, the peak in MiB as ``peak_mib``."""
        with contextlib.suppress(BrokenPipeError):  # its process ended, as the answer says
            self._end.send(question)
        return self.answer()

    def answer(self) -> Mapping[str, float]:
        try:
            answer = self._end.recv() if self._end.poll(_ANSWER_S) else f"no answer within {_ANSWER_S:.0f} s"
        except EOFError:
            answer = "its process ended"
        if isinstance(answer, str):
            raise MegatronFrozenError(f"a way of this benchmark failed, so there is nothing to compare: {answer}")
        return answer

    def stop(self) -> None:
        self._process.kill()
        self._process.join()


def take_turns(ways: Mapping[str, Build], *, num_steps: int, fewer: Mapping[str, int] | None = None) -> dict[str, Run]:
    """Run ``num_steps`` rounds of a step of each way, in turn, on as many threads as this process has.

    A way in ``fewer`` takes that many steps, its first in the first round and the others spread evenly over the rest.
    Says on stderr when a way is built, when it has taken its first step, which may compile for minutes, and when a
    round is over.

    Raises MegatronFrozenError with the traceback of a way that fails; all processes are ended then.
    """
    fewer = fewer or {}
    assert fewer.keys() <= ways.keys(), "steps of a way that is not measured"
    rounds = {name: _rounds(fewer.get(name, num_steps), of=num_steps) for name in ways}
    workers: dict[str, _Worker] = {}
    runs = {name: Run() for name in ways}
    try:
        for name, build in ways.items():  # one after another: building takes memory and cores
            start = time.perf_counter()
            workers[name] = _Worker(build, threads=torch.get_num_threads())
            workers[name].answer()
            _say(f"built {name}", since=start)
        for index in range(num_steps):
            start = time.perf_counter()
            for name, worker in workers.items():
                if index in rounds[name]:
                    runs[name].figures.append(worker.ask(len(runs[name].figures)))
                if index == 0:
                    print(f"first step of {name}: {runs[name].all('seconds')[0]:.1f} s", file=sys.stderr, flush=True)
            _say(f"round {index + 1} of {num_steps}", since=start)
        for name, worker in workers.items():
            runs[name].peak_mib = worker.ask(None)["peak_mib"]
    finally:
        for worker in workers.values():
            worker.stop()
    return runs


def _rounds(num_steps: int, *, of: int) -> set[int]:
    """Return the rounds, of so many, in which a way takes its steps."""
    assert 1 <= num_steps <= of, f"{num_steps} steps in {of} rounds"
    return {index * of // num_steps for index in range(num_steps)}


def _say(text: str, *, since: float) -> None:
    print(f"{text}: {time.perf_counter() - since:.1f} s", file=sys.stderr, flush=True)


def _serve(end: Connection, build: Build, threads: int) -> None:
    try:
        torch.set_num_threads(threads)
        step = build()
        end.send({})
        figures = _timed(step, end.recv())
        with peak_mib() as peak:  # begins before the answer: free pages go back while no other way steps
            end.send(figures)
            while (index := end.recv()) is not None:
                end.send(_timed(step, index))
        end.send({"peak_mib": peak()})
    except BaseException:  # whatever it was, the parent waits for an answer
        end.send(traceback.format_exc())


def _timed(step: Step, index: int) -> Mapping[str, float]:
    start = time.perf_counter()
    figures = step(index)
    return {**figures, "seconds": time.perf_counter() - start}
