"""The patch on one rank: what it changes in megatron-core, that it can be undone, and the numbers."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_frozen.diagnostics import Recorder
from megatron_frozen.errors import ConfigError
from megatron_frozen.integrations import megatron_core as integration
from megatron_frozen.integrations.megatron_core import patching, upstream
from tests.functional.megatron_fsdp_protocol import FsdpWeight

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of Transformer Engine and apex being absent
    from megatron.core import ModelParallelConfig, tensor_parallel, utils
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel import layers
    from megatron.core.tensor_parallel import linear_with_grad_accumulation_and_async_allreduce as held_early

FROZEN, TRAINABLE = layers.LinearWithFrozenWeight, layers.LinearWithGradAccumulationAndAsyncCommunication
# How a gradient [6, 3, 5] or an input [6, 3, 7] may lie in memory; no two leading dims collapse by stride.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "leading dims swapped": lambda dense: dense.transpose(0, 1).contiguous().transpose(0, 1),
    "expanded": lambda dense: dense[:1].expand_as(dense),
    "last dims swapped": lambda dense: dense.transpose(1, 2).contiguous().transpose(1, 2),
}


def operands(*, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    X, W, b = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((6, 3, 7), (5, 7), (5,)))
    return X.requires_grad_(), W, b.requires_grad_()


def multiply(X: Tensor, W: Tensor, b: Tensor | None = None, *, fusion: bool = False, **options: Any) -> Tensor:
    """Call the function of upstream that its layers choose, with the one held before any patch."""
    options |= {"gradient_accumulation_fusion": fusion, "allreduce_dgrad": False, "sequence_parallel": False}
    if W.requires_grad:
        return held_early(X, W, b, **options)
    return layers.linear_with_frozen_weight(X, W, b, tp_group=None, **options)


def run(X: Tensor, W: Tensor, b: Tensor | None, dY: Tensor) -> dict[str, Any]:
    """Return Y, dX, dW, db and the recorded operations."""
    with Recorder() as seen:
        Y = multiply(X, W, b)
        Y.backward(dY)
    given = {"Y": Y.detach(), "dX": X.grad, "dW": W.grad, "db": None if b is None else b.grad}
    X.grad = W.grad = None
    if b is not None:
        b.grad = None
    return {**given, "seen": seen}


def namespaces() -> dict[tuple[str, str], object]:
    """Every attribute of every module of megatron-core that is loaded, and of the classes of ``layers``."""
    found: dict[tuple[str, str], object] = {}
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core"):
            found |= {(name, key): value for key, value in vars(module).items()}
    for name, value in list(vars(layers).items()):
        if inspect.isclass(value):
            found |= {(name, key): entry for key, entry in vars(value).items()}
    return found


@pytest.mark.parametrize("trains", [False, True], ids=["frozen", "trainable"])
def test_unpatching_gives_back_every_object_and_every_bit(*, trains: bool) -> None:
    X, W, b = operands()
    W.requires_grad_(trains)
    dY = LAYOUTS["leading dims swapped"](torch.randn(6, 3, 5))
    before, never_patched = namespaces(), run(X, W, b, dY)
    for _ in range(2):
        integration.patch()
        changed = {key for key, value in namespaces().items() if before.get(key) is not value}
        assert changed == {
            ("LinearWithFrozenWeight", "forward"),
            ("LinearWithFrozenWeight", "backward"),
            ("LinearWithGradAccumulationAndAsyncCommunication", "forward"),
            ("LinearWithGradAccumulationAndAsyncCommunication", "backward"),
            ("megatron.core.tensor_parallel.layers", "_grad_accum_fusion_available"),
            ("megatron.core.utils", "drain_embedding_wgrad_compute"),
            ("megatron.core.pipeline_parallel.schedules", "drain_embedding_wgrad_compute"),
        }
        integration.unpatch()
        after = namespaces()
        assert after.keys() == before.keys()
        assert [key for key, value in after.items() if before[key] is not value] == []
    for name, value in run(X, W, b, dY).items():
        if isinstance(value, Tensor):
            assert torch.equal(value, never_patched[name]), name
        elif name == "seen":
            assert [op.name for op in value.operations] == [op.name for op in never_patched[name].operations]


def test_two_patches_are_one() -> None:
    report = integration.patch()
    try:
        forward = vars(FROZEN)["forward"]
        assert integration.patch() is report
        assert vars(FROZEN)["forward"] is forward
        with integration.patched() as inner:
            assert inner is report
        assert integration.is_patched()  # what was there before the with statement stays
        assert vars(FROZEN)["forward"] is forward
    finally:
        integration.unpatch()
    assert not integration.is_patched()
    assert vars(FROZEN)["forward"] is not forward
    integration.unpatch()  # nothing left to do


def test_the_report_lists_what_was_replaced() -> None:
    with integration.patched() as report:
        pass
    places = [entry.split(":")[0] for entry in report.replaced]
    prefix = "megatron.core.tensor_parallel.layers"
    assert places == [
        f"{prefix}.LinearWithFrozenWeight.forward",
        f"{prefix}.LinearWithFrozenWeight.backward",
        f"{prefix}.LinearWithGradAccumulationAndAsyncCommunication.forward",
        f"{prefix}.LinearWithGradAccumulationAndAsyncCommunication.backward",
        f"{prefix}._grad_accum_fusion_available",
        "megatron.core.utils.drain_embedding_wgrad_compute",
    ]
    assert report.kept == ()
    assert report.version == upstream.version()
    assert str(report).splitlines()[1].strip() == f"replaced {report.replaced[0]}"


def test_an_error_in_the_body_takes_the_patch_away() -> None:
    before = namespaces()
    with pytest.raises(ZeroDivisionError), integration.patched():
        _ = 1 / 0
    assert [key for key, value in namespaces().items() if before[key] is not value] == []


def test_a_patch_that_fails_half_way_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("half way")

    monkeypatch.setattr(patching, "_patch_drain", fail)
    before = namespaces()
    with pytest.raises(RuntimeError, match="half way"):
        integration.patch()
    assert [key for key, value in namespaces().items() if before[key] is not value] == []
    assert not integration.is_patched()


def test_signatures_stay() -> None:
    def signatures() -> list[inspect.Signature]:
        names = ("linear_with_frozen_weight", "linear_with_grad_accumulation_and_async_allreduce")
        functions = [getattr(layers, name) for name in names] + [utils.drain_embedding_wgrad_compute]
        functions += [method for kind in (FROZEN, TRAINABLE) for method in (kind.forward, kind.backward)]
        functions += [kind.__init__ for kind in (layers.ColumnParallelLinear, layers.RowParallelLinear)]
        return [inspect.signature(function) for function in functions]

    before = [str(signature).replace("'", "") for signature in signatures()]
    with integration.patched():
        during = signatures()
    for ours, theirs in zip(during, before, strict=True):
        names = list(inspect.signature(utils.drain_embedding_wgrad_compute).parameters)
        if list(ours.parameters) == names:  # ours has annotations, upstream's has none
            continue
        assert str(ours).replace("'", "") == theirs


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("trains", [False, True], ids=["frozen", "trainable"])
def test_values_and_products(layout: str, *, trains: bool) -> None:
    """Cases 1 and 6: one product each, none of them batched; a bias under a frozen weight gets its gradient."""
    X, W, b = operands()
    W.requires_grad_(trains)
    X = LAYOUTS[layout](X.detach()).requires_grad_()
    dY = LAYOUTS[layout](torch.randn(6, 3, 5, generator=torch.Generator().manual_seed(1)))
    with integration.patched():
        found = run(X, W, b, dY)
    exact = {
        "Y": torch.einsum("sbi,oi->sbo", X.double(), W.double()) + b.double(),
        "dX": torch.einsum("sbo,oi->sbi", dY.double(), W.double()),
        "dW": torch.einsum("sbo,sbi->oi", dY.double(), X.double()) if trains else None,
        "db": dY.double().sum((0, 1)),
    }
    for name, value in exact.items():
        if value is None:
            assert found[name] is None, name
        else:
            torch.testing.assert_close(found[name].double(), value, rtol=1e-5, atol=1e-5, msg=name)
    products = [op.name for op in found["seen"].operations if op.name in ("aten.mm", "aten.addmm", "aten.bmm")]
    assert products == ["aten.addmm", *["aten.mm"] * (2 if trains else 1)]


def test_upstream_multiplies_in_batches_and_loses_the_bias_gradient() -> None:
    """The control of the test above."""
    X, W, b = operands()
    found = run(LAYOUTS["leading dims swapped"](X.detach()).requires_grad_(), W, b, torch.ones(3, 6, 5).transpose(0, 1))
    assert found["seen"].count("aten.bmm") == 2
    assert found["db"] is None


@pytest.mark.parametrize("trains", [False, True], ids=["frozen", "trainable"])
def test_a_graph_that_is_older_than_the_patch_ends_as_it_began(*, trains: bool) -> None:
    X, W, b = operands()
    W.requires_grad_(trains)
    dY = torch.randn(6, 3, 5)
    never_patched = run(X, W, b, dY)
    Y = multiply(X, W, b)
    with integration.patched():
        Y.backward(dY)
    for name, grad in {"dX": X.grad, "dW": W.grad, "db": b.grad}.items():
        expected = never_patched[name]
        assert (grad is None) == (expected is None), name
        assert grad is None or torch.equal(grad, expected), name


@torch.inference_mode()
def test_patching_works_where_gradients_are_off() -> None:
    with integration.patched() as report:
        assert len(report.replaced) == 6


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("trains", [False, True], ids=["frozen", "trainable"])
def test_patched_products_compile(backend: str, *, trains: bool) -> None:
    """As upstream's do, into one graph, with the fused write in it."""
    X, W, b = operands()
    weight: Any = nn.Parameter(W, requires_grad=trains)
    dY = torch.randn(3, 6, 5).transpose(0, 1)

    def linear(X: Tensor) -> Tensor:
        return multiply(X, weight, b, fusion=True)

    found = []
    torch._dynamo.reset()
    with integration.patched():
        for function in (linear, torch.compile(linear, backend=backend, fullgraph=True)):
            weight.main_grad = torch.zeros(5, 7)
            X.grad = b.grad = None
            function(X).backward(dY)
            assert X.grad is not None
            assert b.grad is not None
            found.append((X.grad, b.grad, weight.main_grad))
    torch._dynamo.reset()
    for eager, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, eager)
    assert bool(weight.main_grad.any()) == trains


def test_a_frozen_bias_gets_nothing() -> None:
    X, W, b = operands()
    with integration.patched():
        found = run(X, W, b.detach(), torch.ones(6, 3, 5))
    assert found["db"] is None
    assert found["dW"] is None


@pytest.mark.parametrize("trains", [False, True], ids=["frozen", "trainable"])
def test_autocast(*, trains: bool) -> None:
    """Operands are cast as upstream's matmul would cast them; gradients come back in the operands' own dtypes."""
    X, W, b = operands()
    W.requires_grad_(trains)
    with integration.patched(), torch.autocast("cpu", torch.bfloat16):
        found = run(X, W, b, torch.ones(6, 3, 5))
    low = torch.nn.functional.linear(X.detach().bfloat16(), W.detach().bfloat16())
    torch.testing.assert_close(found["Y"], low + b)  # an fp32 bias widens the output
    torch.testing.assert_close(found["dX"], W.sum(0).expand(6, 3, 7), rtol=2e-2, atol=2e-2)
    assert found["dX"].dtype == torch.float32
    torch.testing.assert_close(found["db"], torch.full((5,), 18.0))
    if trains:
        torch.testing.assert_close(found["dW"], X.sum((0, 1)).expand(5, 7), rtol=2e-2, atol=5e-2)


def test_a_bias_of_a_wider_dtype_widens_the_output() -> None:
    """As upstream's sum does, whose backward then raises."""
    X, W, _ = operands(dtype=torch.bfloat16)
    b = torch.randn(5, requires_grad=True)
    with torch.no_grad():
        never_patched = multiply(X, W, b)
    with integration.patched():
        found = run(X, W, b, torch.ones(6, 3, 5))
    assert found["Y"].dtype == never_patched.dtype == torch.float32
    assert torch.equal(found["Y"], never_patched)
    torch.testing.assert_close(found["dX"], W.sum(0).expand(6, 3, 7))
    assert torch.equal(found["db"], torch.full((5,), 18.0))


def test_a_fused_layer_needs_no_apex() -> None:
    """Case 15: the layer is built, and its gradient lands in fp32 without a rounding to bf16 on the way."""
    config = ModelParallelConfig(
        gradient_accumulation_fusion=True, params_dtype=torch.bfloat16, use_cpu_initialization=True
    )
    options: dict[str, Any] = {"config": config, "init_method": nn.init.xavier_normal_, "bias": False}
    with pytest.raises(RuntimeError, match="fused_weight_gradient_mlp_cuda"):
        tensor_parallel.ColumnParallelLinear(7, 5, **options)
    with integration.patched():
        layer = tensor_parallel.ColumnParallelLinear(7, 5, **options)
        weight: Any = layer.weight
        weight.main_grad = torch.full((5, 7), 3.0)
        X, dY = (torch.randn(6, 3, size).bfloat16() for size in (7, 5))
        for _ in range(2):
            layer(X)[0].backward(dY)
    product = torch.einsum("sbo,sbi->oi", dY.double(), X.double())
    assert weight.grad is None
    torch.testing.assert_close(weight.main_grad.double(), 3 + 2 * product, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("is_sharded", [False, True], ids=["whole", "sharded"])
def test_megatron_fsdp_gets_fp32_main_grads(*, is_sharded: bool) -> None:
    """Case 9: upstream's product into an fp32 buffer raises. Ours fills it, and asks for it once, in backward."""
    X, W, _ = operands(dtype=torch.bfloat16)
    weight = nn.Parameter(W)
    fsdp = FsdpWeight(weight, is_sharded=is_sharded)
    exact = torch.zeros(5, 7, dtype=torch.float64)
    for seed in range(2):
        dY = torch.randn(6, 3, 5, generator=torch.Generator().manual_seed(seed)).bfloat16()
        exact += torch.einsum("sbo,sbi->oi", dY.double(), X.detach().double())
        fsdp.unshard()
        with integration.patched():
            Y = multiply(X, weight, fusion=True)
            assert fsdp.num_calls == seed
            Y.backward(dY)
        fsdp.after_backward()
        assert fsdp.num_calls == seed + 1
    assert fsdp.gradient().dtype == torch.float32
    torch.testing.assert_close(fsdp.gradient().double(), exact, rtol=1e-5, atol=1e-5)
    fsdp.unshard()
    with pytest.raises(RuntimeError, match="Expected out tensor to have dtype"):
        multiply(X, weight, fusion=True).backward(torch.ones(6, 3, 5).bfloat16())


@pytest.mark.parametrize("has_flag", [False, True], ids=["bare buffer", "under a wrapper"])
def test_the_deferred_gradient_of_the_head(*, has_flag: bool) -> None:
    """Backward keeps dY and answers the wrapper; the drain after it, by any holder's name, adds both micro-batches."""
    X, W, _ = operands(dtype=torch.bfloat16)
    weight: Any = nn.Parameter(W)
    weight.main_grad = torch.zeros(5, 7)
    if has_flag:
        weight.grad_added_to_main_grad = False
    inputs, grads = [X.detach(), 2 * X.detach()], [torch.randn(6, 3, 5).bfloat16() for _ in range(2)]
    kept: list[Tensor] = []
    config: Any = ModelParallelConfig(gradient_accumulation_fusion=True)
    with integration.patched():
        for X, dY in zip(inputs, grads, strict=True):
            Y = multiply(X, weight, fusion=True, grad_output_buffer=kept)
            Y.backward(dY)
            assert (weight.grad is not None) == has_flag  # a wrapper may refuse an absent gradient
            weight.grad = None
        assert not weight.main_grad.any()
        assert getattr(weight, "grad_added_to_main_grad", True)
        assert len(kept) == 2
        schedules.drain_embedding_wgrad_compute(config, list(inputs), kept, weight, None)
    exact = sum(torch.einsum("sbo,sbi->oi", dY.double(), X.double()) for X, dY in zip(inputs, grads, strict=True))
    torch.testing.assert_close(weight.main_grad.double(), exact, rtol=1e-5, atol=1e-5)
    assert kept == []


def test_an_install_that_another_patch_has_changed_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(torch.autograd.Function):
        pass

    monkeypatch.setattr(layers, "LinearWithFrozenWeight", Other)
    with pytest.raises(ConfigError, match=r"is not its own .*another patch may have replaced it"):
        integration.patch()
    assert not integration.is_patched()
