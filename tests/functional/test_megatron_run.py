"""`megatron-frozen run`: a launcher that knows nothing of the patch, alone and under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_frozen.cli import main
from megatron_frozen.errors import ConfigError
from megatron_frozen.integrations.megatron_core.launching import run_script

ROOT = Path(__file__).resolve().parents[2]

LAUNCHER = """
import os, pickle, sys, warnings
warnings.simplefilter("ignore")
import torch
import torch.distributed as dist
import beside

class Kept:
    pass

pickle.loads(pickle.dumps(Kept()))  # found by name in __main__
if "fail" in sys.argv:
    raise ValueError("the launcher's own error")
if "exit" in sys.argv:
    sys.exit(7)
torch.cuda.current_device = lambda: "cpu"
dist.init_process_group("gloo")
from megatron.core import ModelParallelConfig, parallel_state, tensor_parallel
from megatron_frozen.diagnostics import Recorder

parallel_state.initialize_model_parallel(dist.get_world_size())
config = ModelParallelConfig(tensor_model_parallel_size=dist.get_world_size(), use_cpu_initialization=True)
torch.manual_seed(0)
layer = tensor_parallel.ColumnParallelLinear(4, 6, config=config, init_method=torch.nn.init.xavier_normal_)
layer.weight.requires_grad_(False)
X = torch.ones(3, 2, 4, requires_grad=True)
Y, _ = layer(X)
with Recorder() as seen:
    Y.backward(torch.ones(2, 3, Y.shape[-1]).transpose(0, 1))
learns = layer.bias.grad is not None
line = f"{__name__} {sys.argv[1:]} {beside.VALUE} bmm {seen.count('aten.bmm')} bias {learns}"
print(line + "\\n", end="", flush=True)  # one write, or the ranks' pieces mix
dist.destroy_process_group()  # whose threads may else end the process with SIGABRT
"""


@pytest.fixture
def launcher(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text("VALUE = 'beside'\n")
    script = tmp_path / "launcher.py"
    script.write_text(LAUNCHER)
    return script


def start(*arguments: str | Path, num_ranks: int = 0, patch: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own, or in each of ``num_ranks`` that torchrun starts."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "MEGATRON_FROZEN_PATCH")
    env = {key: value for key, value in os.environ.items() if key not in names}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if patch is not None:
        env["MEGATRON_FROZEN_PATCH"] = patch
    launch = [sys.executable]
    if num_ranks:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    return subprocess.run(
        [*launch, "-m", "megatron_frozen", "run", *map(str, arguments)],
        env=env, capture_output=True, text=True, check=False, timeout=180,
    )  # fmt: skip


def lines_of(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stdout.splitlines() if line.startswith("__main__")]


def test_under_torchrun_each_rank_is_patched(launcher: Path) -> None:
    done = start(launcher, "--lr", "-m", "x", num_ranks=2, patch="1")
    assert done.returncode == 0, done.stderr
    assert lines_of(done) == ["__main__ ['--lr', '-m', 'x'] beside bmm 0 bias True"] * 2
    assert done.stderr.count("megatron-frozen patched megatron-core 0.16.1:") == 1  # rank 0 speaks for all
    assert "replaced megatron.core.tensor_parallel.layers.LinearWithFrozenWeight.backward: folds dY" in done.stderr


def test_a_switch_in_the_environment_leaves_it_out(launcher: Path) -> None:
    done = start(launcher, num_ranks=1, patch="0")
    assert done.returncode == 0, done.stderr
    assert lines_of(done) == ["__main__ [] beside bmm 1 bias False"]
    assert "megatron-frozen patched" not in done.stderr


def test_a_module_runs_as_python_m_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "launch"
    package.mkdir()
    (package / "__init__.py").touch()
    text = "import sys\nfrom launch import there\nprint(__name__, __package__, there.X, sys.argv[1:])\n"
    (package / "__main__.py").write_text(text)
    (package / "there.py").write_text("X = 3\n")
    monkeypatch.chdir(tmp_path)
    done = start("-m", "launch", "--help", patch="0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["__main__ launch 3 ['--help']"]


def test_errors_and_exit_codes_are_the_launchers(launcher: Path) -> None:
    done = start(launcher, "fail", patch="0")
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("ValueError: the launcher's own error")
    assert f'File "{launcher}", line' in done.stderr
    assert "megatron-frozen: error" not in done.stderr
    assert start(launcher, "exit", patch="0").returncode == 7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "run got nothing to run; give it a script or -m and a module, and their arguments"),
        (["-m"], "run got '-m'; give it a script or -m and a module"),
        (["--x", "y"], "run got '--x y'; give it a script"),
        (["-m", "nowhere.there"], "run was told to run the module nowhere.there, which is not here; put its folder"),
        (["-m", ".there"], "run was told to run the module .there, which is not here"),
        (["nowhere.py"], "run was told to run nowhere.py, which is no file here; give the path of a Python script"),
    ],
)
def test_wrong_usage(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        run_script(arguments)
    assert str(caught.value).startswith(message)
    assert main(["run", *arguments]) == 2
    assert capsys.readouterr().err == f"megatron-frozen: error: {caught.value}\n"


def test_the_switch_takes_0_and_1(launcher: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_FROZEN_PATCH", "yes")
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(ConfigError, match="MEGATRON_FROZEN_PATCH is 'yes'; it takes 0 or 1"):
        run_script([str(launcher)])


def test_help_is_the_commands_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["run", "--help"])
    assert stopped.value.code == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "megatron-frozen run SCRIPT [ARGUMENT ...] | -m MODULE [ARGUMENT ...]" in printed
    assert "MEGATRON_FROZEN_PATCH=0 in the environment leaves the patch out" in printed
