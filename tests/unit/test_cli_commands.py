"""The command line: bad input gets one sentence and an exit code, the commands do what they say."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import io
import json
import runpy
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from megatron_frozen import cli
from megatron_frozen.checkpoint.train_state import checkpoint_name
from megatron_frozen.cli import console_main, main
from megatron_frozen.errors import ConfigError, ParallelError
from megatron_frozen.lora import LoraConfig
from megatron_frozen.testing import run_ranks
from megatron_frozen.train.config import TrainConfig
from megatron_frozen.train.job import train
from megatron_frozen.train.launch import parallel_ranks
from megatron_frozen.train.schema import to_plain
from tests.unit.train_job_toy import toy_config, toy_model


@pytest.fixture(scope="module")
def run(tmp_path_factory: Any) -> TrainConfig:
    """A finished run; tests only read it."""
    config = toy_config(tmp_path_factory.mktemp("run"), max_steps=6, learning_rate=5e-2, sample_max_new_tokens=1)
    train(config)
    return config


def config_file(config: TrainConfig, folder: Path) -> str:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(to_plain(config)))
    return str(path)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit code and the one line on stderr."""
    code = main(arguments)
    progress = ("read ", "encoded ", "loading ")
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith(progress)]
    assert len(lines) == 1, lines
    assert lines[0].startswith("megatron-frozen: error: ")
    return code, lines[0]


def _cut_shard(folder: Path) -> None:
    weights = folder / "base/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def _change_config(folder: Path, **values: Any) -> None:
    path = folder / "base/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def _broken_line(folder: Path) -> None:
    lines = (folder / "train.jsonl").read_text().splitlines()
    (folder / "train.jsonl").write_text("\n".join([*lines[:6], "{broken", *lines[6:]]))


def _other_files(folder: Path) -> None:
    (folder / "run").mkdir()
    (folder / "run/thesis").touch()


BAD_INPUT: dict[str, tuple[Any, list[str], int, str]] = {
    "wrong key": (None, ["max_step=3"], 2, "unknown config key 'max_step', did you mean 'max_steps'?"),
    "no folder": (None, ["model=nowhere"], 2, "nowhere is no Hugging Face checkpoint folder (it has no config.json)"),
    "no data": (None, ["train_data=nowhere.jsonl"], 2, "train_data: there is no file nowhere.jsonl"),
    "model type": (lambda folder: _change_config(folder, model_type="gpt2"), [], 2, "gpt2"),
    "heads": (None, ["tensor_model_parallel_size=4"], 2, "4"),
    "ranks": (None, ["tensor_model_parallel_size=2"], 2, "1 rank(s) were started for tensor_model_parallel_size 2"),
    "cut shard": (_cut_shard, [], 1, "model.safetensors"),
    "no weights": (lambda folder: (folder / "base/model.safetensors").unlink(), [], 1, "safetensors"),
    "no tokenizer": (lambda folder: (folder / "base/tokenizer.json").unlink(), [], 1, "has no tokenizer.json"),
    "broken line": (_broken_line, [], 1, "train.jsonl, line 7: broken JSON"),
    "targets": (None, ["lora.target_modules=[q_prj]"], 2, "q_prj"),
    "no labels": (None, ["seq_length=8"], 1, "no labelled tokens"),
    "other files": (_other_files, [], 2, "holds other files and no run; give a new or empty folder"),
    "no checkpoint": (None, ["resume=nowhere"], 1, "nowhere is no complete checkpoint"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_gets_one_sentence_and_leaves_nothing(name, tmp_path, capsys):
    damage, overrides, code, message = BAD_INPUT[name]
    config = toy_config(tmp_path)
    path = config_file(config, tmp_path)
    if damage is not None:
        damage(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    actual_code, said = refused(capsys, "train", path, *overrides)
    assert message in said
    assert actual_code == code
    assert sorted(tmp_path.rglob("*")) == before


def test_folder_of_another_run_is_refused(run, tmp_path, capsys):
    path = config_file(run, tmp_path)
    code, said = refused(capsys, "train", path, "resume=never")
    assert (code, "holds another run and resume is never" in said) == (2, True)
    code, said = refused(capsys, "train", path, "lora.r=8")
    assert (code, "belongs to another run: lora.r is 4 there and 8 here" in said) == (2, True)


def rank_of_bad_input(rank: int, world_size: int, path: str, overrides: list[str]) -> tuple[int, str]:
    cli._FIRST_RANK_SPEAKS_S = 0.1  # there is no torchrun here that would end a rank which waits
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        code = main(["train", path, overrides[rank]])
    return code, errors.getvalue()


def test_error_of_one_rank_is_an_error_of_all(tmp_path):
    """Row 7 is broken in the file that rank 1 reads; a collective comes next."""
    config = toy_config(tmp_path, tensor_model_parallel_size=2)
    bad = tmp_path / "bad.jsonl"
    lines = Path(config.train_data).read_text().splitlines()
    bad.write_text("\n".join([*lines[:6], "{", *lines[6:]]))
    overrides = ["seed=0", f"train_data={bad}"]
    first, second = run_ranks(2, rank_of_bad_input, config_file(config, tmp_path), overrides)
    assert first[0] == second[0] == 1
    assert f"(rank 0): error: rank 1 failed while reading the data: {bad}, line 7: broken JSON" in first[1]
    assert f"(rank 1): error: {bad}, line 7: broken JSON" in second[1]
    assert not Path(config.output_dir).exists()


def test_error_in_the_first_ranks_own_work_is_an_error_of_all(tmp_path):
    config = toy_config(tmp_path, tensor_model_parallel_size=2)
    Path(config.output_dir, "adapter").mkdir(parents=True)
    Path(config.output_dir, "run.json").write_text("[]")
    overrides = ["seed=0", "seed=0"]
    first, second = run_ranks(2, rank_of_bad_input, config_file(config, tmp_path), overrides)
    assert first[0] == second[0] == 1
    assert "(rank 0): error: " in first[1]
    assert "run.json holds a JSON list" in first[1]
    assert "(rank 1): error: rank 0 failed while reading output_dir: " in second[1]


def test_unwritable_output_is_one_sentence(tmp_path, capsys):
    config = toy_config(tmp_path)
    (tmp_path / "file").touch()
    code, said = refused(capsys, "train", config_file(config, tmp_path), f"output_dir={tmp_path}/file/run")
    assert code == 1
    assert "Not a directory" in said


def test_unexpected_error_shows_its_traceback(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("megatron_frozen.cli.train", lambda _: {}["x"])
    assert main(["train", config_file(toy_config(tmp_path), tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert said.endswith("megatron-frozen: error: KeyError: 'x'\n")


@pytest.mark.parametrize(
    ("raised", "code", "message"),
    [
        (KeyboardInterrupt(), 130, "interrupted; the run goes on from its last checkpoint if started again"),
        (
            RuntimeError("[gloo/pair.cc] Connection closed by peer"),
            1,
            "another rank is gone or did not answer in time; look for its own message, and without one it may have "
            "been killed, as for lack of memory ([gloo/pair.cc] Connection closed by peer)",
        ),
        (ConfigError("x is wrong"), 2, "x is wrong"),
    ],
)
def test_end_of_a_run_is_an_exit_code(tmp_path, capsys, monkeypatch, raised, code, message):
    def stop(_: TrainConfig) -> None:
        raise raised

    monkeypatch.setattr("megatron_frozen.cli.train", stop)
    assert refused(capsys, "train", config_file(toy_config(tmp_path), tmp_path)) == (
        code, f"megatron-frozen: error: {message}",
    )  # fmt: skip


@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0)])
def test_an_interruption_is_said_by_the_first_rank_only(capsys, monkeypatch, rank, lines):
    def stop() -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("megatron_frozen.cli.facts_table", stop)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", rank)
    assert main(["env"]) == 130
    assert capsys.readouterr().err.count("(rank 0): error: interrupted\n") == lines


def test_help_says_what_each_argument_and_default_is():
    choices: Any = cli._parser()._subparsers._group_actions[0].choices  # pyright: ignore[reportOptionalMemberAccess]
    for command in choices.values():
        for action in command._actions:
            assert action.help, action
            if action.default not in (None, False, argparse.SUPPRESS) and action.option_strings:
                assert "default" in action.help, action


def test_version_is_that_of_the_installation(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"megatron-frozen {importlib.metadata.version('megatron-frozen')}\n"


def test_wrong_usage_is_exit_code_2(capsys):
    for arguments in (
        ["trian"],
        [],
        ["generate"],
        ["generate", "--model", "m", "--prompt", "p", "--max-new-tokens", "0"],
    ):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
    assert "0 is not a whole number above 0" in capsys.readouterr().err


class Terminal(io.StringIO):
    """A stdout that a person reads; `parts` is what came each time."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []

    def isatty(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        self.parts.append(text)
        return super().write(text)


def command_on_ranks(rank: int, world_size: int, *arguments: str) -> str:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert main(arguments) == 0
    return said.getvalue()


def test_generate_answers_with_and_without_adapter_and_merge_makes_one_model(run, tmp_path, capsys):
    adapter = f"{run.output_dir}/adapter"
    common = ["--prompt", "no 5", "--max-new-tokens", "5", "--dtype", "fp32"]
    ask = ["generate", "--model", run.model, "--adapter", adapter, *common]
    assert main(ask) == 0
    shown = capsys.readouterr().out
    without, with_adapter = (line.partition(": ")[2] for line in shown.splitlines())
    assert shown.startswith("without adapter: ")
    assert without != with_adapter
    assert run_ranks(2, command_on_ranks, *ask) == [shown, ""]
    growing = Terminal()
    with contextlib.redirect_stdout(growing):
        assert main(ask) == 0
    assert growing.getvalue() == shown
    assert len([part for part in growing.parts if part]) > 4

    merged = [str(tmp_path / f"merged{size}") for size in (1, 2)]
    merge = ["merge", "--model", run.model, "--adapter", adapter, "--dtype", "fp32", "--output"]
    assert main([*merge, merged[0]]) == 0
    run_ranks(2, command_on_ranks, *merge, merged[1])
    first, second = (load_file(Path(folder, "model.safetensors")) for folder in merged)
    torch.testing.assert_close(first, second, rtol=0, atol=1e-6)
    capsys.readouterr()
    assert main(["generate", "--model", merged[0], *common]) == 0
    assert capsys.readouterr().out == f"{with_adapter}\n"
    assert main(["generate", "--model", merged[1], *common, "--temperature", "5", "--seed", "3"]) == 0
    assert capsys.readouterr().out != f"{with_adapter}\n"
    code, said = refused(capsys, *merge, merged[0])
    assert (code, "already holds files" in said) == (1, True)
    code, said = refused(capsys, "generate", "--model", merged[0], *common, "--temperature", "-1")
    assert (code, "--temperature is -1.0; give 0" in said) == (2, True)
    code, said = refused(capsys, "generate", "--model", merged[0], *common, "--adapter", str(tmp_path))
    assert (code, "holds no adapter_config.json" in said) == (1, True)
    code, said = refused(capsys, "merge", "--model", str(tmp_path), "--adapter", adapter, "--output", "x")
    assert (code, "is no Hugging Face checkpoint folder" in said) == (2, True)


def test_base_model_of_a_run_is_untouched_by_the_comparison(run):
    summary = json.loads(Path(run.output_dir, "summary.json").read_text())
    assert summary["loss_after"] < summary["loss_before"]
    assert summary["reference"] == "Hi"
    assert Path(run.output_dir, "checkpoints", checkpoint_name(6)).is_dir()
    assert Path(run.output_dir, "loss.png").read_bytes().startswith(b"\x89PNG")
    assert any(Path(run.output_dir, "tensorboard").iterdir())


def test_env_is_a_table(capsys):
    assert main(["env"]) == 0
    facts = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines() if line)
    assert facts["torch"] == torch.__version__
    assert facts["MEGATRON_TRUE_ON_POLICY_LINEAR_DGRAD_FP32"] == "off"


def test_module_runs_as_a_program(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["megatron-frozen", "env"])
    runpy.run_module("megatron_frozen", run_name="__main__")
    console_main()
    shown = capsys.readouterr().out
    assert shown.count("megatron-frozen ") == 2


def test_no_target_is_found_before_anything_is_written(tmp_path, capsys):
    config = toy_config(tmp_path, lora=LoraConfig(r=4, layers_to_transform=[9]))
    code, said = refused(capsys, "train", config_file(config, tmp_path))
    assert code == 2
    assert "9" in said
    assert not Path(config.output_dir).exists()


def test_weights_that_overflow_end_the_run_with_the_step(tmp_path, capsys):
    config = toy_config(tmp_path, eval_data=None, sample_max_new_tokens=0)
    base = toy_model(tmp_path / "huge")
    weights = load_file(base / "model.safetensors")
    weights["model.norm.weight"].fill_(float("inf"))
    save_file(weights, base / "model.safetensors")
    code, said = refused(capsys, "train", config_file(config, tmp_path), f"model={base}")
    assert code == 1
    assert "step 1: the loss is nan" in said
    assert not Path(config.output_dir, "checkpoints").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--temperature", "nan"], "--temperature is nan; give 0"),
        (["--temperature", "inf"], "--temperature is inf; give 0"),
        (["--seed", "-1"], "--seed is -1; give a whole number from 0 up"),
        (["--prompt", "\udcff"], "--prompt is not UTF-8 text; give it in UTF-8"),
        (["--prompt", ""], "--prompt is empty and this model has no token to start from; give some text"),
    ],
)
def test_generate_refuses_what_it_cannot_use(tmp_path, capsys, more, message):
    folder = toy_model(tmp_path / "base")
    (folder / "chat_template.jinja").unlink()
    code, said = refused(capsys, "generate", "--model", str(folder), "--prompt", "Hi", "--max-new-tokens", "1", *more)
    assert (code, message in said) == (2, True)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "-1"}, "environment variable WORLD_SIZE is '-1'; it takes a whole number"),
        (
            {"WORLD_SIZE": "2"},
            "WORLD_SIZE is 2 and RANK is not set; start the ranks with torchrun",
        ),
        ({"RANK": "1"}, "environment variable RANK is 1 and WORLD_SIZE 1; a rank is below the number of ranks"),
    ],
)
def test_half_of_torchruns_variables_is_an_error(tmp_path, capsys, monkeypatch, variables, message):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    config = toy_config(tmp_path)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    code, said = refused(capsys, "train", config_file(config, tmp_path))
    assert (code, message in said) == (2, True)
    assert not Path(config.output_dir).exists()


def test_ranks_that_do_not_meet_say_so(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        values = {
            "RANK": "0",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(taken.getsockname()[1]),
        }
        for name, value in values.items():
            monkeypatch.setenv(name, value)
        with (
            pytest.raises(ParallelError, match=r"2 ranks did not meet at MASTER_ADDR and MASTER_PORT .*port is free"),
            parallel_ranks(tensor_model_parallel_size=2, timeout_s=2),
        ):
            pass
