"""One FSDP unit that mixes a frozen base with fp32 factors, unused in the first micro-batch (case 52)."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from megatron_frozen.testing import run_ranks
from tests.unit import fsdp_mixing_ranks

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(("kind", "dtype"), [("fsdp2", BF16), ("fsdp2", FP32), ("fsdp1 with use_orig_params", FP32)])
def test_factors_get_the_mean_over_ranks_and_the_base_no_gradient_buffer(kind: str, dtype: torch.dtype) -> None:
    for found in run_ranks(2, partial(fsdp_mixing_ranks.train_mixed, kind=kind, dtype=dtype)):
        assert found["adapter_error"] < 1e-6
        assert found["base_gradients"] == []
        assert found["output_dtype"] == str(dtype)


@pytest.mark.parametrize(
    ("kind", "dtype", "message"),
    [
        ("fsdp1", BF16, "Must flatten tensors with uniform dtype"),
        ("fsdp1 with use_orig_params", BF16, "Must flatten tensors with uniform dtype"),
        ("fsdp1", FP32, "Must flatten tensors with uniform `requires_grad`"),
    ],
)
def test_fsdp1_says_what_its_flat_parameter_cannot_mix(kind: str, dtype: torch.dtype, message: str) -> None:
    for found in run_ranks(2, partial(fsdp_mixing_ranks.train_mixed, kind=kind, dtype=dtype)):
        assert message in found["refusal"]
