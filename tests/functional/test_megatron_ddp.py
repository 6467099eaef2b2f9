"""Fused weight gradients under megatron-core 0.16.1's own DistributedDataParallel: two ranks, three micro-batches.

The fused gradient is exact (0.0), tied weights included; bf16 gradients, which the same wrapper adds, err by 1e-3 and
more. The wrapper runs on the CPU with one of its calls to CUDA replaced.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron_frozen.testing import run_ranks
from tests.functional.megatron_ddp_ranks import Tied, Untied, add_256_and_1, main_grads, train


@pytest.mark.parametrize("overlap", [False, True], ids=["at the end", "overlapped"])
@pytest.mark.parametrize("kind", [Untied, Tied])
def test_fused_gradients_are_exact(kind: type[nn.Module], *, overlap: bool) -> None:
    for errors in run_ranks(2, train, kind, {"fusion": True, "overlap": overlap}):
        assert errors
        assert set(errors.values()) == {0.0}, errors


@pytest.mark.parametrize("kind", [Untied, Tied])
def test_bf16_gradients_are_not(kind: type[nn.Module]) -> None:
    for errors in run_ranks(2, train, kind, {"fusion": False, "overlap": False}):
        assert min(errors.values()) > 1e-3, errors


@pytest.mark.parametrize(("way", "mean"), [("micro-batches", 257.0), ("ranks", 128.5)])
def test_low_bits_survive_micro_batches_and_ranks(way: str, mean: float) -> None:
    """Case 10: for the fused weight and for the bias, whose bf16 gradient the wrapper adds; 256 + 1 is 256 in bf16."""
    for gradients, dtypes in run_ranks(2, add_256_and_1, way):
        assert gradients == [mean, mean]
        assert dtypes == [torch.float32, torch.float32]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_layers_fill_the_same_buffers(backend: str) -> None:
    for compiled, eager in zip(run_ranks(2, main_grads, backend), run_ranks(2, main_grads, None), strict=True):
        assert len(compiled) == 2
        assert all(torch.equal(ours, theirs) and theirs.any() for ours, theirs in zip(compiled, eager, strict=True))
