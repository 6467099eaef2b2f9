"""Plots as PNG files: the only file that imports matplotlib."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_frozen.io.atomic import atomic_write


def write_picture(path: Path, draw: Callable[[Any], None]) -> None:
    """Have ``draw`` fill the axes of one plot, and write it whole to the PNG ``path``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120)
    draw(axes)
    figure.tight_layout()
    with atomic_write(path) as temporary:
        figure.savefig(temporary, format="png")
    pyplot.close(figure)
