"""The loss curve as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_frozen.io import write_picture


def plot_loss(records: Sequence[dict[str, Any]], path: Path, *, title: str) -> None:
    """Draw the train and eval loss of metric `records` over the optimizer steps into the PNG `path`."""
    train, held_out = ([(r["step"], r["loss"]) for r in records if r["kind"] == kind] for kind in ("train", "eval"))

    def draw(axes: Any) -> None:
        if train:
            axes.plot(*zip(*train, strict=True), color="tab:blue", linewidth=1.2, alpha=0.8, label="train")
        if held_out:
            axes.plot(*zip(*held_out, strict=True), color="tab:orange", linewidth=2, marker="o", label="held-out")
            for step, loss in (held_out[0], held_out[-1]):
                axes.annotate(
                    f"{loss:.3f}", (step, loss), textcoords="offset points", xytext=(4, 7), color="tab:orange"
                )
        axes.set_xlabel("optimizer step")
        axes.set_ylabel("loss per labelled token")
        axes.set_title(title)
        axes.grid(visible=True, alpha=0.3)
        if train or held_out:
            axes.legend()

    write_picture(path, draw)
