"""The command line in processes of its own, as a user starts it: killed and resumed, wrong, stuck."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from megatron_frozen.lora import LoraConfig
from megatron_frozen.testing import run_ranks
from megatron_frozen.train.config import TrainConfig
from megatron_frozen.train.schema import to_plain
from tests.unit.train_job_toy import run_config, toy_config

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() == 1, reason="torchrun starts two ranks here, which need two GPUs, and there is one"
)
_LIMIT_S = 120
_ENDLESS = 10**7  # steps, which take half a day
_ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
_PROGRAM = [sys.executable, "-m", "megatron_frozen"]
_TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *_PROGRAM[1:]]


@contextlib.contextmanager
def _started(command: list[str], **environment: str) -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env={**_ENVIRONMENT, **environment}) as process:
        try:
            yield process
        finally:
            process.kill()


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, env=_ENVIRONMENT, check=False)


def _config_file(config: TrainConfig) -> str:
    path = Path(config.train_data).with_name("config.yaml")
    path.write_text(yaml.safe_dump(to_plain(config)))
    return str(path)


def _steps(config: TrainConfig) -> list[int]:
    path = Path(config.output_dir, "metrics.jsonl")
    lines = [line for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []
    return [json.loads(line)["step"] for line in lines]


def _wait_for_step(config: TrainConfig, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while max(_steps(config), default=-1) < step:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_run_that_is_killed_goes_on_from_its_last_checkpoint(tmp_path):
    """A run without end until it is killed, however late that is; its rate does not depend on where it ends."""
    lora = LoraConfig(r=4, alpha=8, dropout=0.1)
    config = toy_config(
        tmp_path,
        lora=lora,
        tensor_model_parallel_size=2,
        max_steps=_ENDLESS,
        save_every=5,
        learning_rate=1e-3,
        min_learning_rate_ratio=1.0,
    )
    command = [*_TORCHRUN, "train", _config_file(config)]
    with _started(command) as launcher:
        _wait_for_step(config, 7, launcher)
        children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        os.kill(int(children[-1]), signal.SIGKILL)
        launcher.communicate(timeout=_LIMIT_S)
        assert launcher.returncode != 0
    killed_at = max(_steps(config))
    assert 7 <= killed_at < _ENDLESS
    assert not Path(config.output_dir, "adapter").exists()

    last = killed_at // 5 * 5 + 10
    resumed = _run([*command, f"max_steps={last}"])
    assert resumed.returncode == 0, resumed.stderr
    assert f"resuming from {config.output_dir}/checkpoints/step_000000" in resumed.stdout
    assert f"result: {config.output_dir}/adapter" in resumed.stdout.splitlines()
    straight = dataclasses.replace(config, max_steps=last, output_dir=str(tmp_path / "straight"))
    run_ranks(2, run_config, straight)
    adapters = [load_file(Path(run.output_dir, "adapter/adapter_model.safetensors")) for run in (config, straight)]
    torch.testing.assert_close(adapters[0], adapters[1], rtol=0, atol=0)
    assert _steps(config) == _steps(straight) == [0, *range(1, last + 1), last]
    names = sorted(path.name for path in Path(config.output_dir, "checkpoints").iterdir())
    assert names == [f"step_{step:08d}" for step in (last - 5, last)]


def test_ranks_of_a_launcher_that_is_killed_end_too(tmp_path):
    config = toy_config(tmp_path, tensor_model_parallel_size=2, max_steps=_ENDLESS, eval_data=None)
    with _started([*_TORCHRUN, "train", _config_file(config)]) as launcher:
        _wait_for_step(config, 2, launcher)
        ranks = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        assert len(ranks) == 2
        launcher.kill()
        try:
            launcher.communicate(timeout=_LIMIT_S)  # until no rank holds its end of the pipes any more
        except subprocess.TimeoutExpired:
            for rank in ranks:
                os.kill(int(rank), signal.SIGKILL)
            raise


def test_wrong_config_ends_every_rank_with_one_sentence(tmp_path):
    config = toy_config(tmp_path, tensor_model_parallel_size=2)
    result = _run([*_TORCHRUN, "train", _config_file(config), "learning_rat=1"])
    assert result.returncode != 0
    said = [line for line in result.stderr.splitlines() if line.startswith("megatron-frozen")]
    assert len(said) == 1
    assert "unknown config key 'learning_rat', did you mean 'learning_rate'?" in said[0]
    assert not Path(config.output_dir).exists()


def test_rank_that_does_not_answer_ends_the_others_in_the_time_that_was_set(tmp_path):
    """Nothing is agreed in the middle of a step: the other rank must notice by itself.

    The time also holds for the ranks to meet, so it must leave two processes on a busy machine time to start.
    """
    config = toy_config(
        tmp_path, tensor_model_parallel_size=2, max_steps=_ENDLESS, distributed_timeout_s=15, eval_data=None
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    command = [*_PROGRAM, "train", _config_file(config)]
    with (
        _started(command, RANK="0", LOCAL_RANK="0", **world) as first,
        _started(command, RANK="1", LOCAL_RANK="1", **world) as second,
    ):
        _wait_for_step(config, 2, first)
        second.send_signal(signal.SIGSTOP)
        _, said = first.communicate(timeout=_LIMIT_S)  # not set, the time is 600 s
    assert first.returncode == 1
    assert "megatron-frozen (rank 0): error: another rank is gone or did not answer in time" in said
    assert "Traceback" not in said
