"""Adapter folders that peft wrote are read as peft reads them, or refused in one sentence with nothing changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from megatron_frozen.io import read_safetensors, write_safetensors
from megatron_frozen.lora import LoraConfig, LoraLinear, apply_lora, load_adapter, lora_parameters
from tests.unit.lora_peft_toys import IDS, loaded, peft_folder, reference_model


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    reference_model().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": r".*\.(o|down)_proj"},
        {"target_modules": "all-linear", "use_rslora": True},
        {"target_modules": ["gate_proj"], "layers_to_transform": 0, "layers_pattern": "layers", "lora_dropout": 0.1},
        {"target_modules": ["lm_head"], "lora_alpha": 3},
    ],
)
def test_a_folder_that_peft_wrote_gives_the_logits_of_peft(
    fields: dict[str, Any], base_folder: Path, tmp_path: Path
) -> None:
    expected = peft_folder(tmp_path, **fields)
    model = load_adapter(loaded(base_folder), tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(model(IDS), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"use_dora": True},
            "adapter_config.json sets use_dora to True, and only empty is supported; train or convert",
        ),
        ({"rank_pattern": {"q_proj": 8}}, "sets rank_pattern to {'q_proj': 8}"),
        ({"alpha_pattern": {"q_proj": 8}}, "sets alpha_pattern to {'q_proj': 8}"),
        ({"bias": "lora_only"}, "sets bias to 'lora_only', and only 'none' is supported"),
        ({"modules_to_save": ["lm_head"]}, "sets modules_to_save to \\['lm_head'\\]"),
        ({"exclude_modules": ["model.layers.0.mlp"]}, "sets exclude_modules to"),
    ],
)
def test_what_is_not_plain_lora_is_refused_by_name(
    fields: dict[str, Any], message: str, base_folder: Path, tmp_path: Path
) -> None:
    peft_folder(tmp_path, target_modules=["q_proj"], **fields)
    assert_refused(tmp_path, base_folder, message)


def assert_refused(folder: Path, base_folder: Path, message: str) -> None:
    """Loading raises the sentence and leaves the model without adapters, and trainable as it was."""
    model = loaded(base_folder)
    with pytest.raises(ValueError, match=message):
        load_adapter(model, folder)
    assert not any(isinstance(module, LoraLinear) for module in model.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())


def _edited(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value != "absent"}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "sets peft_type to 'IA3', and only 'LORA' is supported"),
        ({"init_lora_weights": "pissa"}, "sets init_lora_weights to 'pissa'"),
        ({"use_something_new": True}, "sets use_something_new to True"),
        ({"r": "absent", "lora_alpha": "absent"}, "adapter_config.json has no r, lora_alpha; give a folder that PEFT"),
        ({"target_modules": ["q_proj", "qq_proj"]}, "no module of the model matches LoRA target_modules 'qq_proj'"),
        (
            {"target_modules": ["q_proj", "v_proj"]},
            "has no base_model.model.model.layers.0.self_attn.v_proj.lora_A.weight",
        ),
        (
            {"target_modules": ["v_proj"]},
            "has base_model.*q_proj.lora_A.weight, which is neither.*; give an adapter that was trained on this base",
        ),
        ({"r": 8}, "has.*q_proj.lora_A.weight of shape \\[4, 16\\] where the model needs \\[8, 16\\]"),
        ({"r": -1}, "LoRA rank r must be a whole number"),
    ],
)
def test_a_config_that_does_not_fit_its_tensors_is_one_sentence(
    changes: dict[str, Any], message: str, base_folder: Path, tmp_path: Path
) -> None:
    peft_folder(tmp_path, target_modules=["q_proj"])
    _edited(tmp_path, **changes)
    assert_refused(tmp_path, base_folder, message)


def test_files_that_are_missing_or_broken_are_named(base_folder: Path, tmp_path: Path) -> None:
    assert_refused(tmp_path, base_folder, "holds no adapter_config.json; give a folder that PEFT or save_adapter wrote")
    peft_folder(tmp_path, target_modules=["q_proj"])
    weights = tmp_path / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    assert_refused(tmp_path, base_folder, "is not a whole safetensors file")
    weights.unlink()
    assert_refused(
        tmp_path, base_folder, "holds no adapter_model.safetensors; save the adapter again with PEFT's safe_ser"
    )


def test_base_weights_that_peft_writes_along_must_be_those_of_the_base(base_folder: Path, tmp_path: Path) -> None:
    peft_folder(tmp_path, target_modules=["lm_head"])
    path = tmp_path / "adapter_model.safetensors"
    tensors = read_safetensors(path)
    head = tensors["base_model.model.lm_head.base_layer.weight"]
    assert head.shape == (65, 16)
    write_safetensors(path, {**tensors, "base_model.model.lm_head.base_layer.weight": head.bfloat16()})
    assert lora_parameters(load_adapter(loaded(base_folder), tmp_path))
    write_safetensors(path, {**tensors, "base_model.model.lm_head.base_layer.weight": head + 1})
    assert_refused(tmp_path, base_folder, "has base_model.model.lm_head.base_layer.weight, which is neither")


def test_loading_over_an_adapter_needs_the_same_kind_of_adapter(base_folder: Path, tmp_path: Path) -> None:
    peft_folder(tmp_path, target_modules=["q_proj"])
    model = apply_lora(loaded(base_folder), LoraConfig(r=4, alpha=8, target_modules=["q_proj"]))
    load_adapter(model, tmp_path)
    assert lora_parameters(model)[1].any()
    other = apply_lora(loaded(base_folder), LoraConfig(r=4, alpha=16, target_modules=["q_proj"]))
    before = [parameter.detach().clone() for parameter in lora_parameters(other)]
    with pytest.raises(ValueError, match="has r=4 and scale 4 on 1 layers here, and r=4 and scale 2 on 1 in the f"):
        load_adapter(other, tmp_path)
    assert all(torch.equal(old, new) for old, new in zip(before, lora_parameters(other), strict=True))


def test_a_bf16_file_becomes_fp32_parameters(base_folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = reference_model().bfloat16()
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(model, config, autocast_adapter_dtype=False).save_pretrained(str(tmp_path))
    assert read_safetensors(tmp_path / "adapter_model.safetensors").popitem()[1].dtype == torch.bfloat16
    model = load_adapter(loaded(base_folder, dtype=torch.bfloat16), tmp_path)
    assert {parameter.dtype for parameter in lora_parameters(model)} == {torch.float32}
