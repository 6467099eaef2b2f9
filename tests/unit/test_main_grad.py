"""Weight gradients in a wrapper's buffer: what is added, returned and flagged; cases 8, 10, 11, 14, 16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_frozen import CausalLM, ColumnParallelLinear, DecoderConfig, ModelParallelConfig, RowParallelLinear
from megatron_frozen.errors import ConfigError, LayoutError
from megatron_frozen.main_grad import deliver_weight_gradient, described, name_parameters
from megatron_frozen.testing import relative_error

IN, OUT = 7, 5
TINY = {
    "model_type": "llama", "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2,
    "vocab_size": 16, "max_position_embeddings": 8,
}  # fmt: skip


def weight(dtype: torch.dtype = torch.float32, **attributes: Any) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.randn(OUT, IN).to(dtype))
    for name, value in attributes.items():
        setattr(parameter, name, value)
    return parameter


def layer(*, bias: bool = True, **settings: Any) -> ColumnParallelLinear:
    config = ModelParallelConfig(gradient_accumulation_fusion=True, **settings)
    return ColumnParallelLinear(IN, OUT, config=config, init_method=torch.nn.init.normal_, bias=bias)


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


def test_anomaly_detection_finds_no_nan_in_a_dummy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dummy's memory may hold NaN; whoever looks for those of the model must not be led here."""
    monkeypatch.setattr(torch, "empty", lambda shape, **options: torch.full(shape, float("nan"), **options))
    parameter = weight(main_grad=torch.zeros(OUT, IN), grad_added_to_main_grad=False)
    operands = torch.ones(4, OUT), torch.ones(4, IN)
    dummy = deliver_weight_gradient(parameter, *operands)
    assert dummy is not None
    assert dummy.isnan().all()
    with torch.autograd.set_detect_anomaly(True):
        dummy = deliver_weight_gradient(parameter, *operands)
    assert dummy is not None
    assert not dummy.any()


def test_without_the_flag_nothing_is_returned_and_no_flag_appears() -> None:
    parameter = weight(main_grad=torch.zeros(OUT, IN))
    grad, x = torch.randn(4, OUT), torch.randn(4, IN)
    assert deliver_weight_gradient(parameter, grad, x) is None
    assert not hasattr(parameter, "grad_added_to_main_grad")
    assert relative_error(parameter.main_grad, wgrad_of(grad, x)) < 1e-6  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("attributes", [{}, {"main_grad": None}], ids=["absent", "None"])
def test_a_missing_buffer_is_named(attributes: dict[str, Any]) -> None:
    """Case 14, second half: the message names the parameter, and nothing is written or flagged before it."""
    parameter = weight(grad_added_to_main_grad=False, **attributes)
    operands = torch.ones(4, OUT), torch.ones(4, IN)
    with pytest.raises(ConfigError, match=r"but a weight of shape \[5, 7\] trains and has neither a main_grad buffer"):
        deliver_weight_gradient(parameter, *operands)
    name_parameters(torch.nn.ModuleDict({"head": torch.nn.ParameterList([parameter])}), prefix="model")
    with pytest.raises(ConfigError, match=r"but weight 'model.head.0' of shape \[5, 7\] trains and has neither"):
        deliver_weight_gradient(parameter, *operands)
    assert parameter.grad_added_to_main_grad is False  # pyright: ignore[reportAttributeAccessIssue]


def test_layers_and_models_name_their_weights() -> None:
    config = ModelParallelConfig()
    linear = ColumnParallelLinear(IN, OUT, config=config, init_method=torch.nn.init.zeros_, name="decoder.0.fc1")
    assert linear.weight is not None
    assert described(linear.weight) == "weight 'decoder.0.fc1.weight' of shape [5, 7]"
    row = RowParallelLinear(
        IN,
        OUT,
        config=config,
        init_method=torch.nn.init.zeros_,
        bias=True,
        input_is_parallel=True,
        skip_bias_add=False,
        name="fc2",
    )
    assert described(row.weight) == "weight 'fc2.weight' of shape [5, 7]"
    model = CausalLM(DecoderConfig.from_hf(TINY), parallel=config)
    names = {described(parameter).split("'")[1] for parameter in model.parameters()}
    assert names == {name for name, _ in model.named_parameters()}


def test_a_buffer_of_integers_is_refused() -> None:
    """Case 9."""
    buffer = torch.zeros(OUT, IN, dtype=torch.int32)
    parameter = weight(main_grad=buffer, grad_added_to_main_grad=False)
    with pytest.raises(LayoutError, match=r"main_grad has dtype torch\.int32; give a floating-point buffer"):
        deliver_weight_gradient(parameter, torch.ones(4, OUT), torch.ones(4, IN))
    assert not buffer.any()
    assert parameter.grad_added_to_main_grad is False  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("uses", [1, 2])
def test_overwriting_clears_what_was_there_but_not_an_earlier_use(uses: int) -> None:
    """Case 11 (c), and (d) with it: without a flag attribute too, a second use in one backward is added."""
    fused = layer(bias=False)
    parameter = weight_of(fused)
    parameter.main_grad, parameter.overwrite_main_grad = torch.full((OUT, IN), torch.nan), True
    for _ in range(2):  # a second backward overwrites again
        inputs = [torch.randn(4, 1, IN) for _ in range(uses)]
        torch.stack([fused(x)[0].sum() for x in inputs]).sum().backward()
        expected = sum(wgrad_of(torch.ones(4, 1, OUT), x) for x in inputs)
        assert relative_error(parameter.main_grad, torch.as_tensor(expected)) < 1e-6
        assert parameter.grad is None


def test_a_parameter_put_in_its_place_is_known_as_the_old_one() -> None:
    linear = ColumnParallelLinear(IN, OUT, config=ModelParallelConfig(), init_method=torch.nn.init.zeros_, name="fc1")
    before = weight_of(linear)
    linear.load_state_dict({name: value.clone() for name, value in linear.state_dict().items()}, assign=True)
    assert weight_of(linear) is not before
    assert described(weight_of(linear)) == "weight 'fc1.weight' of shape [5, 7]"


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
