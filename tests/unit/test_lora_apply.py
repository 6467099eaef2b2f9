"""Adapters on a whole model: freezing, names, switching, dtypes, the guard against learning nothing (cases 25, 46)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_frozen.errors import ConfigError
from megatron_frozen.layers import VocabParallelEmbedding
from megatron_frozen.lora import (
    LoraConfig,
    adapter_names,
    adapters_disabled,
    apply_lora,
    assert_adapters_learn,
    load_adapter,
    lora_parameters,
    named_lora_layers,
    require_input_grads,
    reset_adapter,
    save_adapter,
    set_active_adapter,
)
from tests.unit.lora_toys import Mlp, Stack, column, config_for, seeded

CONFIG = LoraConfig(r=2, alpha=4, target_modules=["up_proj", "down_proj"])
HIDDEN = seeded(5, 2, 8, seed=9)


def _fill(model: nn.Module, *, adapter_name: str, seed: int) -> None:
    with torch.no_grad():
        for number, parameter in enumerate(lora_parameters(model, adapter_name=adapter_name)):
            parameter.copy_(0.3 * seeded(*parameter.shape, seed=100 * seed + number))


def test_applying_freezes_all_else_and_leaves_the_output_as_it_is() -> None:
    model = Stack()
    before = model(HIDDEN)
    assert apply_lora(model, CONFIG) is model
    assert torch.equal(model(HIDDEN), before)
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(trainable) == len(lora_parameters(model)) == 8
    assert all(".lora_A.default" in name or ".lora_B.default" in name for name in trainable)


def test_wrapped_layers_keep_the_training_mode() -> None:
    model = apply_lora(Stack().eval(), CONFIG)
    assert not any(module.training for module in model.modules())


def test_named_adapters_are_added_selected_and_switched_off() -> None:
    model = Stack()
    base = model(HIDDEN)
    apply_lora(model, CONFIG)
    _fill(model, adapter_name="default", seed=1)
    first = model(HIDDEN)
    apply_lora(model, LoraConfig(r=3, target_modules=["layers.0.mlp.up_proj"]), adapter_name="second")
    assert adapter_names(model) == ["default", "second"]
    assert torch.equal(model(HIDDEN), base)  # the new one is active, and starts at zero
    _fill(model, adapter_name="second", seed=2)
    second = model(HIDDEN)
    assert not torch.equal(second, base)
    assert [parameter.shape[0] for parameter in lora_parameters(model)] == [3, 12]
    assert [name for name, p in model.named_parameters() if p.requires_grad] == [
        "model.layers.0.mlp.up_proj.lora_A.second",
        "model.layers.0.mlp.up_proj.lora_B.second",
    ]
    set_active_adapter(model, "default")
    assert torch.equal(model(HIDDEN), first)
    assert all(parameter.requires_grad for parameter in lora_parameters(model, adapter_name="default"))
    with adapters_disabled(model):
        assert torch.equal(model(HIDDEN), base)
    assert torch.equal(model(HIDDEN), first)
    set_active_adapter(model, None)
    assert torch.equal(model(HIDDEN), base)
    with pytest.raises(ConfigError, match=r"no active adapter, so nothing to train; .* by megatron_frozen\.gpt_lora"):
        lora_parameters(model)


def test_reset_starts_one_adapter_anew() -> None:
    model = apply_lora(Stack(), CONFIG, seed=3)
    start = [parameter.detach().clone() for parameter in lora_parameters(model)]
    _fill(model, adapter_name="default", seed=1)
    reset_adapter(model, seed=3)
    assert all(torch.equal(old, new) for old, new in zip(start, lora_parameters(model), strict=True))
    reset_adapter(model, seed=4)
    assert not torch.equal(start[0], lora_parameters(model)[0])


def test_names_that_cannot_be_are_refused() -> None:
    model = apply_lora(Stack(), CONFIG)
    with pytest.raises(ConfigError, match="'default' is on the model already; give another adapter_name, or call"):
        apply_lora(model, CONFIG)
    for name in ("", "a.b", "keys", "training", "tp_group"):
        with pytest.raises(ConfigError, match="is a word that torch's modules use themselves; give another"):
            apply_lora(model, CONFIG, adapter_name=name)
    with pytest.raises(ConfigError, match="'defualt' is not on the model, did you mean 'default'\\?; it holds def"):
        set_active_adapter(model, "defualt")
    with pytest.raises(ConfigError, match="it holds no adapter, so call apply_lora or load_adapter first"):
        reset_adapter(Stack())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_adapters_are_fp32_on_every_path_and_the_output_keeps_the_base_dtype(dtype: torch.dtype, tmp_path) -> None:
    def parameters(model: nn.Module, name: str) -> set[torch.dtype]:
        return {parameter.dtype for parameter in lora_parameters(model, adapter_name=name)}

    def based() -> nn.Module:
        model = Mlp()
        for linear in (model.up_proj, model.down_proj):
            assert linear.weight is not None
            linear.weight.data = linear.weight.data.to(dtype)
        return model

    model = apply_lora(based(), CONFIG)
    save_adapter(model, tmp_path / "adapter")
    loaded = load_adapter(based(), tmp_path / "adapter")
    apply_lora(loaded, CONFIG, adapter_name="second")
    load_adapter(loaded, tmp_path / "adapter", adapter_name="third")
    load_adapter(loaded, tmp_path / "adapter", adapter_name="third")
    assert parameters(model, "default") == {torch.float32}
    assert all(parameters(loaded, name) == {torch.float32} for name in ("default", "second", "third"))
    load_adapter(loaded, tmp_path / "adapter", adapter_name="small", dtype=None)
    assert parameters(loaded, "small") == {dtype}
    for name in adapter_names(loaded):
        set_active_adapter(loaded, name)
        assert loaded(HIDDEN.to(dtype)).dtype == dtype


# ------------------------------------------------------------------------------- adapters that would learn nothing


def _block(linear: nn.Module, hidden: Tensor) -> Tensor:
    return torch.tanh(linear(hidden)[0])


class Recomputed(nn.Module):
    """A frozen embedding (10, 8), then checkpointed blocks of one linear each, under any attribute names."""

    def __init__(self, names: tuple[str, str], run: Callable[..., Tensor]) -> None:
        super().__init__()
        self.embed = VocabParallelEmbedding(
            10, 8, init_method=lambda w: w.copy_(seeded(10, 8, seed=1)), config=config_for()
        )
        for number, name in enumerate(names):
            setattr(self, name, column(seeded(8, 8, seed=number)))
        self.names, self.run = names, run

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for name in self.names:
            hidden = self.run(partial(_block, getattr(self, name)), hidden)
        return hidden


def _plain(block: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    return block(hidden)


def _reentrant(block: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    return checkpoint(block, hidden, use_reentrant=True)


def _not_reentrant(block: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    return checkpoint(block, hidden, use_reentrant=False)


def _recomputed(names: tuple[str, str], run: Callable[..., Tensor]) -> nn.Module:
    model = apply_lora(Recomputed(names, run), LoraConfig(r=2, target_modules=names))
    _fill(model, adapter_name="default", seed=1)
    return model


IDS = torch.arange(6).view(3, 2)


@pytest.mark.parametrize("names", [("q_proj", "down_proj"), ("first", "second"), ("linear_in", "adapter")])
@pytest.mark.parametrize("run", [_reentrant, _not_reentrant])
def test_recomputation_over_a_frozen_embedding_gives_the_same_gradients(
    names: tuple[str, str], run: Callable[..., Tensor]
) -> None:
    plain, recomputed = _recomputed(names, _plain), _recomputed(names, run)
    require_input_grads(recomputed)
    for model in (plain, recomputed):
        model(IDS).square().sum().backward()
        assert_adapters_learn(model)
    for expected, actual in zip(lora_parameters(plain), lora_parameters(recomputed), strict=True):
        assert expected.grad is not None
        torch.testing.assert_close(actual.grad, expected.grad, atol=1e-6, rtol=1e-6)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_adapters_that_no_gradient_reaches_are_an_error() -> None:
    model = _recomputed(("q_proj", "down_proj"), _reentrant)
    other = nn.Parameter(torch.ones(8))
    (model(IDS) * other).sum().backward()  # the loss is finite and has a gradient, only not for the adapters
    with pytest.raises(ConfigError, match="no adapter gradient is other than zero \\(4 of 4 are absent\\)"):
        assert_adapters_learn(model)
    for parameter in lora_parameters(model):
        parameter.grad = torch.zeros_like(parameter)
    with pytest.raises(ConfigError, match="no adapter gradient is other than zero \\(0 of 4 are absent\\)"):
        assert_adapters_learn(model)


def test_the_first_step_where_only_b_has_a_gradient_passes() -> None:
    model = apply_lora(Stack(), CONFIG)
    model(HIDDEN).square().sum().backward()
    assert all(not layer.lora_A["default"].grad.any() for _, layer in named_lora_layers(model))
    assert_adapters_learn(model)
