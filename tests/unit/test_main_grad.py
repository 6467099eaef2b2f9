"""Weight gradients in a wrapper's buffer: what is added, returned and flagged; cases 8, 10, 11, 14, 16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_frozen import ColumnParallelLinear, ModelParallelConfig
from megatron_frozen.errors import ConfigError
from megatron_frozen.main_grad import deliver_weight_gradient
from megatron_frozen.testing import relative_error

IN, OUT = 7, 5


def weight(dtype: torch.dtype = torch.float32, **attributes: Any) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.randn(OUT, IN).to(dtype))
    for name, value in attributes.items():
        setattr(parameter, name, value)
    return parameter


def layer(**settings: Any) -> ColumnParallelLinear:
    config = ModelParallelConfig(gradient_accumulation_fusion=True, **settings)
    return ColumnParallelLinear(IN, OUT, config=config, init_method=torch.nn.init.normal_)


def weight_of(module: ColumnParallelLinear) -> Any:
    """The parameter, on which wrappers set attributes that no type knows."""
    return module.weight


def wgrad_of(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return grad.double().reshape(-1, OUT).t() @ x.double().reshape(-1, IN)


@pytest.mark.parametrize("zero_out", [None, False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_megatrons_wrapper_reads(dtype: torch.dtype, *, zero_out: bool | None) -> None:
    """With the flag attribute: added to the buffer, flag set, a dummy returned, zeros only if asked for."""
    attributes = {} if zero_out is None else {"zero_out_wgrad": zero_out}
    parameter = weight(dtype, main_grad=torch.full((OUT, IN), 7.0), grad_added_to_main_grad=False, **attributes)
    grad, x = torch.randn(6, 3, OUT).to(dtype), torch.randn(6, 3, IN).to(dtype)
    dummy = deliver_weight_gradient(parameter, grad, x)
    assert dummy is not None
    assert (dummy.shape, dummy.dtype) == (parameter.shape, dtype)
    assert not zero_out or not dummy.any()
    assert parameter.grad_added_to_main_grad is True  # pyright: ignore[reportAttributeAccessIssue]
    assert relative_error(parameter.main_grad, 7 + wgrad_of(grad, x)) < 1e-6  # pyright: ignore[reportAttributeAccessIssue]


def test_without_the_flag_nothing_is_returned_and_no_flag_appears() -> None:
    parameter = weight(main_grad=torch.zeros(OUT, IN))
    grad, x = torch.randn(4, OUT), torch.randn(4, IN)
    assert deliver_weight_gradient(parameter, grad, x) is None
    assert not hasattr(parameter, "grad_added_to_main_grad")
    assert relative_error(parameter.main_grad, wgrad_of(grad, x)) < 1e-6  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("attributes", [{}, {"main_grad": None}], ids=["absent", "None"])
def test_a_missing_buffer_is_named(attributes: dict[str, Any]) -> None:
    """Case 14, second half."""
    message = r"gradient_accumulation_fusion is on but a trainable weight of shape \[5, 7\] has no main_grad"
    parameter = weight(grad_added_to_main_grad=False, **attributes)
    with pytest.raises(ConfigError, match=message):
        deliver_weight_gradient(parameter, torch.ones(4, OUT), torch.ones(4, IN))
    assert parameter.grad_added_to_main_grad is False  # pyright: ignore[reportAttributeAccessIssue]


def test_megatron_fsdp_is_refused_before_writing() -> None:
    buffer = torch.zeros(OUT, IN)
    parameter = weight(main_grad=buffer, __fsdp_param__=True, grad_added_to_main_grad=False)
    with pytest.raises(ConfigError, match="gradient_accumulation_fusion is on under Megatron-FSDP, which this version"):
        deliver_weight_gradient(parameter, torch.ones(4, OUT), torch.ones(4, IN))
    assert not buffer.any()


def test_layer_accumulates_micro_batches_exactly() -> None:
    """Case 10: bf16 weight gradients 256 then 1 make 257.0; case 11 (b): on top of what the owner left there."""
    fused = ColumnParallelLinear(
        1,
        1,
        config=ModelParallelConfig(gradient_accumulation_fusion=True, params_dtype=torch.bfloat16),
        init_method=torch.nn.init.ones_,
        bias=False,
    )
    parameter = weight_of(fused)
    parameter.main_grad = torch.full((1, 1), 7.0)
    for value in (256.0, 1.0):
        fused(torch.full((1, 1, 1), value, dtype=torch.bfloat16))[0].sum().backward()
        assert parameter.grad is None
    assert parameter.main_grad.item() == 264.0


def test_weight_used_twice_in_one_forward_adds_both_uses() -> None:
    """Case 11 (d)."""
    fused = layer()
    parameter = weight_of(fused)
    parameter.main_grad = torch.zeros(OUT, IN)
    first, second = torch.randn(4, 1, IN), torch.randn(4, 1, IN)
    (fused(first)[0].sum() + 2 * fused(second)[0].sum()).backward()
    ones = torch.ones(4, 1, OUT)
    assert relative_error(parameter.main_grad, wgrad_of(ones, first) + 2 * wgrad_of(ones, second)) < 1e-6
    assert fused.bias is not None
    assert fused.bias.grad is not None
    assert torch.equal(fused.bias.grad, torch.full((OUT,), 12.0))


def test_buffer_is_looked_up_in_backward_only() -> None:
    """Case 14: the wrapper may make the buffer after the forward."""
    fused = layer()
    parameter = weight_of(fused)
    y = fused(torch.ones(4, 1, IN))[0]
    parameter.main_grad = torch.zeros(OUT, IN)
    y.sum().backward()
    assert torch.equal(parameter.main_grad, torch.full((OUT, IN), 4.0))


def test_buffer_is_found_under_activation_checkpointing_and_offloading() -> None:
    """A saved tensor is another object without attributes there, so the parameter itself must be kept."""
    fused = layer()
    parameter = weight_of(fused)
    x = torch.ones(4, 1, IN, requires_grad=True)
    parameter.main_grad = torch.zeros(OUT, IN)
    y = checkpoint(lambda z: fused(z)[0], x, use_reentrant=False)
    assert y is not None
    y.sum().backward()
    with torch.autograd.graph.save_on_cpu():
        y = fused(x)[0]
    y.sum().backward()
    assert torch.equal(parameter.main_grad, torch.full((OUT, IN), 8.0))


@pytest.mark.parametrize("buffer", ["absent", "None", "filled"])
def test_frozen_weight_leaves_buffers_alone(buffer: str) -> None:
    """Case 8."""
    fused = layer()
    parameter = weight_of(fused).requires_grad_(requires_grad=False)
    if buffer != "absent":
        parameter.main_grad = {"None": None, "filled": torch.full((OUT, IN), 3.0)}[buffer]
    x = torch.randn(4, 1, IN, requires_grad=True)
    fused(x)[0].sum().backward()
    assert x.grad is not None
    assert relative_error(x.grad, parameter.detach().sum(0).expand(4, 1, IN)) < 1e-6
    assert hasattr(parameter, "main_grad") is (buffer != "absent")
    if buffer == "filled":
        assert torch.equal(weight_of(fused).main_grad, torch.full((OUT, IN), 3.0))


def test_no_tokens_leave_the_buffer_as_it_is() -> None:
    """Case 16."""
    fused = layer()
    parameter = weight_of(fused)
    parameter.main_grad = torch.full((OUT, IN), 3.0)
    x = torch.zeros(0, 1, IN, requires_grad=True)
    y, _ = fused(x)
    y.sum().backward()
    assert x.grad is not None
    assert fused.bias is not None
    assert fused.bias.grad is not None
    assert (y.shape, x.grad.shape) == ((0, 1, OUT), (0, 1, IN))
    assert torch.equal(parameter.main_grad, torch.full((OUT, IN), 3.0))
    assert torch.equal(fused.bias.grad, torch.zeros(OUT))
