"""The benchmarks by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_frozen.bench import comm, gpu_check, linear, lora_step, rl_step, wgrad
from megatron_frozen.bench.runner import BenchConfig

BENCHES: dict[str, tuple[Callable[[BenchConfig], None], str]] = {
    "wgrad": (wgrad.run, "cpu"),
    "linear": (linear.run, "cpu"),
    "comm": (comm.run, "cpu"),
    "lora-step": (lora_step.run, "cpu"),
    "rl-step": (rl_step.run, "cpu"),
    "gpu-check": (gpu_check.run, "cuda"),
}
"""name: (what runs it, its device unless another is asked for)."""


def run_bench(given: Any) -> None:
    """Run the benchmark that the command line ``given`` names."""
    run, device = BENCHES[given.name]
    device = given.device or device
    run(BenchConfig(output=given.output, device=device, repeats=given.repeats, small=given.small, only=given.only))
