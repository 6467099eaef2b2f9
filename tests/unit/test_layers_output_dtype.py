"""A column layer whose output is wider than its operands: fp32 logits from bf16, dY cast back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_frozen import (
    ColumnParallelLinear,
    LoraConfig,
    ModelParallelConfig,
    apply_lora,
    initialize_model_parallel,
    linear_with_frozen_weight,
    load_hf_folder,
)
from megatron_frozen.diagnostics import Recorder
from megatron_frozen.errors import ConfigError
from megatron_frozen.params import shard_of
from megatron_frozen.testing import relative_error, run_ranks

IN, OUT = 48, 96


def column(*, trainable: bool, bias: bool = True) -> ColumnParallelLinear:
    """Return a bf16 layer with fp32 output and a random bias."""
    torch.manual_seed(0)
    layer = ColumnParallelLinear(
        IN,
        OUT,
        config=ModelParallelConfig(params_dtype=torch.bfloat16),
        init_method=torch.nn.init.xavier_normal_,
        bias=bias,
        output_dtype=torch.float32,
    )
    assert layer.weight is not None
    layer.weight.requires_grad = trainable
    if layer.bias is not None:
        with torch.no_grad():
            layer.bias.copy_(shard_of(torch.linspace(-1, 1, OUT), partition_dim=0, group=layer.tp_group))
    return layer


def _body(rank: int, world_size: int, trainable: bool) -> dict[str, Any]:  # noqa: FBT001
    if world_size > 1:
        initialize_model_parallel(world_size)
    layer = column(trainable=trainable)
    assert layer.bias is not None
    assert layer.weight is not None
    x = torch.randn(6, 3, IN, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    y, _ = layer(x, runtime_gather_output=True)
    grad = torch.randn(3, 6, OUT, generator=torch.Generator().manual_seed(2)).transpose(0, 1)
    y.backward(grad)
    return {"y": y.detach(), "dx": x.grad, "dw": layer.weight.grad, "db": layer.bias.grad}


@pytest.mark.parametrize("trainable", [False, True])
def test_values_and_gradients(*, trainable: bool) -> None:
    """y errs as an fp32 product does; the gradients are those of dY rounded to bf16, db those of dY itself."""
    one = _body(0, 1, trainable)
    layer = column(trainable=trainable)
    assert layer.weight is not None
    assert layer.bias is not None
    x = torch.randn(6, 3, IN, generator=torch.Generator().manual_seed(1)).bfloat16().double()
    grad = torch.randn(3, 6, OUT, generator=torch.Generator().manual_seed(2)).transpose(0, 1)
    W, rounded = layer.weight.detach().double(), grad.bfloat16().double()
    exact = x @ W.t() + layer.bias.detach().double()
    assert one["y"].dtype == torch.float32
    assert relative_error(one["y"], exact) < 1e-6
    assert relative_error(exact.bfloat16(), exact) > 1e-4  # the control: a bf16 output would not do
    assert relative_error(one["dx"], rounded @ W) < 4e-3
    assert relative_error(one["db"], grad.double().sum((0, 1))) < 4e-3
    if trainable:
        assert relative_error(one["dw"], torch.einsum("sbo,sbi->oi", rounded, x)) < 4e-3
    for two in run_ranks(2, _body, trainable):
        assert relative_error(two["y"], exact) < 1e-6
        assert relative_error(two["dx"], rounded @ W) < 8e-3  # each rank's part is rounded before the sum


def test_no_batched_product_and_one_copy_of_the_gradient() -> None:
    """dY is cast back once, in its own memory order, and folded as it is."""
    layer = column(trainable=False, bias=False)
    x = torch.randn(6, 3, IN).bfloat16().requires_grad_()
    y, _ = layer(x)
    grad = torch.randn(3, 6, OUT).transpose(0, 1)
    with Recorder() as seen:
        torch.autograd.grad(y, x, grad)
    assert (seen.count("aten.mm"), seen.count("aten.bmm")) == (1, 0)
    assert [op.name for op in seen.copies(min_bytes=OUT)] == ["aten._to_copy"]


def test_the_three_steps_compose() -> None:
    layer = column(trainable=False)
    x = torch.randn(6, 3, IN).bfloat16()
    stepwise, _ = layer.leave_parallel(layer.multiply(layer.enter_parallel(x)))
    assert stepwise.dtype == torch.float32
    torch.testing.assert_close(stepwise, layer(x)[0])


def test_a_narrower_output_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"output_dtype is torch\.bfloat16 for operands of torch\.float32"):
        linear_with_frozen_weight(
            torch.randn(2, 3),
            torch.randn(4, 3),
            None,
            gradient_accumulation_fusion=False,
            allreduce_dgrad=False,
            sequence_parallel=False,
            output_dtype=torch.bfloat16,
        )


def test_a_head_gives_fp32_logits_and_takes_no_adapter_then(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    model = load_hf_folder(tmp_path, parallel=ModelParallelConfig(params_dtype=torch.bfloat16))
    for param in model.parameters():
        param.requires_grad = False
    ids = torch.arange(12).view(2, 6)
    narrow = model(ids)
    model.lm_head.output_dtype = torch.float32
    wide = model(ids)
    assert (narrow.dtype, wide.dtype) == (torch.bfloat16, torch.float32)
    # Half a step of bf16 apart. Another kernel sums in another order, so that not every rounding is the same.
    torch.testing.assert_close(narrow.float(), wide, rtol=1.01 * 2**-8, atol=1e-6)
    assert not torch.equal(wide.bfloat16().float(), wide)
    with pytest.raises(ConfigError, match="its output_dtype is wider than its operands"):
        apply_lora(model, LoraConfig(target_modules=("lm_head",)))


@pytest.mark.parametrize("trainable", [False, True])
def test_a_compiled_layer_gives_the_eager_values(*, trainable: bool) -> None:
    """The backends are called by address, which no graph can hold; a compiled product upcasts instead."""
    layer = column(trainable=trainable)
    x = torch.randn(6, 3, IN).bfloat16().requires_grad_()
    grad = torch.randn(6, 3, OUT)

    def call(x: torch.Tensor) -> torch.Tensor:
        return layer(x)[0]

    eager = call(x)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")(x)
    assert compiled.dtype == torch.float32
    torch.testing.assert_close(compiled, eager)
    (dx,) = torch.autograd.grad(eager, x, grad)
    (compiled_dx,) = torch.autograd.grad(compiled, x, grad)
    torch.testing.assert_close(compiled_dx, dx)
