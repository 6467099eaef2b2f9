"""Where adapters go: names as PEFT matches them, and nothing asked for is passed over in silence (cases 26, 28, 35)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from megatron_frozen.errors import ConfigError
from megatron_frozen.layers import ColumnParallelLinear, ModelParallelConfig, VocabParallelEmbedding
from megatron_frozen.lora import LoraConfig, LoraLinear, apply_lora, named_lora_layers
from megatron_frozen.lora.layer import unsupported
from megatron_frozen.models import CausalLM, DecoderConfig
from tests.unit.lora_toys import Stack, column, config_for, row, seeded


def _applied(model: nn.Module, **fields: Any) -> list[str]:
    return [name for name, _ in named_lora_layers(apply_lora(model, LoraConfig(**fields)))]


def _tiny_llama(*, tied: bool = False) -> CausalLM:
    config = DecoderConfig.from_hf(
        {
            "model_type": "llama",
            "vocab_size": 20,
            "hidden_size": 8,
            "intermediate_size": 12,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32,
            "tie_word_embeddings": tied,
        }
    )
    return CausalLM(config, parallel=config_for())


def test_a_target_is_the_last_part_of_a_path_or_more_of_it() -> None:
    assert _applied(Stack(), target_modules=["down_proj"]) == [f"model.layers.{n}.mlp.down_proj" for n in (0, 1)]
    assert _applied(Stack(), target_modules=["layers.1.mlp.up_proj"]) == ["model.layers.1.mlp.up_proj"]


def test_one_string_is_an_expression_for_whole_paths() -> None:
    assert _applied(Stack(), target_modules=r".*\.1\.mlp\.(up|down)_proj") == [
        "model.layers.1.mlp.up_proj",
        "model.layers.1.mlp.down_proj",
    ]


def test_only_the_layers_asked_for_get_adapters() -> None:
    assert _applied(Stack(3), target_modules=["up_proj"], layers_to_transform=[2, 0]) == [
        "model.layers.0.mlp.up_proj",
        "model.layers.2.mlp.up_proj",
    ]


def test_one_string_that_is_a_name_is_told_to_be_a_list() -> None:
    text = r"one text, so a regular expression for whole paths, and 'up_proj' matches none; .* as in \[up_proj\];"
    with pytest.raises(ConfigError, match=text):
        apply_lora(Stack(), LoraConfig(target_modules="up_proj"))


class Fused(nn.Module):
    """A block with a fused qkv projection, as in Megatron."""

    def __init__(self) -> None:
        super().__init__()
        self.linear_qkv = column(seeded(12, 8, seed=0))
        self.linear_fc1 = column(seeded(12, 8, seed=1))
        self.norm = nn.LayerNorm(8)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["linear_fc1x"], "'linear_fc1x', did you mean 'linear_fc1'\\?; its linears are linear_qkv"),
        (["linear_qkv", "linear_fc1x"], "'linear_fc1x', did you mean 'linear_fc1'\\?; its linears are linear_qkv"),
        (
            ["q_proj", "v_proj"],
            "no module of the model matches LoRA target_modules 'q_proj' or 'v_proj'; its linears are linear_qkv",
        ),
        (["linear_qkv", "q_proj"], "target_modules 'q_proj'; its linears are"),
        (".*q_proj", r"and '\.\*q_proj' matches none; .*; the model's linears are linear_qkv, linear_fc1"),
    ],
)
def test_each_target_that_matches_nothing_is_named_and_nothing_is_changed(targets: Any, message: str) -> None:
    model = Fused()
    with pytest.raises(ConfigError, match=message):
        apply_lora(model, LoraConfig(target_modules=targets))
    assert not list(named_lora_layers(model))
    assert model.norm.weight.requires_grad


def test_a_layer_number_without_a_target_is_named() -> None:
    with pytest.raises(ConfigError, match=r"asks for layers \[7\], .*they are in layers 0 to 1"):
        apply_lora(Stack(), LoraConfig(target_modules=["up_proj"], layers_to_transform=[1, 7]))
    with pytest.raises(ConfigError, match="none of them is in a numbered layer"):
        apply_lora(Fused(), LoraConfig(target_modules=["linear_qkv"], layers_to_transform=[0]))


def test_a_module_that_is_no_parallel_linear_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"layers\.0\.norm: it is a LayerNorm, and LoRA adapts Column"):
        apply_lora(Stack(), LoraConfig(target_modules=["up_proj", "norm"]))
    with pytest.raises(ConfigError, match=r"no ColumnParallelLinear or RowParallelLinear of this .*gpt_lora"):
        apply_lora(nn.Sequential(nn.Linear(2, 2)), LoraConfig(target_modules=["0"]))
    with pytest.raises(ConfigError, match="LoraLinear was given a base layer it cannot wrap: it is a Linear"):
        LoraLinear(nn.Linear(2, 2))


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_a_tied_output_layer_is_refused(target: str) -> None:
    with pytest.raises(ConfigError, match=f"{target}: its weight is tied to another module.*leave lm_head and embed"):
        apply_lora(_tiny_llama(tied=True), LoraConfig(target_modules=["q_proj", target]))


def test_a_weight_tied_by_hand_is_found_without_any_config() -> None:
    model = nn.Module()
    model.embed_tokens = VocabParallelEmbedding(8, 4, init_method=nn.init.zeros_, config=config_for())
    model.out = column(torch.zeros(8, 4))
    model.out.weight = model.embed_tokens.weight
    with pytest.raises(ConfigError, match="out: its weight is tied"):
        apply_lora(model, LoraConfig(target_modules=["out"]))


def test_an_output_layer_of_its_own_may_carry_an_adapter() -> None:
    assert _applied(_tiny_llama(), target_modules=["lm_head"]) == ["lm_head"]


def test_layers_whose_work_is_shared_with_others_say_why_they_cannot() -> None:
    headless = column(torch.zeros(8, 4), stride=1)
    headless.weight = None
    assert "holds no weight of its own" in (unsupported(headless) or "")
    split = ColumnParallelLinear(
        4, 8, config=ModelParallelConfig(), init_method=torch.nn.init.zeros_, parameters_split=["q", "k"]
    )
    assert "it holds its weight in named parts" in (unsupported(split) or "")
    assert "interleaved over ranks" in (unsupported(column(torch.zeros(8, 4), stride=2)) or "")
    expert = row(torch.zeros(8, 4))
    expert.expert_parallel = True
    assert "spread over ranks" in (unsupported(expert) or "")
    assert unsupported(row(torch.zeros(8, 4))) is None
