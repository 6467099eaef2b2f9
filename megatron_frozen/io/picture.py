"""Plots as PNG files: the only file that imports matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_frozen.io.atomic import atomic_write


def write_picture(path: Path, draw: Callable[[Any], None]) -> None:
    """Have ``draw`` fill the axes of one plot, and write it whole to the PNG ``path``."""
    write_panels(path, [draw], num_columns=1)


def write_panels(path: Path, draws: Sequence[Callable[[Any], None]], *, num_columns: int) -> None:
    """Have each of ``draws`` fill the axes of one plot, and write them side by side to the PNG ``path``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    num_rows = -(-len(draws) // num_columns)
    size = (8, 4.5) if num_columns == 1 else (4 * num_columns, 3.2 * num_rows)
    figure, grid = pyplot.subplots(num_rows, num_columns, figsize=size, dpi=120, squeeze=False)
    for axes, draw in zip(grid.flat, draws, strict=False):
        draw(axes)
    for axes in grid.flat[len(draws) :]:
        axes.set_visible(False)
    figure.tight_layout()
    with atomic_write(path) as temporary:
        figure.savefig(temporary, format="png")
    pyplot.close(figure)
