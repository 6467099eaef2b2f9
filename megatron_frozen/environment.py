"""The only reader of environment variables, each at the call, so that a test or a launcher may set it late."""

from __future__ import annotations

import os

from megatron_frozen.errors import ConfigError

LINEAR_DGRAD_FP32 = "MEGATRON_TRUE_ON_POLICY_LINEAR_DGRAD_FP32"
DGRAD_ALLREDUCE_FP32 = "MEGATRON_TRUE_ON_POLICY_DGRAD_ALLREDUCE_FP32"
GEMM_BACKEND = "MEGATRON_FROZEN_GEMM"
PATCH = "MEGATRON_FROZEN_PATCH"
CXX = "CXX"
ONEDNN_ISA = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")  # the first that is set counts


def switch(name: str, *, default: bool = False) -> bool:
    """Return whether the variable ``name`` is 1, not 0; ``default`` where it is unset or empty, else ConfigError."""
    value = os.environ.get(name)
    if not value:
        return default
    if value in ("0", "1"):
        return value == "1"
    raise ConfigError(f"environment variable {name} is '{value}'; it takes 0 or 1, so set one of these or unset it")


def text(name: str) -> str | None:
    """Return the value of the variable ``name``; None where it is unset or empty."""
    return os.environ.get(name) or None


def launched_rank() -> tuple[int, int, int]:
    """Return ``(rank, world_size, local_rank)`` as torchrun sets them; ``(0, 1, 0)`` without torchrun.

    ConfigError if the variables are there in part only, or contradict each other.
    """
    rank, world_size = _number("RANK", default=0), _number("WORLD_SIZE", default=1)
    if not rank < world_size:
        raise ConfigError(
            f"environment variable RANK is {rank} and WORLD_SIZE {world_size}; a rank is below the number of ranks, "
            "so leave both to torchrun, or unset them"
        )
    if world_size > 1 and "RANK" not in os.environ:
        raise ConfigError(
            f"environment variable WORLD_SIZE is {world_size} and RANK is not set; "
            "start the ranks with torchrun, which sets both, or unset WORLD_SIZE"
        )
    return rank, world_size, _number("LOCAL_RANK", default=0)


def _number(name: str, *, default: int) -> int:
    value = os.environ.get(name, str(default))
    if not value.isdecimal():
        raise ConfigError(
            f"environment variable {name} is '{value}'; it takes a whole number, "
            "which torchrun sets, so leave it to that"
        )
    return int(value)


def cache_home() -> str:
    """Return the folder for caches of this user: XDG_CACHE_HOME, or .cache in the home folder."""
    return os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
