"""What megatron_frozen.gpt_lora refuses, before it changes anything."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from megatron_frozen import LoraConfig, gpt_lora
from megatron_frozen.errors import ConfigError
from megatron_frozen.gpt_lora.projections import find_projections
from megatron_frozen.testing import run_ranks
from tests.functional import megatron_lora_ranks as ranks
from tests.functional.megatron_cpu import block_spec, gpt_config, gpt_model, megatron_on_cpu


def unknown_name(model: Any) -> None:
    gpt_lora.apply_lora(model, LoraConfig(target_modules=["linear_qkv", "linear_fc1x"]))


def unknown_layer(model: Any) -> None:
    gpt_lora.apply_lora(model, LoraConfig(layers_to_transform=[1, 7]))


def unknown_pattern(model: Any) -> None:
    gpt_lora.apply_lora(model, LoraConfig(target_modules=r"layers\.9\..*"))


def applied_twice(model: Any) -> None:
    gpt_lora.apply_lora(model, LoraConfig())
    gpt_lora.apply_lora(model, LoraConfig())


def nothing_to_train(model: Any) -> None:
    gpt_lora.lora_parameters(model)


def a_wrapped_linear(model: Any) -> None:
    attention = model.decoder.layers[1].self_attention
    wrapper: Any = nn.Linear(1, 1)
    for name in ("config", "output_size", "input_size", "tp_group"):
        setattr(wrapper, name, getattr(attention.linear_proj, name))
    attention.linear_proj = wrapper
    gpt_lora.apply_lora(model, LoraConfig())


def explicit_communication(model: Any) -> None:
    model.decoder.layers[0].mlp.linear_fc2.explicit_expert_comm = True
    gpt_lora.apply_lora(model, LoraConfig())


def no_decoder(model: Any) -> None:
    gpt_lora.apply_lora(model.embedding, LoraConfig())


def one_stage(model: Any) -> None:
    gpt_lora.apply_lora(model, LoraConfig())
    model.config.num_layers = 4
    gpt_lora.save_adapter(model, "unused")


def learns_nothing(model: Any) -> None:
    gpt_lora.apply_lora(model, LoraConfig())
    adapters = gpt_lora.lora_parameters(model)
    for parameter in adapters:
        parameter.grad = torch.zeros_like(parameter)
    adapters[-1].grad = torch.ones_like(adapters[-1])
    gpt_lora.assert_adapters_learn(model)
    adapters[-1].grad = None
    gpt_lora.assert_adapters_learn(model)


FAILURES = [
    (learns_nothing, r"no adapter gradient is other than zero \(1 of"),
    (unknown_name, "no projection of the GPTModel matches LoRA target_modules 'linear_fc1x'"),
    (unknown_pattern, "no projection of the GPTModel matches LoRA target_modules 'layers"),
    (unknown_layer, r"LoRA layers_to_transform names layers \[7\], which hold no target projection"),
    (applied_twice, "the GPTModel carries adapters already"),
    (nothing_to_train, "the GPTModel carries no adapter; call"),
    (a_wrapped_linear, "model.layers.1.self_attn.o_proj cannot carry an adapter: it is a Linear; build the model from"),
    (explicit_communication, "down_proj cannot carry an adapter: it leaves communication to its caller"),
    (no_decoder, "the model has no decoder layer with linear_qkv"),
    (one_stage, "the model holds layers 0 to 1 of 4, and an adapter's file holds all"),
]


@pytest.mark.parametrize(("action", "message"), FAILURES, ids=lambda value: getattr(value, "__name__", ""))
def test_what_is_refused(action: Any, message: str) -> None:
    (text,) = run_ranks(1, ranks.failing, action)
    assert re.search(f"^ConfigError: .*{message}", text), text


def unchanged(rank: int, world_size: int) -> list[str]:
    """Return what a refused apply_lora changed in a model of upstream's own linears."""
    with megatron_on_cpu():
        config = gpt_config()
        model = gpt_model(config, block_spec(config))
        before = {name: (type(module), module.training) for name, module in model.named_modules()}
        with pytest.raises(ConfigError):
            unknown_name(model)
        after = {name: (type(module), module.training) for name, module in model.named_modules()}
        frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
        return [name for name in before if before[name] != after[name]] + frozen


def test_a_refusal_changes_nothing() -> None:
    assert run_ranks(1, unchanged) == [[]]


@pytest.mark.parametrize(("gate", "num_groups"), [(True, 2), (False, 0)], ids=["a gate", "fewer groups than ranks"])
def test_an_unknown_order_of_rows(*, gate: bool, num_groups: int) -> None:
    linear, layer, model = (cast("Any", nn.Module()) for _ in range(3))
    linear.config = SimpleNamespace(attention_output_gate=gate, num_query_groups=num_groups)
    linear.tp_group, linear.output_size = None, 32
    layer.self_attention, layer.layer_number = nn.Module(), 1
    layer.self_attention.linear_qkv = linear
    model.decoder = nn.Module()
    model.decoder.layers = nn.ModuleList([layer])
    with pytest.raises(ConfigError, match=r"linear_qkv holds an output gate, or .* whose order of rows is not known"):
        list(find_projections(model))


def loading(rank: int, world_size: int, folder: str, fields: dict[str, Any] | None) -> str:
    """Return what loading says: into a bare model, or into one that has adapters of these fields."""

    def action(model: Any) -> None:
        if fields is not None:
            gpt_lora.apply_lora(model, LoraConfig(**fields))
        gpt_lora.load_adapter(model, folder)

    return ranks.failing(rank, world_size, action)


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({FIRST: None}, f"has no {FIRST}"),
        ({"other": torch.zeros(2)}, "has other, which is none of the GPTModel's target projections"),
        ({FIRST: torch.zeros(16, 5)}, r"of shape \[16, 5\] where the GPTModel needs \[16, 4\]"),
    ],
    ids=["missing", "unexpected", "misshapen"],
)
def test_files_that_do_not_fit(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    folder = tmp_path / "adapter"
    run_ranks(1, ranks.save, str(folder), {"tp": 1}, {})
    path = folder / "adapter_model.safetensors"
    tensors = {**load_file(path), **change}
    save_file({key: tensor for key, tensor in tensors.items() if tensor is not None}, path)
    (text,) = run_ranks(1, loading, str(folder), None)
    assert re.search(f"^CheckpointError: .*{message}.*give an adapter that was trained on this base model", text), text


@pytest.mark.parametrize("fields", [{"r": 2}, {"r": 4, "alpha": 8, "target_modules": ["q_proj"]}], ids=str)
def test_another_adapter_on_the_model(tmp_path: Path, fields: dict[str, Any]) -> None:
    folder = str(tmp_path / "adapter")
    run_ranks(1, ranks.save, folder, {"tp": 1}, {})
    (text,) = run_ranks(1, loading, folder, fields)
    assert re.search("^CheckpointError: the GPTModel's adapter has r=.* load it into a new model", text), text
