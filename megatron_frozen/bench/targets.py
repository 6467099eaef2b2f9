"""A figure beside its target, as a row of a benchmark's CSV."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_frozen.bench.runner import Row


def at_most(figure: str, value: float, *, limit: float, of: Mapping[str, object]) -> Row:
    """Return the row that says whether ``value`` is at most ``limit``; ``of`` names what was measured."""
    return _row(figure, value, f"at most {limit:g}", of=of, is_met=value <= limit)


def at_least(figure: str, value: float, *, limit: float, of: Mapping[str, object]) -> Row:
    """Return the row that says whether ``value`` is at least ``limit``; ``of`` names what was measured."""
    return _row(figure, value, f"at least {limit:g}", of=of, is_met=value >= limit)


def _row(figure: str, value: float, target: str, *, of: Mapping[str, object], is_met: bool) -> Row:
    met = "yes" if is_met else "no"
    return {"kind": "target", **of, "figure": figure, "value": value, "target": target, "met": met}


def number(row: Row, column: str) -> float:
    """Return a measured number of a row."""
    value = row[column]
    assert isinstance(value, int | float), f"{column} is {value}"
    return value
