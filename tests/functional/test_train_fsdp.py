"""Whole runs whose weights FSDP cuts over the data-parallel ranks: the curve, result and checkpoints are the same."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_frozen.lora import LoraConfig
from megatron_frozen.testing import run_ranks
from megatron_frozen.train.config import TrainConfig
from megatron_frozen.train.metrics import read_metrics
from tests.unit.train_job_toy import checkpoint_bytes, run_config, toy_config, toy_model

_FULL: dict[str, Any] = {"lora": None, "learning_rate": 1e-4}


def _run(tmp_path: Path, name: str, *, world_size: int = 2, **changes: Any) -> TrainConfig:
    config = toy_config(tmp_path, output_dir=str(tmp_path / name), **changes)
    run_ranks(world_size, run_config, config)
    return config


def _curve(config: TrainConfig) -> list[float]:
    """Every loss and gradient norm of a run, in order."""
    records = read_metrics(Path(config.output_dir, "metrics.jsonl"))
    return [record[key] for record in records for key in ("loss", "grad_norm") if key in record]


def _distance(config: TrainConfig, reference: TrainConfig) -> float:
    actual, expected = _curve(config), _curve(reference)
    assert len(actual) == len(expected) > 8
    return max(abs(a - e) for a, e in zip(actual, expected, strict=True))


def _result(config: TrainConfig) -> dict[str, torch.Tensor]:
    name = "model/model.safetensors" if config.lora is None else "adapter/adapter_model.safetensors"
    return load_file(Path(config.output_dir, name))


_ACCUMULATION = {"gradient_accumulation_steps": 2}
_RECOMPUTED = {"activation_checkpointing": True, "gradient_accumulation_steps": 2}


@pytest.mark.parametrize("changes", [{}, _ACCUMULATION, _RECOMPUTED], ids=["plain", "accumulation", "recomputed"])
def test_adapters_train_bit_equal_on_a_base_that_is_cut(tmp_path, changes):
    lora = LoraConfig(r=4, alpha=8, dropout=0.1)
    runs = [_run(tmp_path, f"fsdp {fsdp}", fsdp=fsdp, lora=lora, **changes) for fsdp in (True, False)]
    assert _distance(*runs) == 0.0
    torch.testing.assert_close(_result(runs[0]), _result(runs[1]), rtol=0, atol=0)


@pytest.mark.parametrize("changes", [_ACCUMULATION, _RECOMPUTED], ids=["accumulation", "recomputed"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_full_fine_tuning_keeps_the_curve(tmp_path, tied, changes):
    toy_config(tmp_path)
    model = str(toy_model(tmp_path / "model", tie_word_embeddings=tied))
    runs = [_run(tmp_path, f"fsdp {fsdp}", fsdp=fsdp, model=model, **_FULL, **changes) for fsdp in (True, False)]
    assert _distance(*runs) <= 1e-5
    trained, expected = (_result(config) for config in runs)
    torch.testing.assert_close(trained, expected, rtol=0, atol=1e-5)
    assert all(tensor.dtype == torch.float32 for tensor in trained.values())


@pytest.mark.parametrize("common", [{"lora": LoraConfig(r=4, alpha=8)}, _FULL], ids=["lora", "full"])
def test_data_and_tensor_parallel_together(tmp_path, common):
    """The vocabulary is padded here, norms have partial gradients, and clipping counts both kinds of shards."""
    both = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "max_grad_norm": 0.5, **common}
    plain = _run(tmp_path, "plain", world_size=2, **{**common, "max_grad_norm": 0.5})
    cut = _run(tmp_path, "cut", world_size=4, fsdp=True, **both)
    assert _distance(cut, plain) <= 1e-5
    torch.testing.assert_close(_result(cut), _result(plain), rtol=0, atol=1e-5)


def test_full_fine_tuning_in_bf16_follows_the_autocast_curve(tmp_path):
    """Only in part the same arithmetic: FSDP casts the residual stream too, and no gradient to bf16."""
    runs = [_run(tmp_path, f"fsdp {fsdp}", fsdp=fsdp, dtype="bf16", **_FULL) for fsdp in (True, False)]
    losses = [[record["loss"] for record in read_metrics(Path(run.output_dir, "metrics.jsonl"))] for run in runs]
    torch.testing.assert_close(losses[0], losses[1], rtol=0, atol=2e-2)


@pytest.mark.parametrize("common", [{"lora": LoraConfig(r=4, alpha=8, dropout=0.1)}, _FULL], ids=["lora", "full"])
def test_resume_is_bit_equal_to_a_straight_run(tmp_path, common):
    straight = toy_config(tmp_path, output_dir=str(tmp_path / "straight"), fsdp=True, save_every=2, **common)
    resume = str(tmp_path / "straight/checkpoints/step_00000002")
    resumed = dataclasses.replace(straight, output_dir=str(tmp_path / "resumed"), resume=resume)
    run_ranks(2, run_config, straight, resumed)
    assert checkpoint_bytes(resumed, 4) == checkpoint_bytes(straight, 4)


def test_checkpoints_hold_full_tensors_for_any_number_of_ranks(tmp_path):
    common = {**_FULL, "save_every": 2, "resume": str(tmp_path / "plain/checkpoints/step_00000002")}
    plain = _run(tmp_path, "plain", world_size=1, **{**common, "resume": "auto"})
    wider = {"tensor_model_parallel_size": 2, "gradient_accumulation_steps": 1, "max_steps": 6}
    cut = _run(tmp_path, "cut", world_size=2, **{**common, "fsdp": True, "max_steps": 6, "micro_batch_size": 1})
    mixed = _run(tmp_path, "mixed", world_size=4, **{**common, **wider, "fsdp": True})
    assert _distance(mixed, cut) <= 1e-5
    last = {**common, "resume": str(tmp_path / "cut/checkpoints/step_00000004"), "max_steps": 6}
    alone = _run(tmp_path, "alone", world_size=1, **{**last, "gradient_accumulation_steps": 2, "fsdp": True})
    torch.testing.assert_close(_curve(alone), _curve(cut)[-len(_curve(alone)) :], rtol=0, atol=1e-5)
    assert _result(alone).keys() == _result(plain).keys()
