"""Fused weight gradients under megatron-core 0.16.1's own DistributedDataParallel: two ranks, three micro-batches.

The fused gradient is exact (0.0), tied weights included; bf16 gradients, which the same wrapper adds, err by 1e-3 and
more. The wrapper runs on the CPU with one of its calls to CUDA replaced.
"""

from __future__ import annotations

import pytest
from torch import nn

from megatron_frozen.testing import run_ranks
from tests.functional.megatron_ddp_ranks import Tied, Untied, train


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
