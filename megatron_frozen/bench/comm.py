"""Collectives of one decoder layer: without adapters, with ours, and with Megatron-Bridge's scheme.

Counted, not timed: the numbers are the same on any machine. ``payload_bytes`` is the size of the whole tensor of each
collective; ``sent_bytes`` what a ring sends for it from each rank: twice (n - 1) / n of it for an all-reduce and once
for a gather or a reduce-scatter. What ours sums once a step, the gradients of the replicated factors, goes with all
other such gradients in one bucket, whatever the number of layers and micro-batches.

Timed, in the rows of kind time: a column layer's backward on two ranks, its all-reduce of dX whole and in pieces that
travel while the next is multiplied; the rows of kind verdict say whether that pays here. gloo sums on the ranks' own
cores, so there is time to hide only where a core is idle. What the cut itself costs is in the rows of dX's product.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

from megatron_frozen.bench import comm_pieces
from megatron_frozen.bench.comm_ranks import (
    BACKWARD,
    DECODER_LAYER,
    FORWARD,
    KINDS,
    NONE,
    OURS,
    STEP,
    SizesConfig,
    count,
)
from megatron_frozen.bench.runner import BenchConfig, Row, bar_picture, stamp, telling, text_table, write_csv
from megatron_frozen.bench.targets import at_most, number
from megatron_frozen.testing import run_ranks

RANKS = (2, 4)
SMALL_SIZES = SizesConfig(sequence=16, hidden=64, intermediate=96, rank=4)
COLUMNS = ("layer", "ranks", "sequence_parallel", "scheme", "phase", *KINDS, "collectives", "payload_bytes",
           "extra_collectives", "extra_bytes")  # fmt: skip


def run(config: BenchConfig) -> None:
    """Count on 2 and on 4 ranks of this machine, time pieces on 2, print tables, write comm.csv and comm.png."""
    mark = stamp(dataclasses.replace(config, device="cpu"))
    rows = [mark | row for num_ranks in RANKS for row in measure(num_ranks, small=config.small)]
    targets = [mark | row for row in verdicts(rows)]
    pieces = [mark | row for row in comm_pieces.measure(config)]
    columns = ("layer", "ranks", "sequence_parallel", "phase", "figure", "value", "target", "met")
    tables = (text_table(rows, COLUMNS), text_table(targets, columns), text_table(pieces, comm_pieces.COLUMNS))
    groups: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["layer"] != DECODER_LAYER and row["phase"] != STEP:
            group = groups.setdefault(f"{row['ranks']} ranks{', seq. par.' if row['sequence_parallel'] else ''}", {})
            scheme = str(row["scheme"])
            group[scheme] = group.get(scheme, 0.0) + number(row, "payload_bytes") / 2**20
    path, title = config.output / "comm.csv", "Collectives of one decoder layer"
    with telling("\n\n".join(tables), path=path):
        write_csv(path, rows + targets + pieces)
        bar_picture(path.with_suffix(".png"), groups, title=title, label="MiB of tensors, both passes")


def measure(num_ranks: int, *, small: bool) -> list[Row]:
    """Return a row for each layer, scheme and phase on ``num_ranks`` ranks, beside what no adapters take."""
    sizes = SMALL_SIZES if small else SizesConfig()
    by_rank = run_ranks(num_ranks, partial(count, sizes=sizes), timeout_s=600)
    rows: list[Row] = by_rank[0]
    for other in by_rank[1:]:
        assert [_counts(row) for row in other] == [_counts(row) for row in rows], "ranks differ in their collectives"
    bare = {_place(row): row for row in rows if row["scheme"] == NONE}
    shape: Row = {"kind": "count", "shape": f"{sizes.sequence}x{sizes.batch}x{sizes.hidden}", "rank": sizes.rank}
    shape |= {"intermediate": sizes.intermediate, "dtype": str(sizes.dtype)}
    for row in rows:
        base = bare[_place(row)]
        row["extra_collectives"] = number(row, "collectives") - number(base, "collectives")
        row["extra_bytes"] = number(row, "payload_bytes") - number(base, "payload_bytes")
    return [shape | row for row in rows]


def _place(row: Row) -> tuple[object, ...]:
    return row["layer"], row["sequence_parallel"], row["phase"]


def _counts(row: Row) -> tuple[object, ...]:
    return (*_place(row), row["scheme"], *(row[kind] for kind in KINDS), row["payload_bytes"])


def verdicts(rows: Sequence[Row]) -> list[Row]:
    """Return what ours adds to the activations' collectives, beside its target of nothing."""
    targets: list[Row] = []
    for row in rows:
        if row["scheme"] == OURS and row["phase"] in (FORWARD, BACKWARD):
            of = {key: row[key] for key in ("threads", "layer", "ranks", "sequence_parallel", "phase")}
            for figure, column in (
                ("collectives that ours adds", "extra_collectives"),
                ("bytes that ours adds", "extra_bytes"),
            ):
                targets.append(at_most(figure, number(row, column), limit=0, of=of))
    return targets
