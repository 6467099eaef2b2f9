"""Two nodes on one machine: an agent of torchrun each, started by the scripts of examples/."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from megatron_frozen.testing import run_ranks
from megatron_frozen.train.schema import to_plain
from tests.gates.source import ROOT
from tests.unit.train_job_toy import losses, run_config, toy_config

_LIMIT_S = 180
_SCRIPT = ROOT / "examples" / "multi_node.sh"
_BATCH_SCRIPT = ROOT / "examples" / "multi_node.sbatch"
_NUM_GPUS = torch.cuda.device_count()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _node(rank: int, *arguments: str, port: int) -> subprocess.Popen[str]:
    """Start node `rank` of two with two ranks, on GPUs of its own if there are any."""
    environment = {
        **os.environ,
        "NUM_NODES": "2",
        "NODE_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANKS_PER_NODE": "2",
        "PYTHON": sys.executable,
        "OMP_NUM_THREADS": "1",
    }
    if _NUM_GPUS:
        environment["CUDA_VISIBLE_DEVICES"] = f"{2 * rank},{2 * rank + 1}"
    pipe = subprocess.PIPE
    return subprocess.Popen([_SCRIPT, *arguments], cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.skipif(0 < _NUM_GPUS < 4, reason=f"two nodes of two ranks need 4 GPUs, and this machine has {_NUM_GPUS}")
def test_two_nodes_train_as_one_does(tmp_path: Path) -> None:
    """Tensor-parallel within a node, data-parallel across."""
    config = toy_config(tmp_path, tensor_model_parallel_size=2, sequence_parallel=True)
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(to_plain(config)))
    port = _free_port()
    nodes = [_node(rank, str(file), "save_every=2", port=port) for rank in range(2)]
    try:
        said = [node.communicate(timeout=_LIMIT_S) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], said
    assert f"result: {config.output_dir}/adapter" in said[0][0].splitlines()
    assert not said[1][0]  # rank 0 speaks, and it is on the first node
    alone = dataclasses.replace(config, output_dir=str(tmp_path / "alone"))
    run_ranks(4, run_config, alone)
    assert losses(config) == losses(alone)


def test_slurm_script_starts_the_plain_one_on_every_node(tmp_path: Path) -> None:
    """With stand-ins for Slurm's two commands, and echo for Python."""
    (tmp_path / "scontrol").write_text('#!/bin/sh\n[ "$*" = "show hostnames n[1-2]" ] && printf "n1\\nn2\\n"\n')
    (tmp_path / "srun").write_text('#!/bin/sh\nshift\nfor n in 0 1; do SLURM_NODEID=$n "$@" || exit; done\n')
    for name in ("scontrol", "srun"):
        (tmp_path / name).chmod(0o755)
    slurm = {
        "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "123456",
        "SLURM_SUBMIT_DIR": str(ROOT), "PYTHON": "echo", "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }  # fmt: skip
    command = [_BATCH_SCRIPT, "job.yaml", "output_dir=a folder"]
    done = subprocess.run(command, env={**os.environ, **slurm}, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"-m torch.distributed.run --nnodes 2 --node-rank {rank} --nproc-per-node gpu --master-addr n1 "
        "--master-port 23456 -m megatron_frozen train job.yaml output_dir=a folder"
        for rank in range(2)
    ]


def test_plain_script_asks_for_what_it_needs() -> None:
    environment = {name: value for name, value in os.environ.items() if name not in {"NUM_NODES", "NODE_RANK"}}
    done = subprocess.run([_SCRIPT], env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "NUM_NODES: is the number of nodes; set it" in done.stderr
