"""RMSNorm against transformers' own, values and gradients, in fp32 and bf16."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from megatron_frozen.layers import ModelParallelConfig
from megatron_frozen.layers.norm import RMSNorm


def _norms(dtype: torch.dtype) -> tuple[RMSNorm, LlamaRMSNorm]:
    ours = RMSNorm(48, eps=1e-5, parallel=ModelParallelConfig(params_dtype=dtype))
    theirs = LlamaRMSNorm(48, eps=1e-5).to(dtype)
    with torch.no_grad():
        theirs.weight.copy_(ours.weight.normal_(mean=1.0, std=0.3))
    return ours, theirs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_is_bit_equal_and_gradients_agree(dtype: torch.dtype) -> None:
    ours, theirs = _norms(dtype)
    input_ = torch.randn(7, 3, 48, dtype=dtype, requires_grad=True)
    grad = torch.randn(7, 3, 48, dtype=dtype)
    expected = theirs(input_)
    output = ours(input_)
    assert torch.equal(output, expected)

    expected_grads = torch.autograd.grad(expected, (input_, theirs.weight), grad)
    grads = torch.autograd.grad(output, (input_, ours.weight), grad)
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 2e-2}[dtype]
    for name, got, want in zip(("dx", "dw"), grads, expected_grads, strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(
            got, want, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_gradcheck_in_fp64() -> None:
    ours, _ = _norms(torch.float64)
    input_ = torch.randn(2, 3, 48, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(ours, (input_,))
    assert torch.autograd.gradcheck(
        lambda weight: torch.func.functional_call(ours, {"weight": weight}, input_), (ours.weight,)
    )


def test_a_second_derivative_is_refused_not_wrong() -> None:
    ours, _ = _norms(torch.float64)
    input_ = torch.randn(2, 48, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(ours(input_).pow(3).sum(), input_, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_a_frozen_weight_gets_none_and_memory_order_is_kept() -> None:
    ours, _ = _norms(torch.float32)
    ours.weight.requires_grad_(False)  # noqa: FBT003 - torch takes it by position only
    input_ = torch.randn(3, 7, 48).transpose(0, 1).requires_grad_()
    output = ours(input_)
    output.sum().backward()
    assert output.stride() == input_.stride()
    assert input_.grad is not None
    assert ours.weight.grad is None


@pytest.mark.parametrize(("sequence_parallel", "over_shards"), [(False, False), (True, False), (False, True)])
def test_the_weight_is_marked_where_ranks_see_parts(*, sequence_parallel: bool, over_shards: bool) -> None:
    parallel = ModelParallelConfig(tensor_model_parallel_size=2, sequence_parallel=sequence_parallel)
    norm = RMSNorm(8, eps=1e-5, parallel=parallel, over_shards=over_shards)
    assert getattr(norm.weight, "sequence_parallel", False) == (sequence_parallel or over_shards)
    norm.load_state_dict({"weight": torch.ones(8)}, assign=True)
    assert getattr(norm.weight, "sequence_parallel", False) == (sequence_parallel or over_shards)
    assert "8, eps=1e-05" in repr(norm)
