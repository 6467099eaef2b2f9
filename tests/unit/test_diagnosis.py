"""The diagnosis names what runs batched or copied, where and why; no test here looks at how long something took."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from megatron_frozen.cli import main
from megatron_frozen.diagnostics import Diagnosis, diagnosis
from megatron_frozen.diagnostics.diagnosing import diagnose_script
from megatron_frozen.diagnostics.findings import WORTH_SAYING, Direction, Fault, Finding, text_of
from megatron_frozen.errors import ConfigError
from megatron_frozen.functional import linear_with_frozen_weight

S, B, H, V = 6, 2, 8, 5
FORWARD, DGRAD, WGRAD = Direction.FORWARD, Direction.DGRAD, Direction.WGRAD


class _Unfolded(torch.autograd.Function):
    """A frozen linear whose backward leaves the folding to torch."""

    @staticmethod
    def forward(ctx: Any, X: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return torch.matmul(X, weight.t())

    @staticmethod
    def backward(ctx: Any, dY: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return dY.matmul(*ctx.saved_tensors), None


class Head(nn.Module):
    def __init__(self, multiply: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.multiply = multiply
        generator = torch.Generator().manual_seed(1)
        self.weight = nn.Parameter(torch.randn(V, H, generator=generator), requires_grad=False)

    def forward(self, X: Tensor) -> Tensor:
        return self.multiply(X, self.weight)


class Model(nn.Module):
    """Trainable layers and a frozen head, whose logits [S, B, V] go out as [B, S, V]."""

    def __init__(self, multiply: Callable[[Tensor, Tensor], Tensor] = _Unfolded.apply) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(H, H), nn.Linear(H, H)])
        self.head = Head(multiply)

    def forward(self, X: Tensor) -> Tensor:
        for layer in self.layers:
            X = torch.tanh(layer(X))
        return self.head(X).transpose(0, 1).contiguous()


def step(model: nn.Module, *, run: Callable[..., Tensor] = lambda model, X: model(X)) -> tuple[Tensor, Tensor]:
    X = torch.linspace(-1, 1, S * B * H).view(S, B, H).requires_grad_()
    logits = run(model, X)
    logits.sin().sum().backward()
    assert X.grad is not None
    return logits, X.grad


def found_in(call: Callable[[], object]) -> list[Finding]:
    with Diagnosis() as found:
        call()
    return found.findings


def kinds(findings: list[Finding]) -> set[tuple[str, Direction, Fault]]:
    return {(finding.module, finding.direction, finding.fault) for finding in findings}


def test_a_frozen_heads_dgrad_by_name_layout_and_count() -> None:
    """Megatron-core's fault: dY [S, B, V] that lies as [B, S, V] is one product for each token."""
    model = Model()
    found = found_in(lambda: [step(model) for _ in range(5)])
    assert kinds(found) == {("Model.head", DGRAD, Fault.BATCHED)}
    (finding,) = found
    assert (finding.shape, finding.stride, finding.matrix) == ((S, B, V), (V, S * V, 1), (V, H))
    assert (finding.calls, finding.dtype) == (5, torch.float32)
    assert 0 < finding.folded_s < float("inf")
    assert finding.wasted_s == 5 * (finding.as_run_s - finding.folded_s)


def test_values_do_not_change() -> None:
    plain = step(Model())
    with Diagnosis():
        watched = step(Model())
    assert all(map(torch.equal, plain, watched))


def test_nothing_is_found_in_folded_products() -> None:
    """The same layout through this package, attention's products, and layouts that torch folds."""
    options: dict[str, Any] = {
        "gradient_accumulation_fusion": False,
        "allreduce_dgrad": False,
        "sequence_parallel": False,
    }
    head = Head(lambda X, weight: linear_with_frozen_weight(X, weight, None, **options))
    X = torch.ones(B, S, H).transpose(0, 1).requires_grad_()

    def attention() -> None:
        q, k, v = torch.ones(3, 2, 4, 6, 8, requires_grad=True).unbind()
        (torch.softmax(q @ k.mT, -1) @ v).sin().sum().backward()

    assert found_in(lambda: head(X).transpose(0, 1).contiguous().sin().sum().backward()) == []
    assert found_in(attention) == []
    assert found_in(lambda: nn.Linear(H, V)(torch.ones(S, B, H)).sum().backward()) == []


def test_a_forward_batched_by_a_frozen_weight_and_its_dgrad() -> None:
    linear = nn.Linear(H, V, bias=False)
    linear.weight.requires_grad = False
    X = torch.ones(B, S, H).transpose(0, 1).requires_grad_()
    forward, dgrad = sorted(found_in(lambda: linear(X).cos().sum().backward()), key=lambda found: found.matrix[0] == V)
    assert (forward.module, forward.direction, forward.shape, forward.matrix) == ("Linear", FORWARD, (S, B, H), (H, V))
    assert (dgrad.module, dgrad.direction, dgrad.shape, dgrad.matrix) == ("Linear", DGRAD, (S, B, V), (V, H))


@pytest.mark.parametrize("summed", [False, True], ids=["dense", "expanded"])
def test_a_batched_weight_gradient(summed: bool) -> None:  # noqa: FBT001
    """A batched product by an expanded weight gives dW a slice for each of the batch, also where dY is expanded."""

    def call() -> None:
        weight, X = torch.ones(H, V, requires_grad=True), torch.ones(S, B, H, requires_grad=True)
        Y = torch.bmm(X, weight.expand(S, H, V))
        (Y.sum() if summed else Y.sin().sum()).backward()

    found = {finding.direction: finding for finding in found_in(call)}
    assert found.keys() == {FORWARD, DGRAD, WGRAD}
    assert (found[WGRAD].shape, found[WGRAD].matrix, found[WGRAD].calls) == ((S, B, V), (H, V), 1)
    assert (found[DGRAD].shape, found[DGRAD].matrix, found[DGRAD].calls) == ((S, B, V), (V, H), 1)


@pytest.mark.parametrize("of_what", ["permuted", "expanded"])
def test_a_copy_that_folding_spares(of_what: str) -> None:
    """As in a plain flatten, and in what autograd makes of a frozen nn.Linear over dense rows."""
    dense = torch.ones(B, S, H) if of_what == "permuted" else torch.ones(1, S, H)
    X, weight = dense.transpose(0, 1).expand(S, B, H), torch.ones(H, V)
    (finding,) = found_in(lambda: X.reshape(-1, H) @ weight)
    assert (finding.module, finding.direction, finding.fault) == ("", FORWARD, Fault.COPIED)
    assert (finding.shape, finding.stride, finding.matrix) == ((S, B, H), X.stride(), (H, V))
    assert finding.as_run_s > finding.folded_s


def test_a_copy_for_a_frozen_dgrad() -> None:
    linear = nn.Linear(H, V, bias=False)
    linear.weight.requires_grad = False
    X = torch.ones(S, B, H, requires_grad=True)
    (finding,) = found_in(lambda: linear(X).transpose(0, 1).contiguous().sin().sum().backward())
    assert (finding.module, finding.direction, finding.fault) == ("Linear", DGRAD, Fault.COPIED)
    assert (finding.shape, finding.stride, finding.matrix) == ((S, B, V), (V, S * V, 1), (V, H))


def test_copies_that_may_be_needed_are_no_fault() -> None:
    """A weight gradient wants dY and X in one order; heads are put side by side; a strided hidden dim cannot fold."""
    trains, frozen = nn.Linear(H, V), nn.Linear(H, V)
    for parameter in frozen.parameters():
        parameter.requires_grad = False
    X = torch.ones(S, B, H, requires_grad=True)
    assert found_in(lambda: trains(X).transpose(0, 1).contiguous().sin().sum().backward()) == []
    assert found_in(lambda: trains(X.transpose(0, 1)).transpose(0, 1).sin().sum().backward()) == []
    assert found_in(lambda: frozen(torch.ones(B, 2, S, H // 2).permute(2, 0, 1, 3).reshape(S, B, H))) == []
    assert found_in(lambda: frozen(torch.ones(S, B, H, 2)[..., 0])) == []


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_checkpointing_computes_again_is_named(reentrant: bool) -> None:  # noqa: FBT001
    def run(model: nn.Module, X: Tensor) -> Tensor:
        logits = checkpoint(model, X, use_reentrant=reentrant)
        assert isinstance(logits, Tensor)
        return logits

    model = Model()
    found = found_in(lambda: step(model, run=run))
    assert kinds(found) == {("Model.head", DGRAD, Fault.BATCHED)}
    frozen = nn.Sequential(nn.Linear(H, H), nn.Linear(H, V))
    for parameter in frozen.parameters():
        parameter.requires_grad = False
    X = torch.ones(B, S, H).transpose(0, 1).requires_grad_()
    again = found_in(lambda: checkpoint(frozen, X, use_reentrant=reentrant).sum().backward())
    assert [finding.calls for finding in again if finding.direction is FORWARD] == [2]
    assert {finding.module for finding in again if finding.direction is FORWARD} == {"Sequential.0"}


def test_outside_modules_and_after_an_error() -> None:
    class Fails(nn.Module):
        def forward(self, X: Tensor) -> Tensor:
            raise ValueError(X.shape)

    with Diagnosis() as found:
        with pytest.raises(ValueError, match="Size"):
            Fails()(torch.ones(1))
        torch.matmul(torch.ones(B, S, H).transpose(0, 1), torch.ones(H, V))
    assert kinds(found.findings) == {("", FORWARD, Fault.BATCHED)}
    assert "(none)" in text_of([_finding(10.0)], num_products=1, watched_s=1.0)
    found_in(lambda: None)
    assert not torch.nn.modules.module._global_forward_pre_hooks
    assert not torch.nn.modules.module._global_forward_hooks


def test_a_node_of_another_product_is_not_taken_for_it() -> None:
    """Without a gradient to come autograd makes no node, and the last one is somebody else's."""

    def call() -> None:
        q, k = torch.ones(2, S, H, B, requires_grad=True).unbind()
        scores = torch.bmm(q, k.mT)
        torch.matmul(torch.ones(B, S, H).transpose(0, 1), torch.ones(H, V))
        scores.sin().sum().backward()

    assert kinds(found_in(call)) == {("", FORWARD, Fault.BATCHED)}


def test_tensors_without_memory_are_left_alone() -> None:
    def call() -> None:
        with FakeTensorMode():
            torch.matmul(torch.ones(B, S, H).transpose(0, 1), torch.ones(H, V))
        torch.matmul(torch.ones(B, S, H, device="meta").transpose(0, 1), torch.ones(H, V, device="meta"))

    assert found_in(call) == []


def test_only_the_first_calls_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[str] = []
    real = diagnosis._timed
    monkeypatch.setattr(diagnosis, "_timed", lambda call, *, device: timed.append("") or real(call, device=device))
    model = Model()
    found = found_in(lambda: [step(model) for _ in range(7)])
    assert [finding.calls for finding in found] == [7]
    assert len(timed) == 3 * 3, "the product, it folded, and the copy of the logits that might have been for one"


def test_of_old_events_half_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_frozen.diagnostics import module_trail

    monkeypatch.setattr(module_trail, "_MOST_EVENTS", 8)
    model = Model()
    assert kinds(found_in(lambda: [step(model) for _ in range(3)])) == {("Model.head", DGRAD, Fault.BATCHED)}


def _finding(ratio: float, *, calls: int = 3) -> Finding:
    return Finding(
        module="", direction=DGRAD, fault=Fault.BATCHED, shape=(6, 2, 5), stride=(5, 30, 1), dtype=torch.bfloat16,
        matrix=(5, 8), calls=calls, as_run_s=ratio * 1e-3, folded_s=1e-3,
    )  # fmt: skip


def test_the_report_says_what_is_worth_it() -> None:
    findings = [_finding(50.0), _finding(WORTH_SAYING - 0.01, calls=1000)]
    lines = text_of(findings, num_products=2000, watched_s=12.0).splitlines()
    assert lines[0] == "2000 products seen in 12.0 s, 3 of them wasted 0.147 s:"
    assert " ".join(lines[2].split()) == "0.147 50 3 50 1 batched (none) dgrad [6, 2, 5] [5, 30, 1] [5, 8] bfloat16"
    assert len(lines) == 4
    nothing = text_of(findings[1:], num_products=7, watched_s=0.25)
    assert nothing.startswith("7 products seen in 0.2 s: none ran batched")


SCRIPT = """
import sys
import torch
if __name__ == "__main__":
    for _ in range(3):
        torch.matmul(torch.ones(2, 400, 64).transpose(0, 1), torch.ones(64, 900))
    print(__name__, sys.argv[1:])
    if "fail" in sys.argv:
        raise ValueError("its own error")
    sys.exit(5 if "exit" in sys.argv else 0)
"""


@pytest.mark.parametrize(("argument", "code"), [("--help", 0), ("fail", 1), ("exit", 5)])
def test_the_command_runs_a_script_as_it_is(argument: str, code: int, tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "megatron_frozen", "diagnose", str(script), argument],
        capture_output=True, text=True, check=False, timeout=180,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert done.stdout == f"__main__ ['{argument}']\n"
    assert "3 products seen in " in done.stderr
    assert ("ValueError: its own error" in done.stderr) == (argument == "fail")
    assert "megatron-frozen: error" not in done.stderr


def test_other_ranks_are_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "job.py"
    script.write_text("")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    for rank, reports in ((None, 1), ("0", 1), ("1", 0)):
        if rank is not None:
            monkeypatch.setenv("RANK", rank)
        diagnose_script([str(script)])
        assert capfd.readouterr().err.count("0 products seen") == reports


def test_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="diagnose got nothing to run; give it a script or -m and a module"):
        diagnose_script([])
    assert main(["diagnose", "nowhere.py"]) == 2
    assert "diagnose was told to run nowhere.py, which is no file here" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["diagnose", "-h"])
    assert "megatron-frozen diagnose SCRIPT [ARGUMENT ...] | -m MODULE" in " ".join(capsys.readouterr().out.split())
