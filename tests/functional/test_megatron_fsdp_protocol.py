"""Fused weight gradients by the protocol of Megatron-FSDP, whose own code decides here what becomes of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_frozen import ColumnParallelLinear, ModelParallelConfig, RowParallelLinear
from megatron_frozen.errors import ConfigError
from megatron_frozen.testing import relative_error
from tests.functional.megatron_fsdp_protocol import ATTRIBUTES, FsdpWeight, named_attributes

IN, OUT = 7, 5


def layer(kind: type, *, fusion: bool = True, dtype: torch.dtype = torch.bfloat16) -> Any:
    config = ModelParallelConfig(gradient_accumulation_fusion=fusion, params_dtype=dtype, use_cpu_initialization=True)
    options: dict[str, Any] = {"input_is_parallel": True, "skip_bias_add": False} if kind is RowParallelLinear else {}
    return kind(IN, OUT, config=config, init_method=torch.nn.init.normal_, bias=False, **options)


def use(module: Any, *, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the layer on 32 tokens; return a loss, and the weight gradient it has in fp64."""
    generator = torch.Generator().manual_seed(seed)
    x, grad = (torch.randn(16, 2, size, generator=generator).to(module.weight.dtype) for size in (IN, OUT))
    loss = (module(x)[0] * grad).sum(dtype=torch.float32)
    return loss, grad.double().reshape(-1, OUT).t() @ x.double().reshape(-1, IN)


def test_the_source_names_what_the_layers_read() -> None:
    assert named_attributes() >= ATTRIBUTES


@pytest.mark.parametrize("is_sharded", [True, False], ids=["sharded", "whole"])
@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_micro_batches_add_up_in_fp32(kind: type, *, is_sharded: bool) -> None:
    """Case 9, and the getter of case 14: not called in forward, called once in backward."""
    module = layer(kind)
    wrapper = FsdpWeight(module.weight, is_sharded=is_sharded)
    expected = torch.zeros(OUT, IN, dtype=torch.float64)
    for seed in range(3):
        wrapper.unshard()
        loss, product = use(module, seed=seed)
        assert wrapper.num_calls == seed
        wrapper.unshard()
        loss.backward()
        assert wrapper.num_calls == seed + 1
        wrapper.after_backward()
        expected += product
    assert relative_error(wrapper.gradient(), expected) < 1e-6


@pytest.mark.parametrize("is_sharded", [True, False], ids=["sharded", "whole"])
def test_bf16_gradients_by_the_same_protocol_are_coarse(*, is_sharded: bool) -> None:
    module = layer(ColumnParallelLinear, fusion=False)
    wrapper = FsdpWeight(module.weight, is_sharded=is_sharded)
    loss, expected = use(module, seed=0)
    loss.backward()
    wrapper.after_backward()
    assert relative_error(wrapper.gradient(), expected) > 1e-4


def test_a_bucket_of_bf16_is_filled_too() -> None:
    module = layer(ColumnParallelLinear)
    wrapper = FsdpWeight(module.weight, is_sharded=True, dtype=torch.bfloat16)
    loss, expected = use(module, seed=0)
    loss.backward()
    wrapper.after_backward()
    assert relative_error(wrapper.gradient(), expected) < 4e-3


def test_no_gradient_without_a_getter_call_in_forward_alone() -> None:
    module = layer(ColumnParallelLinear)
    wrapper = FsdpWeight(module.weight, is_sharded=True)
    with torch.no_grad():
        use(module, seed=0)
    use(module, seed=0)
    assert wrapper.num_calls == 0


@pytest.mark.parametrize("is_sharded", [True, False], ids=["sharded", "whole"])
@pytest.mark.parametrize("handled", ["once", "after each use"])
def test_a_layer_used_twice_in_one_backward(handled: str, *, is_sharded: bool) -> None:
    """Case 11 (d): the second use adds where the bucket still holds the first, and overwrites where it is a new one."""
    module = layer(ColumnParallelLinear)
    wrapper = FsdpWeight(module.weight, is_sharded=is_sharded)
    expected = torch.zeros(OUT, IN, dtype=torch.float64)
    for step in range(2):
        wrapper.unshard()
        losses = []
        for seed in (2 * step, 2 * step + 1):
            loss, product = use(module, seed=seed)
            losses.append(loss)
            expected += product
        if handled == "once":
            sum(losses, start=torch.zeros(())).backward()
            wrapper.after_backward()
        else:
            for loss in losses:
                loss.backward()
                wrapper.after_backward()
    assert relative_error(wrapper.gradient(), expected) < 1e-6


@pytest.mark.parametrize("mark", ["zero_out_wgrad", "_is_shared"])
def test_a_weight_shared_with_an_embedding(mark: str) -> None:
    """Whole gradients take both uses; sharded ones would drop the embedding's, so nothing is written."""
    module = layer(ColumnParallelLinear, dtype=torch.float32)
    setattr(module.weight, mark, True)
    wrapper = FsdpWeight(module.weight, is_sharded=False)
    loss, expected = use(module, seed=0)
    ids = torch.tensor([1, 3, 3])
    (loss + torch.nn.functional.embedding(ids, module.weight).sum()).backward()
    wrapper.after_backward()
    expected += torch.bincount(ids, minlength=OUT).unsqueeze(1)
    assert relative_error(wrapper.gradient(), expected) < 1e-6

    sharded = FsdpWeight(module.weight, is_sharded=True)
    with pytest.raises(ConfigError, match="is shared with a layer that does not fuse, and Megatron-FSDP with sharded"):
        use(module, seed=0)[0].backward()
    assert sharded.num_calls == 0


def test_a_frozen_weight_is_left_alone() -> None:
    module = layer(ColumnParallelLinear)
    wrapper = FsdpWeight(module.weight.requires_grad_(requires_grad=False), is_sharded=True)
    x = torch.randn(4, 2, IN, dtype=torch.bfloat16, requires_grad=True)
    module(x)[0].sum().backward()
    assert x.grad is not None
    assert wrapper.num_calls == 0
    assert module.weight.grad_added_to_main_grad is False
    assert not hasattr(module.weight, "main_grad")
