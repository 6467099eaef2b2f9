"""Whole runs at several parallel sizes: neither the cut over ranks nor a resume changes a curve."""

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
from tests.unit.train_job_toy import checkpoint_bytes, losses, run_config, toy_config


def _runs(tmp_path: Path, cuts: dict[str, tuple[int, dict[str, Any]]], **common: Any) -> dict[str, TrainConfig]:
    """One run per cut: name to (number of ranks, changes of the config)."""
    configs = {}
    for name, (world_size, changes) in cuts.items():
        configs[name] = toy_config(tmp_path, output_dir=str(tmp_path / name), **{**common, **changes})
        run_ranks(world_size, run_config, configs[name])
    return configs


def _assert_same_curves(configs: dict[str, TrainConfig], *, tolerance: float) -> None:
    (_, reference), *others = configs.items()
    for name, config in others:
        for kind in ("train", "eval"):
            expected, actual = losses(reference, kind=kind), losses(config, kind=kind)
            assert len(actual) == len(expected) > 1
            difference = max(abs(a - e) for a, e in zip(actual, expected, strict=True))
            assert difference <= tolerance, f"{name}, {kind}: {difference}"


def _assert_same_result(configs: dict[str, TrainConfig], *, tolerance: float) -> None:
    (_, reference), *others = configs.items()
    expected = load_file(Path(reference.output_dir, "adapter", "adapter_model.safetensors"))
    for _, config in others:
        actual = load_file(Path(config.output_dir, "adapter", "adapter_model.safetensors"))
        torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


_TP = {
    "tp1": (1, {}),
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "tp2-sp": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "tp3": (3, {"tensor_model_parallel_size": 3}),
}


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-5), ("bf16", 2e-2)])
def test_tensor_parallel_size_does_not_change_the_curve(tmp_path, dtype, tolerance):
    configs = _runs(tmp_path, _TP, dtype=dtype, max_steps=5, packing=True)
    _assert_same_curves(configs, tolerance=tolerance)
    curve = losses(configs["tp3"], kind="eval")
    assert curve[-1] < curve[0] - 0.1


def test_cut_of_a_step_does_not_change_it(tmp_path):
    cuts = {
        "one batch": (1, {"micro_batch_size": 2}),
        "accumulation": (1, {"gradient_accumulation_steps": 2}),
        "dp2": (2, {}),
        "dp2 x tp2": (4, {"tensor_model_parallel_size": 2}),
    }
    configs = _runs(tmp_path, cuts)
    _assert_same_curves(configs, tolerance=1e-5)
    _assert_same_result(configs, tolerance=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-5), ("bf16", 2e-2)])
def test_full_fine_tuning_does_not_depend_on_tensor_parallel_size(tmp_path, dtype, tolerance):
    # A small rate: Adam makes a whole step of a gradient that is rounding alone.
    cuts = {name: _TP[name] for name in ("tp1", "tp2-sp")}
    configs = _runs(tmp_path, cuts, lora=None, learning_rate=1e-4, dtype=dtype)
    _assert_same_curves(configs, tolerance=tolerance)
    curve = losses(configs["tp1"], kind="eval")
    assert curve[-1] < curve[0]
    trained = load_file(Path(configs["tp2-sp"].output_dir, "model", "model.safetensors"))
    start = load_file(Path(configs["tp2-sp"].model, "model.safetensors"))
    assert trained.keys() == start.keys()
    assert all(tensor.dtype == torch.float32 for tensor in trained.values())
    assert all(not torch.equal(tensor, start[name]) for name, tensor in trained.items())


def test_recomputing_activations_changes_nothing(tmp_path):
    common = {"lora": LoraConfig(r=4, alpha=8, dropout=0.1), "tensor_model_parallel_size": 2}
    cuts = {name: (2, {"activation_checkpointing": name == "recomputed"}) for name in ("kept", "recomputed")}
    configs = _runs(tmp_path, cuts, **common)
    _assert_same_curves(configs, tolerance=0.0)
    _assert_same_result(configs, tolerance=0.0)


@pytest.mark.parametrize("world_size", [1, 2])
def test_resume_is_bit_equal_to_a_straight_run(tmp_path, world_size):
    lora = LoraConfig(r=4, alpha=8, dropout=0.1)
    common = {"lora": lora, "tensor_model_parallel_size": world_size, "save_every": 2, "eval_every": 3}
    straight = toy_config(tmp_path, output_dir=str(tmp_path / "straight"), **common)
    resumed = dataclasses.replace(
        straight, output_dir=str(tmp_path / "resumed"), resume=str(tmp_path / "straight/checkpoints/step_00000002")
    )
    run_ranks(world_size, run_config, straight, resumed)
    expected, actual = checkpoint_bytes(straight, 4), checkpoint_bytes(resumed, 4)
    assert set(actual) == {
        "adapter/adapter_config.json", "adapter/adapter_model.safetensors", "optimizer.safetensors",
        "random.safetensors", "state.json", "complete.json",
    }  # fmt: skip
    for name, content in expected.items():
        assert actual[name] == content, name
    state = load_file(Path(resumed.output_dir, "checkpoints/step_00000004/optimizer.safetensors"))
    assert {float(value) for name, value in state.items() if name.endswith(".step")} == {4.0}
    # Control: dropout draws, so that a resume that forgot the random state would show.
    first = load_file(tmp_path / "straight/checkpoints/step_00000002/random.safetensors")
    last = load_file(tmp_path / "straight/checkpoints/step_00000004/random.safetensors")
    assert not torch.equal(first["rank_0.cpu"], last["rank_0.cpu"])


@pytest.mark.parametrize("lora", [LoraConfig(r=4, alpha=8), None], ids=["lora", "full"])
def test_resume_at_another_size_keeps_the_curve(tmp_path, lora):
    common = {"lora": lora, "learning_rate": 1e-4, "save_every": 2}
    straight = toy_config(tmp_path, output_dir=str(tmp_path / "straight"), **common)
    run_ranks(1, run_config, straight)
    wider = dataclasses.replace(
        straight,
        output_dir=str(tmp_path / "wider"),
        resume=str(tmp_path / "straight/checkpoints/step_00000002"),
        tensor_model_parallel_size=3,
    )
    run_ranks(3, run_config, wider)
    torch.testing.assert_close(losses(wider), losses(straight)[2:], rtol=0, atol=1e-5)
    longer = dataclasses.replace(straight, max_steps=5)
    last = str(tmp_path / "wider/checkpoints/step_00000004")
    narrower = dataclasses.replace(longer, output_dir=str(tmp_path / "narrower"), resume=last)
    run_ranks(1, run_config, narrower)
    run_ranks(1, run_config, longer)
    torch.testing.assert_close(losses(narrower), losses(longer)[4:], rtol=0, atol=1e-5)
