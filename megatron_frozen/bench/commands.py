"""The benchmarks by name."""

from __future__ import annotations

import sys
import tempfile
import textwrap
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_frozen import kernels
from megatron_frozen.bench import comm, gpt_model, gpu_check, growth, linear, lora_step, rl_step, wgrad
from megatron_frozen.bench.report import write_page
from megatron_frozen.bench.runner import REPEATS, BenchConfig
from megatron_frozen.errors import ConfigError, MegatronFrozenError

BENCHES: dict[str, tuple[Callable[[BenchConfig], None], str]] = {
    "wgrad": (wgrad.run, "cpu"),
    "linear": (linear.run, "cpu"),
    "comm": (comm.run, "cpu"),
    "growth": (growth.run, "cpu"),
    "lora-step": (lora_step.run, "cpu"),
    "rl-step": (rl_step.run, "cpu"),
    "gpt-model": (gpt_model.run, "cpu"),
    "gpu-check": (gpu_check.run, "cuda"),
}
"""name: (what runs it, its device unless another is asked for)."""

WITH_CASES, OF_FIXED_STEPS, ON_CUDA = ("linear", "growth"), ("lora-step", "rl-step"), ("wgrad", "linear", "gpu-check")
"""What takes ``--only``, what takes no ``--repeats`` of its own, and what takes ``--device cuda``."""

ALL, REPORT = "all", "report"
NAMES = (*BENCHES, ALL, REPORT)
"""What the command line takes: a benchmark, all that run on a CPU with the page after them, or the page alone."""


def overview() -> str:
    """Return a line for each name that the command line takes."""
    abouts = {name: _about(run).split("\n\n")[0].split(". ")[0].rstrip(".") for name, (run, _) in BENCHES.items()}
    abouts |= {ALL: "Those that need no GPU, and the page of results", REPORT: "The page alone"}
    lines = (f"  {name:<10} {' '.join(about.split())}" for name, about in abouts.items())
    return "\n".join(textwrap.fill(line, 100, subsequent_indent=" " * 13) for line in lines)


def run_bench(given: Any) -> None:
    """Run what the command line ``given`` names.

    Raises ConfigError for an option that it would not heed, and for a folder that takes no files.
    """
    _refuse_unheeded(given)
    run, device = {ALL: (_run_all, "cpu"), REPORT: (_write_page, "cpu"), **BENCHES}[given.name]
    device = given.device or device
    repeats = REPEATS if given.repeats is None else given.repeats
    config = BenchConfig(output=given.output, device=device, repeats=repeats, small=given.small, only=given.only)
    if given.name != REPORT:
        _refuse_unwritable(given.output)
        if device == "cpu" and (reason := kernels.absent()) is not None:
            print(f"ours takes longer than it could, without the kernels for this CPU: {reason}", file=sys.stderr)
    run(config)


def _refuse_unheeded(given: Any) -> None:
    if given.only and given.name not in WITH_CASES:
        raise ConfigError(
            f"--only chooses among the cases of {' and '.join(WITH_CASES)} and was given to {given.name}; leave it out"
        )
    if given.name == REPORT and (given.small or given.repeats is not None or given.device is not None):
        raise ConfigError("report measures nothing and takes no --small, --repeats or --device; leave them out")
    if given.repeats is not None and given.name in OF_FIXED_STEPS:
        raise ConfigError(f"{given.name} takes as many steps as its figures need and no --repeats; leave it out")
    if given.device == "cuda" and given.name not in ON_CUDA:
        raise ConfigError(
            f"--device cuda is for {', '.join(ON_CUDA)} and was given to {given.name}, which runs on the CPU; "
            "leave it out"
        )


def _refuse_unwritable(folder: Path) -> None:
    """Raise ConfigError where no file can be made in ``folder``: now, not after all has been measured."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"no file can be made in {folder} ({error.strerror}); give another folder as --output"
        ) from error


def _write_page(config: BenchConfig) -> None:
    write_page(config, abouts={name: _about(run) for name, (run, _) in BENCHES.items()})


def _about(run: Callable[[BenchConfig], None]) -> str:
    """Return what the module of a benchmark says of it, without the legend of its code."""
    paragraphs = (sys.modules[run.__module__].__doc__ or "").strip().split("\n\n")
    return "\n\n".join(text for text in paragraphs if not text.startswith("Shape suffixes"))


def _run_all(config: BenchConfig) -> None:
    """Run each benchmark that needs no GPU, whatever becomes of the others, and write the page.

    Raises MegatronFrozenError at the end, naming those that failed.
    """
    failed: dict[str, Exception] = {}
    for name, (run, device) in BENCHES.items():
        if device == "cuda":
            continue
        print(f"=== {name}", flush=True)
        try:
            run(config)
        except BrokenPipeError:  # nobody reads on
            raise
        except Exception as error:  # the others are worth having
            traceback.print_exc()
            failed[name] = error
    _write_page(config)
    if failed:
        reasons = "; ".join(f"{name}: {error}" for name, error in failed.items())
        raise MegatronFrozenError(f"{len(failed)} of these benchmarks ended early, see above ({reasons})")
