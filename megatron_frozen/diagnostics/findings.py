"""What a diagnosis found, and how it says so."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from megatron_frozen.diagnostics.facts import aligned

WORTH_SAYING = 1.2  # times as long as folded; two measurements of one product differ by less


class Direction(Enum):
    """Which of a linear layer's products it was."""

    FORWARD, DGRAD, WGRAD = "forward", "dgrad", "wgrad"


class Fault(Enum):
    """What it did beyond one 2-D product."""

    BATCHED, COPIED = "batched", "copied"


@dataclass(kw_only=True, slots=True)
class Finding:
    """One kind of product that does more than it needs to: a module, a direction and a layout."""

    module: str
    """Where it ran: the class of the outermost module and the path from it; "" outside all modules."""
    direction: Direction
    """Forward, dgrad (input gradient) or wgrad (weight gradient)."""
    fault: Fault
    """Batched: a product for each slice; copied: the operand was copied first."""
    shape: tuple[int, ...]
    """Of the activations or of their gradient, as it came."""
    stride: tuple[int, ...]
    """Its strides in elements."""
    dtype: torch.dtype
    """Of the operands."""
    matrix: tuple[int, ...]
    """Shape of the matrix that it was multiplied by; for wgrad, of the weight."""
    calls: int = 0
    """How often it ran."""
    as_run_s: float = math.inf
    """Seconds of a call; the quickest of the first ones."""
    folded_s: float = math.inf
    """The same of one 2-D product of the same operands."""

    def note(self, *, as_run_s: float, folded_s: float) -> None:
        """Take in what one call was measured to take."""
        self.as_run_s, self.folded_s = min(self.as_run_s, as_run_s), min(self.folded_s, folded_s)

    @property
    def ratio(self) -> float:
        """How many times as long as folded; 0 where it was not measured, as it failed."""
        return self.as_run_s / max(self.folded_s, 1e-9) if self.folded_s < math.inf else 0.0

    @property
    def wasted_s(self) -> float:
        """Seconds that all calls took beyond what they need."""
        return self.calls * (self.as_run_s - self.folded_s) if self.folded_s < math.inf else 0.0


def text_of(findings: Iterable[Finding], *, num_products: int, watched_s: float) -> str:
    """Return a table of what takes noticeably longer than folded and what to do about it, or that nothing does.

    Findings that differ in the number of a layer only stand in one row.
    """
    if not num_products:
        return "no products seen; they may run in other processes or threads, or in inference mode"
    seen = f"{num_products} products seen in {watched_s:.1f} s"
    worth = [finding for finding in findings if finding.ratio >= WORTH_SAYING]
    if not worth:
        return f"{seen}: none ran batched, or copied an operand, at a noticeable cost where one 2-D product would do"
    rows: dict[tuple[str, ...], list[Finding]] = {}
    for finding in worth:
        rows.setdefault(_words(finding), []).append(finding)
    costliest = sorted(rows.items(), key=lambda row: -_wasted_s(row[1]))
    head = ("wasted s", "calls", "as run ms", "folded ms", "what", "product", "module")
    first, *lines = aligned([head, *((*_figures(same), *words[:3]) for words, same in costliest)]).splitlines()
    layouts = [f"{'':10}{words[3]}" for words, _ in costliest]
    return "\n".join([
        f"{seen}, {sum(finding.calls for finding in worth)} of them wasted {_wasted_s(worth):.3g} s:",
        first,
        *(line for row in zip(lines, layouts, strict=True) for line in row),
        "batched: a small product for each slice; copied: its operand was copied first;",
        "folded: one 2-D product. `megatron-frozen run` folds those of an installed",
        "megatron-core, this package's layers and functions any.",
    ])  # fmt: skip


def _wasted_s(findings: Iterable[Finding]) -> float:
    return sum(finding.wasted_s for finding in findings)


def _figures(same: Sequence[Finding]) -> tuple[str, ...]:
    """Write the sums over findings of one row, and what a call takes on average."""
    calls = sum(finding.calls for finding in same)
    as_run_s = sum(finding.calls * finding.as_run_s for finding in same) / calls
    figures = (_wasted_s(same), calls, as_run_s * 1e3, as_run_s * 1e3 - _wasted_s(same) * 1e3 / calls)
    return tuple(f"{figure:.0f}" if figure >= 100 else f"{figure:.3g}" for figure in figures)


def _words(finding: Finding) -> tuple[str, ...]:
    """Write what it is, where, with stars for the numbers of layers, and on which layout."""
    module = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", finding.module) or "(none)"
    shape, stride, matrix = map(list, (finding.shape, finding.stride, finding.matrix))
    layout = f"{shape} strides {stride} by {matrix} {str(finding.dtype).removeprefix('torch.')}"
    return finding.fault.value, finding.direction.value, module, layout
