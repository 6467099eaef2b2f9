"""The patch on other installs: real copies of the installed megatron-core in which a few lines are changed.

Each runs in a process of its own, which imports the copy in place of the install.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

LAYERS, INFO = "tensor_parallel/layers.py", "package_info.py"
Edits = dict[str, list[tuple[str, str]]]

# The dgrad that megatron-core's main folds since 0.17, and the arguments that it has added by 0.20.
FOLDED_DGRAD = (
    "grad_input = grad_output.matmul(weight)\n\n        if ctx.allreduce_dgrad:\n            # All-reduce. Note",
    "grad_input = grad_output.reshape(-1, weight.size(0)).matmul(weight)\n"
    "        grad_input = grad_input.reshape(*grad_output.shape[:-1], -1)\n\n"
    "        if ctx.allreduce_dgrad:\n            # All-reduce. Note",
)
FOLDED_FORWARD = (
    "ctx.tp_group = tp_group\n        output = torch.matmul(input, weight.t())",
    "ctx.tp_group = tp_group\n"
    "        output = input.reshape(-1, input.size(-1)).matmul(weight.t()).reshape(*input.shape[:-1], -1)",
)
BIAS_GRADIENT = (
    "return grad_input, None, None, None, None\n",
    "return grad_input, None, grad_output.sum((0, 1)), None, None\n",
)
_FROZEN_NAMES = "input, weight, bias, allreduce_dgrad, tp_group"
_LAST_NAMES = "wgrad_deferral_limit,\n        tp_group,\n"
_BODY = '"""Forward."""\n        '
NEWER_ARGUMENTS = [
    (f"def forward(ctx, {_FROZEN_NAMES}):", f"def forward(ctx, {_FROZEN_NAMES}, output_dtype):"),
    ("return grad_input, None, None, None, None\n", "return grad_input, None, None, None, None, None\n"),
    (f"args = [{_FROZEN_NAMES}]", f"args = [{_FROZEN_NAMES}, None]"),
    (f"{_LAST_NAMES}    ):\n", f"{_LAST_NAMES}        gtp_remat_size,\n        output_dtype,\n    ):\n"),
    (f"{_BODY}if gradient", f'{_BODY}assert gtp_remat_size == 1, "upstream gathers"\n        if gradient'),
    (f"{_LAST_NAMES}    ]", f"{_LAST_NAMES}        1,\n        None,\n    ]"),
]


def version(major: int, minor: int) -> tuple[str, list[tuple[str, str]]]:
    return INFO, [("MAJOR = 0\n", f"MAJOR = {major}\n"), ("MINOR = 16\n", f"MINOR = {minor}\n")]


def copy_install(folder: Path, edits: Edits) -> Path:
    """Return a folder to import megatron-core from: links to the installed files, and copies of the edited ones."""
    spec = importlib.util.find_spec("megatron")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    source, target = Path(next(iter(spec.submodule_search_locations))) / "core", folder / "megatron/core"
    for path in source.iterdir():
        place = target / path.name
        place.parent.mkdir(parents=True, exist_ok=True)
        if any(name.startswith(f"{path.name}/") for name in edits):
            place.mkdir()
            for inner in path.iterdir():
                (place / inner.name).symlink_to(inner)
        else:
            place.symlink_to(path)
    for name, changes in edits.items():
        text = (source / name).read_text(encoding="utf-8")
        for before, after in changes:
            assert before in text, before
            text = text.replace(before, after)
        (target / name).unlink()
        (target / name).write_text(text, encoding="utf-8")
    return folder


# Imports the copy, and says what the patch did and what the products of a frozen weight are with it.
SCRIPT = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
from megatron_frozen.diagnostics import Recorder
from megatron_frozen.errors import ConfigError
from megatron_frozen.integrations.megatron_core import is_patched, patch, unpatch
try:
    report = patch()
except ConfigError as error:
    sys.exit(f"{error} (patched: {is_patched()})")
print(report)
from megatron.core.tensor_parallel import layers
assert layers.__file__.startswith(sys.argv[1]), layers.__file__

def run(trains):
    X = torch.arange(126.0).view(3, 6, 7).transpose(0, 1).requires_grad_()
    W, b = torch.arange(35.0).view(5, 7).requires_grad_(trains), torch.ones(5, requires_grad=True)
    linear = layers.linear_with_grad_accumulation_and_async_allreduce if trains else layers.linear_with_frozen_weight
    with Recorder() as seen:
        Y = linear(X, W, b, False, False, False, tp_group=None)
        Y.backward(torch.arange(90.0).view(3, 6, 5).transpose(0, 1))
    assert trains or not seen.count("aten.bmm"), seen.operations
    return Y.detach(), X.grad, W.grad, b.grad

ours = {trains: run(trains) for trains in (False, True)}
unpatch()
function = layers.LinearWithGradAccumulationAndAsyncCommunication
for trains in (False, True):
    X = torch.arange(126.0, dtype=torch.float64).view(3, 6, 7).transpose(0, 1)
    dY = torch.arange(90.0, dtype=torch.float64).view(3, 6, 5).transpose(0, 1)
    W = torch.arange(35.0, dtype=torch.float64).view(5, 7)
    exact = (X @ W.t() + 1, dY @ W, torch.einsum("sbo,sbi->oi", dY, X) if trains else None, dY.sum((0, 1)))
    for mine, theirs in zip(ours[trains], exact):
        assert (mine is None) == (theirs is None)
        assert mine is None or torch.allclose(mine.double(), theirs)
patch()
if "upstream gathers" in open(layers.__file__).read():
    X, W = torch.ones(2, 7, requires_grad=True), torch.ones(5, 7, requires_grad=True)
    try:
        function.apply(X, W, None, False, False, False, None, None, None, 2, None)
    except AssertionError as error:
        print(error)
    Y = function.apply(X.bfloat16(), W.bfloat16(), None, False, False, False, None, None, None, 1, torch.float32)
    Y.sum().backward()
    print(Y.dtype, X.grad.dtype, W.grad.sum().item())
"""


def run_copy(folder: Path, edits: Edits, *, extra: str = "") -> subprocess.CompletedProcess[str]:
    """Run the script with a copy in front of the install; ``extra`` is a module to put beside the copy."""
    place = copy_install(folder, edits)
    if extra:
        (place / f"{extra}.py").write_text("", encoding="utf-8")
    paths = [str(place), *(path for path in sys.path if path)]
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, str(place)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


@pytest.mark.parametrize(("major", "minor"), [(0, 13), (0, 21)])
def test_an_unknown_release_is_refused(major: int, minor: int, tmp_path: Path) -> None:
    name, changes = version(major, minor)
    done = run_copy(tmp_path, {name: changes})
    assert done.returncode == 1, done.stderr
    expected = rf"this patch does not know megatron-core {major}.{minor}.1; it knows 0.14 to 0.20, so install one"
    assert re.search(expected, done.stderr), done.stderr
    assert done.stderr.strip().endswith("leave the patch out (patched: False)")


def test_unknown_arguments_are_refused(tmp_path: Path) -> None:
    edit = (
        "def forward(ctx, input, weight, bias, allreduce_dgrad, tp_group):",
        "def forward(ctx, input, weight, bias, tp_group, allreduce_dgrad):",
    )
    done = run_copy(tmp_path, {LAYERS: [edit]})
    assert done.returncode == 1, done.stderr
    assert (
        "layers.LinearWithFrozenWeight of megatron-core 0.16.1 takes input, weight, bias, tp_group, allreduce_dgrad; "
        "this patch knows input, weight, bias, allreduce_dgrad, tp_group and then output_dtype, so it leaves this "
        "install alone (patched: False)"
    ) in done.stderr


def test_no_megatron_is_told(tmp_path: Path) -> None:
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron/__init__.py").touch()
    paths = [str(tmp_path), *(path for path in sys.path if path)]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1
    assert "megatron-core cannot be imported, megatron.core.package_info failed with ModuleNotFoundError" in done.stderr


def lines_of(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stderr
    return [line.strip().replace("megatron.core.tensor_parallel.layers.", "") for line in done.stdout.splitlines()]


def test_an_upstream_that_does_everything_keeps_its_own(tmp_path: Path) -> None:
    """All but the trainable linear, whose write by our backends replaces one of two; apex serves the deferred one."""
    edits = dict([version(0, 14)]) | {LAYERS: [FOLDED_FORWARD, FOLDED_DGRAD, BIAS_GRADIENT]}
    lines = lines_of(run_copy(tmp_path, edits, extra="fused_weight_gradient_mlp_cuda"))
    assert [line for line in lines if line.startswith("kept ")] == [
        "kept LinearWithFrozenWeight.forward: folds X by itself",
        "kept LinearWithFrozenWeight.backward: folds dY and gives the bias gradient by itself",
        "kept _grad_accum_fusion_available and megatron.core.utils.drain_embedding_wgrad_compute: apex is there",
    ]
    assert [line.split(":")[0] for line in lines if line.startswith("replaced ")] == [
        "replaced LinearWithGradAccumulationAndAsyncCommunication.forward",
        "replaced LinearWithGradAccumulationAndAsyncCommunication.backward",
    ]


def test_an_upstream_that_folds_the_frozen_dgrad_keeps_that(tmp_path: Path) -> None:
    """The release to come: it folds one product of four, and passes two more arguments."""
    lines = lines_of(run_copy(tmp_path, {LAYERS: [FOLDED_DGRAD, *NEWER_ARGUMENTS], **dict([version(0, 20)])}))
    assert [line for line in lines if line.startswith("kept ")] == [
        "kept LinearWithFrozenWeight.backward: folds dY by itself"
    ]
    assert [line for line in lines if line.startswith("replaced LinearWithFrozenWeight")] == [
        "replaced LinearWithFrozenWeight.forward: folds X for upstream's own product",
        "replaced LinearWithFrozenWeight.backward: adds the bias gradient, no more",
    ]
    assert "upstream gathers" in lines  # its own pair serves generalised tensor parallelism
    assert "torch.float32 torch.float32 70.0" in lines  # and fp32 logits need no Transformer Engine
