"""`bench comm`: what each scheme sends, beside counts written out by hand, and that the schemes compute the same."""

from __future__ import annotations

import csv
import dataclasses
from functools import partial
from pathlib import Path

import pytest
import torch

from megatron_frozen.bench import comm, comm_pieces
from megatron_frozen.bench.comm_ranks import (
    BACKWARD,
    BRIDGE,
    FORWARD,
    MEGATRON_LAYER,
    NONE,
    OURS,
    STEP,
    count,
)
from megatron_frozen.bench.runner import STAMP, Row, num_threads
from megatron_frozen.cli import main
from megatron_frozen.testing import run_ranks

FP32 = dataclasses.replace(comm.SMALL_SIZES, dtype=torch.float32)
S, H, R = FP32.sequence * FP32.batch * 4, FP32.hidden, FP32.rank  # bytes of one feature of all tokens

# What the adapters of one layer (two column and two row bases) add: all-reduces, gathers, reduce-scatters, bytes.
ADDED_BY_BRIDGE = {
    (False, FORWARD): (2, 4, 0, 2 * S * R + 2 * S * (R + H)),
    (False, BACKWARD): (6, 0, 0, 2 * S * (R + H) + 2 * S * R),
    (True, FORWARD): (2, 6, 0, 2 * S * (H + R) + 2 * S * (R + H)),
    (True, BACKWARD): (4, 2, 2, 2 * S * (R + H) + 2 * S * (R + H)),
}


@pytest.fixture(scope="module")
def counted() -> list[Row]:
    return run_ranks(2, partial(count, sizes=FP32))[0]


def find(rows: list[Row], **wanted: object) -> Row:
    (row,) = (row for row in rows if wanted.items() <= row.items())
    return row


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("phase", [FORWARD, BACKWARD])
def test_added_collectives(counted: list[Row], phase: str, sequence_parallel: bool) -> None:  # noqa: FBT001
    of = {"layer": MEGATRON_LAYER, "sequence_parallel": sequence_parallel, "phase": phase}
    bare, ours, bridge = (find(counted, scheme=scheme, **of) for scheme in (NONE, OURS, BRIDGE))
    columns = ("all_reduce", "all_gather", "reduce_scatter", "payload_bytes")
    assert [ours[column] for column in columns] == [bare[column] for column in columns]
    added = tuple(int(str(bridge[column])) - int(str(bare[column])) for column in columns)
    assert added == ADDED_BY_BRIDGE[sequence_parallel, phase]
    calls = (0, 2, 2) if sequence_parallel else (2, 0, 0)
    assert tuple(bare[column] for column in columns) == (*calls, 2 * S * H * (2 if sequence_parallel else 1))


def test_a_ring_sends_half_of_a_gather_and_all_of_a_sum_on_two_ranks(counted: list[Row]) -> None:
    for row in counted:
        if row["scheme"] == NONE and row["phase"] != STEP:
            assert row["sent_bytes"] == 2 * S * H, row


def test_ours_sums_the_replicated_factors_once_a_step(counted: list[Row]) -> None:
    row = find(counted, layer=MEGATRON_LAYER, sequence_parallel=False, scheme=OURS, phase=STEP)
    assert (row["collectives"], row["all_reduce"]) == (1, 1)
    num_elements, num_flags = 4 * R * H, 4  # two A of the columns, two B of the rows
    assert row["payload_bytes"] == 4 * (num_elements + num_flags)
    assert find(counted, layer=MEGATRON_LAYER, sequence_parallel=False, scheme=BRIDGE, phase=STEP)["collectives"] == 0


def test_both_schemes_compute_the_same(counted: list[Row]) -> None:
    differences = [row["difference_from_ours"] for row in counted if row["scheme"] == BRIDGE]
    assert len(differences) == 2 * 3
    assert all(isinstance(value, float) and value < 1e-5 for value in differences), differences


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with num_threads(2):
        assert main(["bench", "comm", "--small", "--output", str(tmp_path)]) == 0
    with (tmp_path / "comm.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert all(row[column] for row in rows for column in STAMP)
    assert {row["threads"] for row in rows} == {"1"}, "each rank's, not those of the process that started them"
    assert len([row for row in rows if row["kind"] == "count"]) == 2 * 2 * 5 * 3
    targets = [row for row in rows if row["kind"] == "target"]
    assert len(targets) == 2 * 2 * 2 * 2 * 2
    assert {row["met"] for row in targets} == {"yes"}
    times = [row for row in rows if row["kind"] == "time"]
    assert [row["pieces"] for row in times] == ["", "", *("1", "2", "4", "8") * 2] * 2
    assert [row["collectives"] for row in times] == ["0", "1", *"0000", "1", "2", "4", "8"] * 2
    assert [row["way"] for row in times if row["ratio"] == "1.0"][:2] == [comm_pieces.PRODUCT, comm_pieces.BACKWARD]
    assert {row["payload_bytes"] for row in times} == {"0", str(16 * 32 * 2)}
    assert all(float(row["median_ms"]) > 0 for row in times)
    verdicts = [row for row in rows if row["kind"] == "verdict"]
    assert [row["weight"] for row in verdicts] == ["frozen", "trainable"]
    assert {row["verdict"] for row in verdicts} <= {"pays", "does not pay"}
    assert not any(row["met"] for row in verdicts)
    assert (tmp_path / "comm.png").read_bytes().startswith(b"\x89PNG")
    assert "Megatron-Bridge's scheme" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("seconds", "says"), [([1, 1, 1.5, 4, 3, 2.5, 3.5], "pays"), ([1, 1, 1.5, 3, 2.9, 4, 5], "does not pay")]
)
def test_the_fastest_cut_is_judged_by_the_slower_rank(seconds: list[float], says: str) -> None:
    ways: list[Row] = [
        {"way": "x", "pieces": ""},
        {"way": comm_pieces.PRODUCT, "pieces": 1},
        {"way": comm_pieces.PRODUCT, "pieces": 2},
        *({"way": comm_pieces.BACKWARD, "pieces": pieces} for pieces in comm_pieces.PIECES),
    ]
    slow = [(way, [time, time, 100.0]) for way, time in zip(ways, seconds, strict=True)]
    fast = [(way, [0.1, 0.1, 0.1]) for way in ways]
    whole, best_cut = seconds[3], min(seconds[4:])
    *rows, verdict = comm_pieces._rows(comm_pieces.SMALL_CASES[0], [fast, slow])
    assert [row["median_ms"] for row in rows] == [1e3 * time for time in seconds]
    assert [row["ratio"] for row in rows[:3]] == [1 / whole, 1, 1.5], "a product in pieces is beside the product whole"
    assert (verdict["verdict"], verdict["ratio"]) == (says, best_cut / whole)
    assert verdict["pieces"] == comm_pieces.PIECES[seconds.index(best_cut) - 3]


def test_a_collective_too_many_misses_the_target() -> None:
    of: Row = {"layer": "x", "ranks": 2, "threads": 1, "sequence_parallel": False, "scheme": OURS, "phase": FORWARD}
    rows = comm.verdicts([of | {"extra_collectives": 1, "extra_bytes": 0}])
    assert [row["met"] for row in rows] == ["no", "yes"]
