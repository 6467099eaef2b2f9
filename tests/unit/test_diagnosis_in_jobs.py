"""A diagnosis changes nothing of a job: its values, errors, memory, compiled graphs and threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from megatron_frozen.diagnostics import Diagnosis, diagnosis
from megatron_frozen.diagnostics.findings import Fault
from megatron_frozen.diagnostics.module_trail import ModuleTrail
from megatron_frozen.errors import MegatronFrozenError
from tests.unit.diagnosis_toys import DGRAD, FORWARD, WGRAD, B, H, Model, S, V, found_in, kinds, step


def test_values_do_not_change() -> None:
    plain = step(Model())
    with Diagnosis():
        watched = step(Model())
    assert all(map(torch.equal, plain, watched))


def test_a_backward_inside_a_modules_forward() -> None:
    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def forward(self) -> None:
            step(self.model)

    assert kinds(found_in(Step())) == {("Step.model.head", DGRAD, Fault.BATCHED)}


class _Notes(torch.autograd.Function):
    """Notes where it runs."""

    @staticmethod
    def forward(ctx: Any, X: Tensor, note: Callable[[str], None], name: str) -> Tensor:
        ctx.note, ctx.name = note, name
        note(name)
        return X.clone()

    @staticmethod
    def backward(ctx: Any, dY: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.note(ctx.name)
        return dY, None, None


class _Noting(nn.Module):
    def __init__(self, name: str, note: Callable[[str], None]) -> None:
        super().__init__()
        self.name, self.note = name, note

    def forward(self, X: Tensor) -> Tensor:
        return _Notes.apply(X.sin(), self.note, self.name).cos()


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_a_backward_on_a_thread_of_its_own(reentrant: bool | None) -> None:  # noqa: FBT001
    """As on a GPU: the thread numbers by itself the nodes of what it computes again."""
    trail, noted = ModuleTrail(), []
    blocks = nn.ModuleList(
        _Noting(f"ModuleList.{index}", lambda name: noted.append((name, *trail.place()))) for index in range(4)
    )

    class All(nn.ModuleList):
        def forward(self, X: Tensor) -> Tensor:
            for index, block in enumerate(self):
                again = reentrant is not None and index % 2 == 1
                X = checkpoint(block, X, use_reentrant=reentrant) if again else block(X)  # pyright: ignore
            return X

    model = All(blocks)
    for block in model:
        block.name = block.name.replace("ModuleList", "All")  # pyright: ignore
    with trail:
        for _ in range(3):
            Y = model(torch.ones(B, requires_grad=True)).sum()
            thread = threading.Thread(target=Y.backward)
            thread.start()
            thread.join()
    assert [name for name, place, _ in noted if name != place] == []
    assert len(noted) == 3 * (4 + 4 + (0 if reentrant is None else 2))
    assert sum(is_backward for *_, is_backward in noted) == 3 * 4


def test_the_products_that_wait_for_a_backward_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "_MOST_NODES", 4)
    X, weight = torch.ones(S, B, H), torch.ones(H, V, requires_grad=True)
    with Diagnosis() as found:
        for _ in range(7):
            torch.bmm(X, weight.expand(S, H, V)).sin().sum().backward()
    assert len(found._matrices) == 4
    assert {finding.direction: finding.calls for finding in found.findings} == {FORWARD: 7, WGRAD: 7}


def test_a_class_with_operators_of_its_own_is_looked_into() -> None:
    """As a DTensor, which multiplies its part."""

    class Part(Tensor):
        part: Tensor

        @staticmethod
        def __new__(cls, part: Tensor) -> Part:
            self = Tensor._make_wrapper_subclass(cls, part.shape, part.stride(), dtype=part.dtype)
            self.part = part
            return self

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            del types
            args = [arg.part if isinstance(arg, Part) else arg for arg in args]
            return Part(func(*args, **(kwargs or {})))

    rows, weight = Part(torch.ones(B, S, H).transpose(0, 1)), Part(torch.ones(H, V))
    assert kinds(found_in(lambda: torch.matmul(rows, weight))) == {("", FORWARD, Fault.BATCHED)}


@pytest.mark.parametrize("make", [
    lambda: torch.nested.nested_tensor([torch.ones(2, H), torch.ones(3, H)]).clone(),
    lambda: torch.bmm(*(torch.nested.nested_tensor([torch.ones(2, 2), torch.ones(2, 2)]) for _ in range(2))),
    lambda: torch.ones(B, S, H, dtype=torch.int32).transpose(0, 1) @ torch.ones(H, V, dtype=torch.int32),
    lambda: torch.eye(H).to_sparse() @ torch.ones(H, V),
], ids=["nested", "nested bmm", "int", "sparse"])  # fmt: skip
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_other_tensors_are_left_alone(make: Callable[[], Tensor]) -> None:
    made: list[Tensor] = []
    assert found_in(lambda: made.append(make())) == []
    assert torch.equal(*(tensor.to_dense() if tensor.layout is torch.sparse_coo else torch.cat(
        [part.flatten() for part in tensor.unbind()]) for tensor in (made[0], make())))  # fmt: skip


@pytest.mark.parametrize("weight", [torch.ones(7, V), torch.ones(H, V, dtype=torch.float64)], ids=["size", "dtype"])
def test_a_wrong_product_fails_as_it_did(weight: Tensor) -> None:
    X = torch.ones(B, S, H).transpose(0, 1)
    with pytest.raises(RuntimeError) as plain:
        torch.matmul(X, weight)
    with Diagnosis() as found, pytest.raises(RuntimeError) as watched:
        torch.matmul(X, weight)
    assert str(watched.value) == str(plain.value)
    assert found.findings == []


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_compiled_graphs_and_operators_that_take_functions() -> None:
    """A graph is compiled as without it, and the products that it leaves to torch are seen."""
    linear = nn.Linear(H, V).requires_grad_(requires_grad=False)
    X = torch.ones(B, S, H).transpose(0, 1)
    graphs: list[object] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(linear, backend=backend, fullgraph=True)
    made: list[Tensor] = []
    found = found_in(lambda: made.append(compiled(X)))
    assert kinds(found) == {("OptimizedModule", FORWARD, Fault.BATCHED)}
    assert len(graphs) == 1
    assert torch.equal(made[0], linear(X))
    branch = torch.ops.higher_order.cond
    assert found_in(lambda: made.append(branch(torch.tensor(data=True), torch.sin, torch.cos, (X,)))) == []
    assert torch.equal(made[1], X.sin())


def test_nothing_is_kept() -> None:
    X, weight = torch.ones(B, S, H).transpose(0, 1).requires_grad_(), torch.ones(H, V)
    with Diagnosis() as found:
        Y, Z = X @ weight, X.reshape(-1, H) @ weight
        kept = [StorageWeakRef(tensor.untyped_storage()) for tensor in (X, Y, Z, weight)]
        (Y.sum() + Z.sum()).backward()
        del X, Y, Z, weight
        assert all(storage.expired() for storage in kept)
    assert len(found.findings) == 3


def test_entered_twice_and_again_and_one_in_another() -> None:
    found = Diagnosis()
    with found:
        with pytest.raises(MegatronFrozenError, match="this Diagnosis is watching already; leave it first"), found:
            pass
        with Diagnosis() as inner:
            step(Model())
    assert kinds(inner.findings) == kinds(found.findings)
    with found:
        step(Model())
    assert [finding.calls for finding in found.findings] == [2]
    assert not torch.nn.modules.module._global_forward_hooks


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
