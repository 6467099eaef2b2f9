"""The adapter's weight gradients: from bf16 operands straight to fp32 factors."""

from __future__ import annotations

import pytest
import torch

from megatron_frozen import gemm
from megatron_frozen.autograd.low_rank import AddLowRank, FrozenLinearWithAdapter
from megatron_frozen.testing import relative_error

NUM_TOKENS, NUM_IN, NUM_OUT, R, SCALE = 256, 64, 48, 4, 2.0


@pytest.mark.parametrize("beside", ["inside the product", "added to an output"])
@pytest.mark.parametrize(("factor_dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_factor_gradients_are_rounded_to_their_own_dtype_alone(
    beside: str, factor_dtype: torch.dtype, bound: float
) -> None:
    torch.manual_seed(0)
    x, grad = torch.randn(NUM_TOKENS, NUM_IN).bfloat16(), torch.randn(NUM_TOKENS, NUM_OUT).bfloat16()
    weight = torch.randn(NUM_OUT, NUM_IN).bfloat16()
    A = torch.randn(R, NUM_IN, dtype=factor_dtype, requires_grad=True)
    B = torch.randn(NUM_OUT, R, dtype=factor_dtype, requires_grad=True)
    if beside == "inside the product":
        output = FrozenLinearWithAdapter.apply(x, weight, A, B, SCALE)
    else:
        output = AddLowRank.apply(gemm.forward(x, weight), x, A, B, SCALE)
    dA, dB = torch.autograd.grad(output, (A, B), grad)
    # The thin intermediates are bf16; the gradients are those of their values.
    h = gemm.forward(x, A.detach().bfloat16()).mul_(SCALE)
    grad_h = gemm.dgrad(grad, B.detach().bfloat16()).mul_(SCALE)
    for name, actual, exact in (
        ("A", dA, grad_h.double().t() @ x.double()),
        ("B", dB, grad.double().t() @ h.double()),
    ):
        assert actual.dtype == factor_dtype
        assert relative_error(actual, exact) < bound, name
        # Control: bf16 factors show the rounding that fp32 ones no longer have.
        assert factor_dtype == torch.float32 or relative_error(actual, exact) > 1e-4, name
