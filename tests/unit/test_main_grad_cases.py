"""What went wrong elsewhere with fused gradients: cases 8, 9, 14 and 15."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from megatron_frozen import ColumnParallelLinear, LoraConfig, ModelParallelConfig, RowParallelLinear
from megatron_frozen.lora import LoraLinear
from megatron_frozen.params import grad_norm
from megatron_frozen.testing import relative_error

IN, OUT = 7, 5


def layer(kind: type, *, dtype: torch.dtype = torch.float32) -> Any:
    config = ModelParallelConfig(gradient_accumulation_fusion=True, params_dtype=dtype)
    options: dict[str, Any] = {"input_is_parallel": True, "skip_bias_add": False} if kind is RowParallelLinear else {}
    return kind(IN, OUT, config=config, init_method=torch.nn.init.normal_, bias=False, **options)


@pytest.mark.parametrize("buffer", ["absent", "None", "filled"])
def test_a_frozen_base_beside_an_adapter(buffer: str) -> None:
    """Case 8: no buffer is made, read or written for the base, and the norm covers the adapter alone."""
    base = layer(ColumnParallelLinear)
    base.weight.requires_grad = False
    if buffer != "absent":
        base.weight.main_grad = None if buffer == "None" else torch.full((OUT, IN), 3.0)
    lora = LoraLinear(base)
    lora.add_adapter("default", LoraConfig(r=2), full_A=torch.randn(2, IN), full_B=torch.randn(OUT, 2))
    lora.active_adapter = "default"
    x = torch.randn(32, 1, IN, requires_grad=True)
    grad = torch.randn(32, 1, OUT)
    lora(x)[0].backward(grad)
    factors = [lora.lora_A["default"], lora.lora_B["default"]]
    scale = lora.adapters["default"].scale
    whole = base.weight + scale * factors[1] @ factors[0]
    assert x.grad is not None
    assert relative_error(x.grad, grad @ whole) < 1e-6
    assert hasattr(base.weight, "main_grad") is (buffer != "absent")
    if buffer == "filled":
        kept: Any = base.weight.main_grad
        assert torch.equal(kept, torch.full((OUT, IN), 3.0))
    norm = torch.cat([factor.grad.flatten() for factor in factors if factor.grad is not None]).norm()
    torch.testing.assert_close(grad_norm(lora.parameters(), group=None), norm)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32 buffer", "bf16 buffer"])
@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_operands_of_bf16_fill_a_buffer_of_its_own_dtype(kind: type, dtype: torch.dtype) -> None:
    """Case 9: the product itself in fp32, not one rounded to bf16 on the way."""
    module = layer(kind, dtype=torch.bfloat16)
    module.weight.main_grad = torch.zeros(OUT, IN, dtype=dtype)
    x, grad = torch.randn(32, IN).bfloat16(), torch.randn(32, OUT).bfloat16()
    module(x)[0].backward(grad)
    exact = grad.double().t() @ x.double()
    assert module.weight.main_grad.dtype == dtype
    error = relative_error(module.weight.main_grad, exact)
    assert error < (1e-6 if dtype == torch.float32 else 4e-3)
    assert relative_error(exact.bfloat16(), exact) > 1e-3


def test_a_getter_is_called_in_backward_once() -> None:
    """Case 14: no forward makes a buffer, with or without grad."""
    module = layer(ColumnParallelLinear)
    calls: list[torch.Tensor] = []

    def get_main_grad() -> torch.Tensor:
        calls.append(torch.zeros(OUT, IN))
        return calls[-1]

    module.weight.get_main_grad = get_main_grad
    x = torch.ones(4, 1, IN)
    with torch.no_grad():
        module(x)
    y, _ = module(x)
    assert not calls
    y.sum().backward()
    assert len(calls) == 1
    assert module.weight.main_grad is calls[0]
    assert torch.equal(calls[0], torch.full((OUT, IN), 4.0))


def test_fusion_needs_no_extension() -> None:
    """Case 15: where neither Transformer Engine nor apex is to be had, layers are built, and both kinds run."""
    code = """
import sys
sys.modules.update(dict.fromkeys(["transformer_engine", "apex", "fused_weight_gradient_mlp_cuda"]))
import torch
from megatron_frozen import ColumnParallelLinear, ModelParallelConfig
config = ModelParallelConfig(gradient_accumulation_fusion=True)
for trains in (True, False):
    layer = ColumnParallelLinear(7, 5, config=config, init_method=torch.nn.init.ones_)
    layer.weight.requires_grad = trains
    layer.weight.main_grad = torch.zeros(5, 7)
    x = torch.ones(4, 1, 7, requires_grad=True)
    layer(x)[0].sum().backward()
    print(layer.weight.main_grad.sum().item(), x.grad.sum().item())
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["140.0", "140.0", "0.0", "140.0"]
