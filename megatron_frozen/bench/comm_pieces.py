"""The part of `bench comm` that takes time: a column layer's backward whose all-reduce of dX is cut into pieces.

Beside them, what bounds them: the products alone and the all-reduce alone. Whole, a frozen weight's backward takes
their sum; cut without cost, it would take little more than the longer of the two. What a cut costs where nothing
travels is told by dX's product alone, in as many pieces. A ratio is to the same way whole, or to the whole backward.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from megatron_frozen import gemm
from megatron_frozen.bench.runner import BenchConfig, Row
from megatron_frozen.bench.targets import number
from megatron_frozen.comm import (
    all_reduce,
    all_reduce_,
    get_tensor_model_parallel_group,
    group_rank,
    initialize_model_parallel,
)
from megatron_frozen.diagnostics import Recorder
from megatron_frozen.layers import ColumnParallelLinear, ModelParallelConfig
from megatron_frozen.testing import run_ranks

NUM_RANKS = 2
PIECES = (1, 2, 4, 8)
PRODUCTS, ALL_REDUCE, PRODUCT, BACKWARD = "products alone", "all-reduce alone", "dX's product alone", "backward"
PAYS_BELOW = 0.95  # of the whole's time: what is nearer to it is within the noise of a shared machine
COLUMNS = ("weight", "dtype", "shape", "way", "pieces", "median_ms", "ratio", "collectives", "payload_bytes", "verdict")

Way = tuple[str, int | str, Callable[[], object]]  # its name, its number of pieces if any, its call


@dataclass(frozen=True, kw_only=True, slots=True)
class PiecesConfig:
    """A column layer and what goes through it."""

    tokens: int
    """Rows of dX."""
    hidden: int
    """Input features."""
    features: int
    """Output features of one rank."""
    is_frozen: bool = True
    """Whether the weight is frozen; one that trains multiplies dW while dX travels whole, too."""
    dtype: torch.dtype = torch.bfloat16
    """Of weight and activations."""


CASES = (
    PiecesConfig(tokens=1024, hidden=1024, features=2816),
    PiecesConfig(tokens=1024, hidden=1024, features=512),
    PiecesConfig(tokens=1024, hidden=1024, features=512, is_frozen=False),
    PiecesConfig(tokens=1024, hidden=1024, features=512, dtype=torch.float32),
)
SMALL_CASES = (
    PiecesConfig(tokens=16, hidden=32, features=48),
    PiecesConfig(tokens=16, hidden=32, features=48, is_frozen=False),
)


def measure(config: BenchConfig) -> list[Row]:
    """Return a row for each case and way on two ranks, and a verdict for each case: how much the best cut takes."""
    rows: list[Row] = []
    for case in SMALL_CASES if config.small else CASES:
        by_rank = run_ranks(NUM_RANKS, partial(_time, case=case, repeats=config.repeats), timeout_s=600)
        rows += _rows(case, by_rank)
    return rows


def _time(rank: int, world_size: int, *, case: PiecesConfig, repeats: int) -> list[tuple[Row, list[float]]]:
    """Return each way, described, and the seconds of its samples; ways go in turn, and ranks start each together."""
    del rank
    initialize_model_parallel(world_size)
    group = get_tensor_model_parallel_group()
    found: list[tuple[Row, list[float]]] = []
    ways = _ways(case, world_size)
    for name, pieces, call in ways:
        with Recorder() as seen:  # and no first time among the samples
            call()
        counts = {"collectives": seen.collectives().total(), "payload_bytes": seen.payload_bytes().total()}
        found.append(({"threads": torch.get_num_threads(), "way": name, "pieces": pieces, **counts}, []))
    for _ in range(repeats):
        for (_, _, call), (_, samples) in zip(ways, found, strict=True):
            all_reduce(torch.zeros(1), group=group)
            start = time.perf_counter()
            call()
            samples.append(time.perf_counter() - start)
    return found


def _ways(case: PiecesConfig, world_size: int) -> list[Way]:
    """Return the ways to take the gradients of one layer, after the two halves of what they do."""
    group = get_tensor_model_parallel_group()
    generator = torch.Generator().manual_seed(group_rank(group))
    x, grad = (
        torch.randn(case.tokens, 1, columns, generator=generator).to(case.dtype)
        for columns in (case.hidden, case.features)
    )
    x.requires_grad_()
    weight = torch.nn.Parameter(torch.randn(case.features, case.hidden, generator=generator).to(case.dtype))
    weight.requires_grad_(not case.is_frozen)
    wanted = (x,) if case.is_frozen else (x, weight)

    def backward(*, pieces: int, is_summed: bool = True) -> Callable[[], object]:
        layer = ColumnParallelLinear(
            case.hidden,
            case.features * world_size,
            config=ModelParallelConfig(params_dtype=case.dtype, allreduce_dgrad_pieces=pieces),
            init_method=torch.nn.init.zeros_,
            bias=False,
            skip_weight_param_allocation=True,
            disable_grad_reduce=not is_summed,
        )
        y, _ = layer(x, weight)
        return partial(torch.autograd.grad, y, wanted, grad, retain_graph=True)

    def product(*, pieces: int) -> None:
        grad_RO = grad.flatten(0, 1)
        dX_RI = grad_RO.new_empty(case.tokens, case.hidden)
        for rows, part in zip(grad_RO.tensor_split(pieces), dX_RI.tensor_split(pieces), strict=True):
            gemm.dgrad(rows, weight.detach(), out=part)

    return [
        (PRODUCTS, "", backward(pieces=1, is_summed=False)),
        (ALL_REDUCE, "", partial(all_reduce_, torch.zeros_like(x).detach(), group=group)),
        *((PRODUCT, pieces, partial(product, pieces=pieces)) for pieces in PIECES),
        *((BACKWARD, pieces, backward(pieces=pieces)) for pieces in PIECES),
    ]


def _rows(case: PiecesConfig, by_rank: Sequence[list[tuple[Row, list[float]]]]) -> list[Row]:
    same: Row = {
        "kind": "time",
        "ranks": len(by_rank),
        "weight": "frozen" if case.is_frozen else "trainable",
        "dtype": str(case.dtype),
        "shape": f"{case.tokens}x{case.hidden}, {case.features} features of each rank",
    }
    rows: list[Row] = []
    for of_ranks in zip(*by_rank, strict=True):
        slowest = [max(times) for times in zip(*(samples for _, samples in of_ranks), strict=True)]
        rows.append(same | of_ranks[0][0] | {"median_ms": statistics.median(slowest) * 1e3})
    wholes = {row["way"]: row for row in rows if row["pieces"] == 1}
    for row in rows:
        row["ratio"] = number(row, "median_ms") / number(wholes.get(row["way"], wholes[BACKWARD]), "median_ms")
    return [*rows, _verdict(rows)]


def _verdict(rows: Sequence[Row]) -> Row:
    """Return the row that says whether the fastest cut pays; of equal ones, the fewest pieces."""
    cut = [row for row in rows if row["way"] == BACKWARD and row["pieces"] != 1]
    best = min(cut, key=lambda row: number(row, "ratio"))
    says = "pays" if number(best, "ratio") < PAYS_BELOW else "does not pay"
    return best | {"kind": "verdict", "verdict": says, "way": "the fastest cut"}
