"""What is wrong with the data or the environment is said at the start, by every rank, before anything is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_frozen.cli import main
from megatron_frozen.errors import ConfigError, DataError
from megatron_frozen.testing import run_ranks
from megatron_frozen.train.config import TrainConfig
from megatron_frozen.train.job import train
from tests.unit.train_job_toy import run_own_config, toy_config, toy_model

# Two ranks pad it to 320 rows, which hide that the tokenizer's last ones, 319 (" assistant") and 320, are not there.
VOCAB_SIZE = 319


def small_model_config(folder: Path, *, text: str, **changes: Any) -> TrainConfig:
    model = toy_model(folder / "small", vocab_size=VOCAB_SIZE)
    data = folder / "own.jsonl"
    data.write_text(json.dumps({"text": text}))
    return toy_config(folder, **{"model": str(model), "train_data": str(data), "eval_data": None, **changes})


@pytest.mark.parametrize("tp_size", [1, 2])
def test_token_that_the_model_does_not_know(tmp_path, tp_size):
    config = small_model_config(tmp_path, text="yes assistant", tensor_model_parallel_size=tp_size)
    for said in run_ranks(2, run_own_config, [config, config]):
        assert said.startswith(f"DataError: {config.train_data} has the token id 319 (padding included), and the model")
        assert said.endswith("takes ids below 319; put the tokenizer files there that came with its weights")
    assert not Path(config.output_dir).exists()


def test_token_of_a_prompt_that_the_model_does_not_know(tmp_path, capsys):
    config = small_model_config(tmp_path, text="yes", sample_prompt="no assistant")
    with pytest.raises(DataError, match="the sample prompt has the token id 319"):
        train(config)
    assert not Path(config.output_dir).exists()
    assert main(["generate", "--model", config.model, "--prompt", "no assistant"]) == 1
    assert "error: --prompt has the token id 319" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["LINEAR_DGRAD_FP32", "DGRAD_ALLREDUCE_FP32"])
def test_switch_that_is_neither_on_nor_off(tmp_path, monkeypatch, name):
    monkeypatch.setenv(f"MEGATRON_TRUE_ON_POLICY_{name}", "yes")
    config = toy_config(tmp_path)
    with pytest.raises(ConfigError, match=f"environment variable .*{name} is 'yes'; it takes 0 or 1"):
        train(config)
    assert not Path(config.output_dir).exists()
