"""Whose output folder it is and where a run starts: one run per folder, cut saves left aside, nothing mixed."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_frozen.errors import CheckpointError, ConfigError
from megatron_frozen.lora import LoraConfig
from megatron_frozen.testing import run_ranks
from megatron_frozen.train.config import TrainConfig
from megatron_frozen.train.job import train
from megatron_frozen.train.run_folder import FolderClaim, find_start, identity, print_summary
from tests.unit.train_job_toy import losses, toy_config


@pytest.fixture(scope="module")
def run(tmp_path_factory: Any) -> TrainConfig:
    """A finished run of four steps with checkpoints at 2 and 4. Tests copy what they change."""
    config = toy_config(tmp_path_factory.mktemp("run"), save_every=2, sample_max_new_tokens=1)
    train(config)
    return config


def copy_of(run: TrainConfig, folder: Path) -> TrainConfig:
    shutil.copytree(run.output_dir, folder)
    return dataclasses.replace(run, output_dir=str(folder))


def test_new_and_empty_folders_start_at_the_beginning(run, tmp_path):
    for folder in (tmp_path / "new", tmp_path):
        assert find_start(dataclasses.replace(run, output_dir=str(folder))).resume_from is None


def test_finished_run_shows_its_summary_and_trains_nothing(run, tmp_path, capsys):
    copy = copy_of(run, tmp_path / "copy")
    before = sorted((path, path.stat().st_mtime_ns) for path in Path(copy.output_dir).rglob("*"))
    train(copy)
    shown = capsys.readouterr().out
    assert "this run is finished; raise max_steps to go on" in shown
    assert "held-out loss: " in shown
    assert f"result: {run.output_dir}/adapter\ntry it: " in shown
    assert sorted((path, path.stat().st_mtime_ns) for path in Path(copy.output_dir).rglob("*")) == before


@pytest.mark.parametrize("lora", [LoraConfig(), None])
def test_summary_ends_with_a_command_that_works_here(run, tmp_path, capsys, monkeypatch, lora):
    config = dataclasses.replace(run, model="my model", lora=lora)
    summary = {"step": 1, "loss_after": None, "question": None, "result": "runs/it"}
    model = "--model 'my model' --adapter runs/it" if lora else "--model runs/it"
    program = tmp_path / "venv/bin/megatron-frozen"
    program.parent.mkdir(parents=True)
    monkeypatch.setattr(sys, "executable", str(program.with_name("python")))
    for folder, command in (
        (tmp_path, "venv/bin/python -m megatron_frozen"),
        (tmp_path, "venv/bin/megatron-frozen"),
        (program.parent, str(program)),
        (Path(run.output_dir), str(program)),
    ):
        monkeypatch.chdir(folder)
        print_summary(summary, config)
        shown = capsys.readouterr().out.splitlines()
        assert shown == [
            "finished after 1 step",
            "result: runs/it",
            f'try it: {command} generate {model} --prompt "..."',
        ]
        program.touch()


def resumed(rank: int, world_size: int, config: TrainConfig) -> str:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        train(config)
    return said.getvalue()


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_other_masks_on_another_number_of_ranks_are_told_where_there_are_masks(tmp_path, dropout):
    config = toy_config(
        tmp_path, max_steps=1, lora=LoraConfig(r=4, dropout=dropout), eval_data=None, sample_max_new_tokens=0
    )
    train(config)
    first, second = run_ranks(2, resumed, dataclasses.replace(config, max_steps=2))
    assert "resuming from" in first
    assert ("so dropout starts a new random order" in first) == (dropout > 0)
    assert second == ""


def test_waits_are_announced_and_one_row_is_one(tmp_path, capsys):
    config = toy_config(tmp_path, max_steps=1)
    Path(config.train_data).write_text(Path(config.train_data).read_text().splitlines()[0])
    train(config)
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "loading the model"
    assert "in 1 row of 64 tokens" in said[2]
    assert said.count("evaluating") == said.count("answering the sample") == 2
    train(dataclasses.replace(config, output_dir=str(tmp_path / "bare"), eval_data=None, sample_max_new_tokens=0))
    assert {"evaluating", "answering the sample"}.isdisjoint(capsys.readouterr().err.splitlines())


def test_folder_of_a_job_that_runs_is_refused(run, tmp_path):
    copy = dataclasses.replace(copy_of(run, tmp_path / "copy"), max_steps=6)
    new = dataclasses.replace(run, output_dir=str(tmp_path / "new"))
    claim = FolderClaim(copy.output_dir)
    claim.take()
    claim.take()
    before = sorted(path.name for path in Path(copy.output_dir).rglob("*"))
    with pytest.raises(ConfigError, match="is in use by another job; wait until that ends, or give another one"):
        train(copy)
    assert sorted(path.name for path in Path(copy.output_dir).rglob("*")) == before
    claim.close()
    train(copy)
    FolderClaim(new.output_dir).take()  # nothing there to hold
    assert not Path(new.output_dir).exists()


def test_more_steps_go_on_from_the_newest_checkpoint(run, tmp_path, capsys):
    copy = dataclasses.replace(copy_of(run, tmp_path / "copy"), max_steps=6)
    train(copy)
    assert f"resuming from {copy.output_dir}/checkpoints/step_00000004" in capsys.readouterr().out
    assert losses(copy)[:4] == losses(run)
    assert len(losses(copy)) == 6
    assert losses(copy, kind="eval")[:2] == losses(run, kind="eval")


def test_cut_checkpoint_is_left_aside_and_said(run, tmp_path, capsys):
    copy = copy_of(run, tmp_path / "copy")
    last = Path(copy.output_dir, "checkpoints/step_00000004")
    weights = last / "adapter/adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    start = find_start(copy)
    assert start.resume_from == last.with_name("step_00000002")
    assert start.messages[0] == f"{last} is not complete (its save was cut short), it is left aside"
    (last / "complete.json").unlink()
    assert find_start(copy).resume_from == last.with_name("step_00000002")
    train(copy)  # the cut folder is written anew
    assert "is not complete" in capsys.readouterr().out
    assert losses(copy) == losses(run)
    assert (last / "adapter/adapter_model.safetensors").read_bytes() == Path(
        run.output_dir, "checkpoints/step_00000004/adapter/adapter_model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize(
    "name", ["adapter/adapter_model.safetensors", "adapter/adapter_config.json", "optimizer.safetensors", "state.json"]
)
def test_junk_of_the_same_size_in_a_checkpoint_is_named_with_the_way_out(run, tmp_path, name):
    copy = dataclasses.replace(copy_of(run, tmp_path / "copy"), max_steps=6)
    last = Path(copy.output_dir, "checkpoints/step_00000004")
    (last / name).write_bytes(b"x" * (last / name).stat().st_size)
    with pytest.raises(CheckpointError) as caught:
        train(copy)
    assert str(last / name) in str(caught.value)
    assert str(caught.value).endswith(f"; to go on from an older checkpoint, remove the folder {last}")
    shutil.rmtree(last)
    assert find_start(copy).resume_from == last.with_name("step_00000002")


def test_run_without_any_checkpoint_starts_again(run, tmp_path):
    copy = copy_of(run, tmp_path / "copy")
    shutil.rmtree(Path(copy.output_dir, "checkpoints"))
    start = find_start(copy)
    assert start.resume_from is None
    assert start.messages == (f"{copy.output_dir} holds no complete checkpoint, starting at step 0",)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"resume": "never"}, "holds another run and resume is never; give another one, or resume=auto to go on"),
        ({"seed": 1}, "belongs to another run: seed is 0 there and 1 here; give another output_dir"),
        ({"lora": LoraConfig(r=2)}, "belongs to another run: lora.r is 4 there and 2 here;"),
        ({"lora": None}, "lora is set there and None here"),
        ({"dtype": "bf16"}, "dtype is 'fp32' there and 'bf16' here"),
        ({"max_steps": 3}, "max_steps is 3 and "),
    ],
)
def test_folder_of_another_run_is_refused(run, changes, message):
    with pytest.raises(ConfigError) as caught:
        find_start(dataclasses.replace(run, **changes))
    assert message in str(caught.value)


def test_data_and_model_are_the_same_anywhere_and_others_are_another_run(run, tmp_path):
    data, model = shutil.copy(run.train_data, tmp_path), shutil.copytree(run.model, tmp_path / "base")
    moved = dataclasses.replace(run, train_data=str(data), model=str(model))
    assert find_start(moved).summary is not None
    weights = model / "model.safetensors"
    original = weights.read_bytes()
    weights.write_bytes(original[:-4] + bytes(4))
    with pytest.raises(ConfigError, match="the content of model has changed"):
        find_start(moved)
    weights.write_bytes(original)
    Path(data).write_text(Path(run.train_data).read_text() * 2)
    with pytest.raises(ConfigError, match="the content of train_data has changed"):
        find_start(moved)


def test_identity_of_a_large_model_reads_a_part_of_it_and_the_demo_model_by_name(run, tmp_path):
    model = shutil.copytree(run.model, tmp_path / "base")
    large = dataclasses.replace(run, model=str(model))
    with (model / "model.safetensors").open("r+b") as file:
        file.truncate(1 << 40)
    assert identity(large) != identity(run)
    assert identity(dataclasses.replace(run, model="demo"))["model_fingerprint"] == "demo"


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_start_that_failed_before_its_first_checkpoint_makes_room_for_another(run, tmp_path, capsys, resume):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.json").write_text('{"seed": 3}')
    (folder / "metrics.jsonl").write_text('{"kind": "train", "step": 1, "loss": 99.0}\n')
    corrected = dataclasses.replace(run, output_dir=str(folder), resume=resume)
    train(corrected)
    assert f"{folder} holds no complete checkpoint, starting at step 0" in capsys.readouterr().out
    assert losses(corrected) == losses(run)
    saved = json.loads((folder / "run.json").read_text())
    assert saved == {"model": run.model, "train_data": run.train_data, **identity(run)}


def test_result_without_a_checkpoint_is_a_run_all_the_same(run, tmp_path):
    copy = copy_of(run, tmp_path / "copy")
    shutil.rmtree(Path(copy.output_dir, "checkpoints"))
    with pytest.raises(ConfigError, match="belongs to another run: seed is 0"):
        find_start(dataclasses.replace(copy, seed=1))


def test_start_killed_while_it_marked_its_folder_makes_room(run, tmp_path):
    (tmp_path / ".run.json.tmp-0123abcd").mkdir()
    assert find_start(dataclasses.replace(run, output_dir=str(tmp_path))).resume_from is None
    (tmp_path / ".hidden").touch()
    with pytest.raises(ConfigError, match="holds other files and no run"):
        find_start(dataclasses.replace(run, output_dir=str(tmp_path)))


def test_parallel_sizes_and_schedule_are_no_part_of_a_run(run):
    free = {
        "tensor_model_parallel_size": 2,
        "micro_batch_size": 3,
        "max_steps": 9,
        "learning_rate": 1.0,
        "save_every": 9,
    }
    assert identity(dataclasses.replace(run, **free)) == identity(run)


def test_folder_of_something_else_is_refused(run, tmp_path):
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(ConfigError, match="holds other files and no run; give a new or empty folder"):
        find_start(dataclasses.replace(run, output_dir=str(tmp_path)))


def test_named_checkpoint_is_checked(run, tmp_path):
    first = f"{run.output_dir}/checkpoints/step_00000002"
    named = dataclasses.replace(run, resume=first, output_dir=str(tmp_path / "new"))
    assert find_start(named).resume_from == Path(first)
    with pytest.raises(CheckpointError, match="is no complete checkpoint; give a folder step_NNNNNNNN that holds"):
        find_start(dataclasses.replace(named, resume=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"the checkpoint .*step_00000002 belongs to another run: seed is 0"):
        find_start(dataclasses.replace(named, seed=5))
    with pytest.raises(ConfigError, match=r"step_00000004 is later than .*step_00000002, so the next resume=auto"):
        find_start(dataclasses.replace(run, resume=first))
