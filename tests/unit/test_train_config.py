"""The config: strict, checked as a whole, and each refusal says what to do."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch
import yaml

from megatron_frozen.errors import ConfigError
from megatron_frozen.lora import LoraConfig
from megatron_frozen.train.config import TrainConfig, check_inputs, check_world, load_config
from megatron_frozen.train.schema import build, to_plain
from megatron_frozen.train.yaml_file import parse_yaml
from tests.unit.train_job_toy import toy_config

REQUIRED = {"model": "m", "output_dir": "o", "train_data": "t", "max_steps": 3}


def config_file(folder: Path, text: str | None = None, **values: object) -> Path:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({**REQUIRED, **values}) if text is None else text)
    return path


def test_file_and_overrides_become_a_config(tmp_path):
    path = config_file(tmp_path, lora={"r": 4, "target_modules": ["q_proj"]}, learning_rate="2e-4")
    config = load_config(
        path, overrides=["lora.r=8", "max_steps=9", "lora.dtype=bf16", "resume=never", "eval_data=e=1"]
    )
    assert config.lora == LoraConfig(r=8, target_modules=["q_proj"], dtype=torch.bfloat16)
    assert (config.max_steps, config.resume, config.learning_rate, config.eval_data) == (9, "never", 2e-4, "e=1")
    assert load_config(path, overrides=["lora=null"]).lora is None
    assert load_config(path, overrides=["lora=null", "lora.r=2"]).lora == LoraConfig(r=2)
    assert load_config(path, overrides=["lora.target_modules='.*q_proj'"]).lora == LoraConfig(
        r=4, target_modules=".*q_proj"
    )


def test_config_survives_json():
    config = TrainConfig(
        model="m", output_dir="o", train_data="t", max_steps=1, lora=LoraConfig(layers_to_transform=[0, 2])
    )
    assert build(TrainConfig, json.loads(json.dumps(to_plain(config)))) == config


def test_config_cannot_be_changed():
    config = TrainConfig(model="m", output_dir="o", train_data="t", max_steps=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["learning_rat=1"], "unknown config key 'learning_rat', did you mean 'learning_rate'?; the keys here are"),
        (["lora.rr=1"], "unknown config key 'lora.rr', did you mean 'r'?; the keys here are r, alpha"),
        (["max_steps=2.5"], "the config key 'max_steps' is 2.5, which is not allowed; give a whole number"),
        (["max_steps=true"], "the config key 'max_steps' is True, which is not allowed; give a whole number"),
        (["learning_rate=fast"], "the config key 'learning_rate' is 'fast', which is not allowed; give a number"),
        (["learning_rate=true"], "the config key 'learning_rate' is True, which is not allowed; give a number"),
        (["packing=1"], "the config key 'packing' is 1, which is not allowed; give true or false"),
        (["model=3"], "the config key 'model' is 3, which is not allowed; give a text"),
        (["dtype=fp31"], "is 'fp31', which is not allowed; give one of bf16, fp32, did you mean 'fp32'?"),
        (["lora=3"], "the config key 'lora' is 3, which is not allowed; give a group of keys, or null"),
        (["lora.dtype=int8"], "the config key 'lora.dtype' is 'int8', which is not allowed; give one of bf16, fp32"),
        (["lora.target_modules=3"], "'lora.target_modules' is 3, which is not allowed; give a list, as in [a, b]"),
        (["lora.target_modules=[3]"], "the config key 'lora.target_modules' is 3, which is not allowed; give a text"),
        (["lora.r=0"], "LoRA rank r must be a whole number of at least 1, got 0"),
        (["max_steps=0"], "the config key 'max_steps' is 0; give 1 or more"),
        (["learning_rate=.nan"], "the config key 'learning_rate' is nan; give 0.0 or more"),
        (["learning_rate=.inf"], "the config key 'learning_rate' is inf; give a number below inf"),
        (["weight_decay=1" + "0" * 400], "the config key 'weight_decay' is 1000"),
        (["adam_epsilon=0"], "the config key 'adam_epsilon' is 0, which makes 0 / 0 of a gradient that is zero"),
        ([f"seed={2**40}"], f"the config key 'seed' is {2**40}; give a number below {2**40}"),
        (["distributed_timeout_s=100000000"], "'distributed_timeout_s' is 100000000; give a number below 100000000"),
        (["lora.dtype=[bf16]"], "the config key 'lora.dtype' is ['bf16'], which is not allowed; give one of bf16"),
        (["model=\"\\0\""], "the config key 'model' is '\\x00', which is not allowed; give a text without NUL"),
        (["sample_prompt=\"\\ud800\""], "which is not allowed; give a text without NUL and without half characters"),
        (["max_steps=2020-13-45"], "the override 'max_steps=2020-13-45': this is no valid YAML (month must be in"),
        (["adam_beta2=1.0"], "the config key 'adam_beta2' is 1.0; give a number below 1.0"),
        (["min_learning_rate_ratio=1.5"], "'min_learning_rate_ratio' is 1.5; give a number from 0 to 1"),
        (["max_grad_norm=0"], "the config key 'max_grad_norm' is 0, which stops all learning; null means no"),
        (["sequence_parallel=true"], "sequence_parallel is true with tensor_model_parallel_size 1; it needs"),
        (
            ["sequence_parallel=true", "tensor_model_parallel_size=3"],
            "seq_length 512 does not divide by tensor_model_parallel_size 3, which sequence_parallel needs",
        ),
        (["max_steps"], "the override 'max_steps' is not of the form key=value, as in max_steps=10 or lora.r=8"),
        (["max_steps=["], "the override 'max_steps=[', line 1: this is no valid YAML"),
    ],
)  # fmt: skip
def test_wrong_value_is_refused_in_one_sentence(tmp_path, overrides, message):
    with pytest.raises(ConfigError) as caught:
        load_config(config_file(tmp_path), overrides=overrides)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "model: m\noutput_dir: o\ntrain_data: t\n",
            "the config key 'max_steps' is missing; add it to the file",
        ),
        ("? [a, b]\n: c\n", "config.yaml, line 1: this is no valid YAML (found unhashable key)"),
        ("seed: " + "[" * 5000, "config.yaml: this is no valid YAML (maximum recursion depth exceeded"),
        ("just words", "holds no `key: value` lines; see examples/lora_smollm2.yaml"),
        ("model: m\nseed: 1\nseed: 2\n", "config.yaml, line 3: the key 'seed' is given a second time; keep one"),
        ("model: m\n  seed: [1\n", "config.yaml, line 2: this is no valid YAML (mapping values are not allowed here)"),
    ],
)
def test_wrong_file_is_refused_in_one_sentence(tmp_path, text, message):
    with pytest.raises(ConfigError) as caught:
        load_config(config_file(tmp_path, text))
    assert message in str(caught.value)


def test_yaml_merge_keys_work():
    text = "seed: 1\nlora: &small {r: 4, alpha: 8}\nother: {<<: *small, r: 2}\n"
    assert parse_yaml(text, source="x")["other"] == {"r": 2, "alpha": 8}


def test_missing_and_binary_files_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no\.yaml cannot be read \(No such file or directory\)"):
        load_config(tmp_path / "no.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"binary\.yaml cannot be read \(it is not UTF-8 text\)"):
        load_config(tmp_path / "binary.yaml")


def test_yaml_cannot_run_code():
    with pytest.raises(ConfigError, match="no valid YAML"):
        parse_yaml("!!python/object/apply:os.getcwd []", source="x")


def test_inputs_are_looked_at_before_anything_starts(tmp_path):
    config = toy_config(tmp_path)
    check_inputs(config)
    (tmp_path / "file").touch()
    for changes, message in [
        ({"train_data": "nowhere.jsonl"}, "train_data: there is no file nowhere.jsonl; give the path of a JSONL file"),
        ({"eval_data": str(tmp_path)}, "eval_data: there is no file"),
        ({"model": str(tmp_path)}, "is no Hugging Face checkpoint folder (it has no config.json); give such a folder"),
        ({"output_dir": str(tmp_path / "file")}, "is a file; give a folder"),
        ({"tensor_model_parallel_size": 4}, "4"),
    ]:
        with pytest.raises(ConfigError) as caught:
            check_inputs(dataclasses.replace(config, **changes))
        assert message in str(caught.value)
    check_inputs(dataclasses.replace(config, model="demo"))


def test_missing_library_is_told_at_the_start(tmp_path, monkeypatch):
    config = toy_config(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match="training needs matplotlib, which is not installed; pip install"):
        check_inputs(config)
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ConfigError, match="a config needs pyyaml, which is not installed; pip install"):
        parse_yaml("a: 1", source="x")


def test_ranks_must_divide_into_tensor_parallel_groups(tmp_path):
    config = toy_config(tmp_path, tensor_model_parallel_size=2)
    check_world(config, world_size=4)
    with pytest.raises(
        ConfigError, match=r"3 rank\(s\) were started for tensor_model_parallel_size 2; start a multiple of 2"
    ):
        check_world(config, world_size=3)


def test_the_example_is_valid():
    config = load_config("examples/lora_smollm2.yaml")
    assert (config.model, config.tensor_model_parallel_size) == ("demo", 3)
