"""LoraConfig: its scale, and one sentence for each value that cannot be."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megatron_frozen.errors import ConfigError
from megatron_frozen.lora import LoraConfig


def test_scale_is_alpha_over_r_or_over_its_root() -> None:
    assert LoraConfig(r=4, alpha=8).scale == 2.0
    assert LoraConfig(r=8, alpha=16, use_rslora=True).scale == pytest.approx(5.657, abs=5e-4)


def test_the_defaults_are_all_seven_linears_in_fp32() -> None:
    config = LoraConfig()
    assert len(config.target_modules) == 7
    assert config.dtype is torch.float32


def test_lists_become_tuples_so_that_a_config_can_be_compared_and_kept() -> None:
    config = LoraConfig(target_modules=["q_proj"], layers_to_transform=[1, 2])
    assert (config.target_modules, config.layers_to_transform) == (("q_proj",), (1, 2))
    assert hash(config) == hash(LoraConfig(target_modules=("q_proj",), layers_to_transform=(1, 2)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"r": 0}, "LoRA rank r must be a whole number of at least 1, got 0"),
        ({"r": True}, "LoRA rank r must be a whole number of at least 1, got True"),
        ({"alpha": 0}, "LoRA alpha must be a positive number, got 0"),
        ({"alpha": math.inf}, "LoRA alpha must be a positive number, got inf"),
        ({"dropout": 1.0}, "LoRA dropout must be at least 0 and below 1, got 1.0"),
        ({"init_method": "kaiming"}, "LoRA init_method must be one of kaiming_uniform, xavier_normal, got 'kaiming'"),
        ({"dtype": torch.int8}, "LoRA dtype must be a floating torch.dtype, or None for the base weight's type"),
        ({"dtype": "fp32"}, "LoRA dtype must be a floating torch.dtype, or None for the base weight's type"),
        ({"target_modules": "*"}, "LoRA target_modules is one string, so a regular expression, and '\\*' is none"),
        ({"target_modules": []}, "LoRA target_modules must name at least one linear, such as \\['q_proj', 'v_"),
        (
            {"target_modules": [3]},
            "LoRA target_modules must name at least one linear, such as \\['q_proj', 'v_",
        ),
        ({"layers_to_transform": []}, "LoRA layers_to_transform must list layer numbers counted from 0"),
        ({"layers_to_transform": [-1]}, "LoRA layers_to_transform must list layer numbers counted from 0"),
        ({"layers_to_transform": "01"}, "LoRA layers_to_transform must list layer numbers counted from 0"),
    ],
)
def test_a_value_that_cannot_be_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LoraConfig(**fields)
