"""The benchmarks by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_frozen.bench import gpu_check, wgrad
from megatron_frozen.bench.runner import BenchConfig

BENCHES: dict[str, tuple[Callable[[BenchConfig], None], str]] = {
    "wgrad": (wgrad.run, "cpu"),
    "gpu-check": (gpu_check.run, "cuda"),
}
"""name: (what runs it, its device unless another is asked for)."""


def run_bench(given: Any) -> None:
    """Run the benchmark that the command line ``given`` names."""
    run, device = BENCHES[given.name]
    run(BenchConfig(output=given.output, device=given.device or device, repeats=given.repeats, small=given.small))
