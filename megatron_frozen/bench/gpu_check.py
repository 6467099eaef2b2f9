"""One unattended run on a GPU: whether each backend keeps its word there, and what the dispatch costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from megatron_frozen.bench import linear, wgrad
from megatron_frozen.bench.backend_checks import TOLERANCE, check_backends
from megatron_frozen.bench.runner import BenchConfig, Row, stamp, text_table, write_csv
from megatron_frozen.errors import MegatronFrozenError


def run(config: BenchConfig) -> None:
    """Check all backends, time linear layers and weight gradients, print tables, write gpu_check.csv.

    The file is written before failed checks are told. Raises MegatronFrozenError, naming them."""
    mark = stamp(config)
    in_features, out_features = (48, 72) if config.small else (1024, 768)
    checks = [mark | row for row in check_backends(config.device, in_features=in_features, out_features=out_features)]
    path = config.output / "gpu_check.csv"
    write_csv(path, checks)  # kept should a kernel take the process down later
    print(_summary(checks), end="\n\n")
    times = [mark | row for measured in linear.measure(config) for row in measured]
    write_csv(path, [*checks, *times])
    print(text_table(times, linear.COLUMNS), end="\n\n")
    shapes = wgrad.SMALL_SHAPES if config.small else wgrad.SHAPES
    fused = [mark | row for shape in shapes for row in wgrad.measure(shape, config=config)]
    write_csv(path, [*checks, *times, *fused])
    print(text_table(fused, wgrad.COLUMNS))
    print(f"\nwritten to {path}")
    _tell(checks)


def _summary(checks: Sequence[Row]) -> str:
    """How many checks of each backend and dtype held, and one line for each reason and each that did not."""
    groups: dict[tuple[object, object], list[Row]] = {}
    for row in checks:
        groups.setdefault((row["backend"], row["operands"]), []).append(row)
    columns = ("backend", "operands", "ok", "cannot", "wrong", "failed")
    counted = [
        {"backend": backend, "operands": operands} | Counter(str(row["outcome"]) for row in rows)
        for (backend, operands), rows in groups.items()
    ]
    told = {f"{row['backend']}: {row['reason']}": None for row in checks if "reason" in row}
    wrong = [row for row in checks if row["outcome"] in ("wrong", "failed")]
    lines = [text_table(wrong, ("backend", "operands", "check", "outcome", "relative_error"))] if wrong else []
    return "\n".join([text_table(counted, columns), *told, *lines])


def _tell(checks: Sequence[Row]) -> None:
    """Raise if a check did not hold; a backend that cannot serve a case has said so and is not at fault."""
    bad = [row for row in checks if row["outcome"] in ("wrong", "failed")]
    if bad:
        named = "; ".join(f"{row['backend']}, {row['check']}, {row['operands']}: {row['outcome']}" for row in bad[:5])
        raise MegatronFrozenError(
            f"{len(bad)} of {len(checks)} checks of matrix backends did not hold to {TOLERANCE}: {named}; "
            f"see gpu_check.csv, and set MEGATRON_FROZEN_GEMM to another backend"
        )
