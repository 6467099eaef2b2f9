"""The learning rate of each step: a linear warm-up, then a cosine."""

from __future__ import annotations

import math


def learning_rate_at(step: int, *, peak: float, warmup_steps: int, max_steps: int, min_ratio: float) -> float:
    """The learning rate of `step`, counted from 1: `peak` after the warm-up, `peak * min_ratio` at `max_steps`.

    Without a warm-up the first step has `peak`, so a run of a single step learns something.
    """
    warmup_steps = max(warmup_steps, 1)
    if step <= warmup_steps:
        return peak * step / warmup_steps
    progress = min((step - warmup_steps) / max(max_steps - warmup_steps, 1), 1.0)
    return peak * (min_ratio + (1.0 - min_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress)))
