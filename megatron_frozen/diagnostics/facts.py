"""What a report of a problem needs: versions, processor, devices, backends, switches."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_frozen import kernels
from megatron_frozen.environment import DGRAD_ALLREDUCE_FP32, GEMM_BACKEND, LINEAR_DGRAD_FP32, switch, text

_PACKAGES = (
    "megatron-frozen", "torch", "numpy", "safetensors", "tokenizers", "jinja2", "pyyaml", "tqdm", "tensorboard",
    "matplotlib", "gguf", "transformers", "peft", "megatron-core", "transformer-engine",
)  # fmt: skip


def facts_table() -> str:
    """A table with one fact a line. Sets up nothing but the CPU's kernels, as their first use does."""
    facts = [("python", platform.python_version()), ("platform", platform.platform())]
    facts += [(name, installed_version(name)) for name in _PACKAGES]
    facts += [("cpu", f"{cpu_name()}, {torch.get_num_threads()} threads")]
    facts += [("cpu instructions", ", ".join(_instructions()))]
    reason = kernels.absent()
    facts += [("cpu kernels", "yes" if reason is None else f"no: {reason}")]
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    facts += [("cuda devices", ", ".join(names) or "none")]
    backends = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    facts += [("process groups", ", ".join(name for name, there in backends.items() if there) or "none")]
    facts += [(name, "on" if switch(name) else "off") for name in (LINEAR_DGRAD_FP32, DGRAD_ALLREDUCE_FP32)]
    facts += [(GEMM_BACKEND, text(GEMM_BACKEND) or "the first that can")]
    return aligned(facts)


def _instructions() -> list[str]:
    """What decides which products and attention run."""
    extensions = {
        "AVX512-BF16": torch.cpu._is_avx512_bf16_supported(),
        "AMX": torch.cpu._is_amx_tile_supported(),
    }
    return [torch.backends.cpu.get_cpu_capability(), *(name for name, there in extensions.items() if there)]


def aligned(rows: Iterable[Sequence[str]]) -> str:
    """A text with one row a line, its columns one under another."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def installed_version(package: str) -> str:
    """The version of a distribution, or that it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def cpu_name() -> str:
    """The processor's model, where the system tells it, or its kind."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
