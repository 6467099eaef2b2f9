"""Column layers of one input multiplied together: the values of one by one, in fewer products, and when they do not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_frozen.diagnostics import Recorder
from megatron_frozen.layers import ColumnParallelLinear, ModelParallelConfig
from megatron_frozen.layers.joint_columns import multiply_together
from megatron_frozen.lora import LoraLinear
from megatron_frozen.storage import adjacent_view, repack_
from megatron_frozen.testing import assert_close_to, assert_no_worse_than
from tests.unit.joint_toys import IN, SIZES, adapt, columns, one_by_one, step, together
from tests.unit.lora_toys import seeded

OUT = sum(SIZES)
INPUTS = {
    "dense": lambda: seeded(6, 3, IN, seed=4),
    "one dim": lambda: seeded(IN, seed=4),
    "transposed": lambda: seeded(3, 6, IN, seed=4).transpose(0, 1),
    "expanded": lambda: seeded(6, 1, IN, seed=4).expand(6, 3, IN),
    "no tokens": lambda: seeded(0, 3, IN, seed=4),
}
ADAPTED = {"none": (), "q and v": (0, 2), "k": (1,), "all": (0, 1, 2)}


def _grads(lead: torch.Size) -> dict[str, Tensor]:
    return {
        "dense": seeded(*lead, OUT, seed=5),
        "transposed": seeded(*reversed(lead), OUT, seed=5).permute(*reversed(range(len(lead))), len(lead)),
        "expanded": seeded(OUT, seed=5).expand(*lead, OUT),
        "one number": seeded(1, seed=5).expand(*lead, OUT),
    }


def _base(layer: nn.Module) -> ColumnParallelLinear:
    base = layer.base_layer if isinstance(layer, LoraLinear) else layer
    assert isinstance(base, ColumnParallelLinear)
    return base


def _weights(layers: Sequence[nn.Module]) -> list[Tensor]:
    return [weight for layer in layers if (weight := _base(layer).weight) is not None]


@pytest.mark.parametrize("is_adjacent", [True, False], ids=["adjacent", "disjoint"])
@pytest.mark.parametrize("bias", ["no bias", "frozen bias", "trainable bias"])
@pytest.mark.parametrize("layout", INPUTS)
@pytest.mark.parametrize("adapted", ADAPTED)
def test_values_and_gradients_are_those_of_one_by_one(
    adapted: str, layout: str, bias: str, *, is_adjacent: bool
) -> None:
    layers = adapt(columns(bias=bias != "no bias"), ADAPTED[adapted])
    for base in map(_base, layers):
        base.get_parameter("weight").requires_grad = adapted == "none"
        if base.bias is not None:
            base.bias.requires_grad = bias == "trainable bias"
    apart = copy.deepcopy(layers)
    assert not is_adjacent or repack_(_weights(layers))
    assert (adjacent_view(_weights(layers)) is not None) == is_adjacent
    input_ = INPUTS[layout]()
    for grad in _grads(input_.shape[:-1]).values():
        expected = step(one_by_one, apart, input_, grad)
        assert_close_to(step(together, layers, input_, grad), expected, tolerance=1e-6)
        assert sum(value is not None for value in expected.values()) == 2 + (2 * len(ADAPTED[adapted]) or 3) + 3 * (
            bias == "trainable bias"
        )


@pytest.mark.parametrize("adapted", ["q and v", "all"])
def test_bf16_is_no_further_from_fp64_than_one_by_one_also_in_the_second_step(adapted: str) -> None:
    """fp32 adapters on a bf16 base; the exact reference starts from the same numbers each step."""
    layers = adapt(columns(dtype=torch.bfloat16, bias=True), ADAPTED[adapted])
    input_, grad = (seeded(64, 2, n, seed=n, dtype=torch.bfloat16) for n in (IN, OUT))
    for _ in range(2):
        exact = step(one_by_one, [copy.deepcopy(layer).double() for layer in layers], input_.double(), grad.double())
        plain = step(one_by_one, copy.deepcopy(layers), input_, grad)
        actual = step(together, layers, input_, grad)
        assert_no_worse_than(actual, plain, exact, factor=1.1)
        for parameter in nn.ModuleList(layers).parameters():
            if parameter.grad is not None:
                assert parameter.grad.dtype == torch.float32
                parameter.data.sub_(parameter.grad, alpha=1e-3)


FROZEN = {
    "no A trains": [(0, "A"), (1, "A"), (2, "A")],
    "one A trains": [(0, "A"), (2, "A")],
    "no B trains": [(0, "B"), (1, "B"), (2, "B")],
    "one adapter": [(1, "A"), (1, "B")],
    "nothing": [(number, name) for number in range(3) for name in "AB"],
}


@pytest.mark.parametrize("frozen", FROZEN)
def test_frozen_factors_get_no_gradient_and_save_no_activation(frozen: str) -> None:
    layers = adapt(columns(), (0, 1, 2))
    for number, name in FROZEN[frozen]:
        layers[number].get_parameter(f"lora_{name}.default").requires_grad = False
    input_, grad = seeded(6, 3, IN, seed=4), seeded(6, 3, OUT, seed=5)
    saved: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(partial(_noted, into=saved), lambda t: t):
        together(layers, input_.clone().requires_grad_())
    assert saved.count((6, 3, IN)) == (frozen not in ("no A trains", "nothing"))
    assert ((6, 3, 9) in saved) == (frozen not in ("no B trains", "nothing"))
    expected = step(one_by_one, copy.deepcopy(layers), input_, grad)
    assert_close_to(step(together, layers, input_, grad), expected, tolerance=1e-6)


def test_what_the_layers_share_is_multiplied_once() -> None:
    input_, grad = seeded(6, 3, IN, seed=4), seeded(6, 3, OUT, seed=5)
    for layers, forward, backward in (
        (columns(), (1, 0), (1, 0)),
        # Y and h; then dX, dA, and dh and dB of each adapter. What is added: h B^T of each, dh A.
        (adapt(columns(), (0, 2)), (2, 2), (2 + 2 * 2, 1)),
        (adapt(columns(), (0, 1, 2)), (2, 3), (2 + 3 * 2, 1)),
    ):
        repack_(_weights(layers))
        leaf = input_.clone().requires_grad_()
        with Recorder() as seen:
            output = together(layers, leaf)
        assert (seen.count("aten.mm"), seen.count("aten.addmm_")) == forward
        assert seen.copies(min_bytes=18 * IN * 4) == []
        with Recorder() as seen:
            output.backward(grad)
        assert (seen.count("aten.mm"), seen.count("aten.addmm_")) == backward
        assert {copied.name for copied in seen.copies(min_bytes=18 * IN * 4)} <= {"aten.cat"}  # the thin dh
        assert seen.copies(min_bytes=18 * OUT * 4) == []


def test_an_input_that_needs_no_gradient_costs_none() -> None:
    layers = adapt(columns(), (0, 1, 2))
    output = together(layers, seeded(6, 3, IN, seed=4))
    with Recorder() as seen:
        output.backward(seeded(6, 3, OUT, seed=5))
    assert (seen.count("aten.mm"), seen.count("aten.addmm_")) == (1 + 3 * 2, 0)


@pytest.mark.parametrize("adapted", ["none", "all"])
def test_fp32_dgrad_is_exact_and_folds_whatever_the_gradient_s_layout(
    adapted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 3. Beside adapters the option goes one by one."""
    layers = adapt(columns(dtype=torch.bfloat16), ADAPTED[adapted])
    weight = torch.cat(_weights(layers))
    input_ = seeded(6, 3, IN, seed=4, dtype=torch.bfloat16)
    for asked in (False, True):
        if asked:
            monkeypatch.setenv("MEGATRON_TRUE_ON_POLICY_LINEAR_DGRAD_FP32", "1")
        assert (multiply_together(layers, input_) is None) == (asked and adapted == "all")
        for grad in _grads(input_.shape[:-1]).values():
            leaf = input_.clone().requires_grad_()
            with Recorder() as seen:
                output = multiply_together(layers, leaf)
                if output is not None:
                    output.backward(grad.bfloat16())
            assert seen.count("aten.bmm") == 0
            if adapted == "none":
                expected = (grad.bfloat16().float() @ weight.float()).bfloat16()
                torch.testing.assert_close(leaf.grad, expected, rtol=0, atol=0 if asked else 0.1)


@pytest.mark.parametrize("adapted", ["none", "q and v"])
def test_a_trainable_bias_under_frozen_weights_sums_over_all_leading_dims(adapted: str) -> None:
    """Case 6."""
    layers = adapt(columns(bias=True), ADAPTED[adapted])
    biases = [bias for layer in layers if (bias := _base(layer).bias) is not None]
    for bias in biases[:2]:
        bias.requires_grad_()
    together(layers, seeded(6, 3, IN, seed=4)).backward(torch.ones(6, 3, OUT))
    for bias in biases[:2]:
        torch.testing.assert_close(bias.grad, torch.full_like(bias, 18), rtol=0, atol=0)
    assert biases[2].grad is None
    assert all(weight.grad is None for weight in _weights(layers))


def test_under_autocast_bare_layers_multiply_together_in_its_dtype() -> None:
    layers, input_, grad = columns(), seeded(6, 3, IN, seed=4), seeded(6, 3, OUT, seed=5).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = step(together, layers, input_, grad)
        expected = step(one_by_one, layers, input_, grad)
    assert actual["y"] is not None
    assert actual["y"].dtype == torch.bfloat16
    assert_close_to(actual, expected, tolerance=1e-2)


class _Clamped(ColumnParallelLinear):
    def multiply(self, input_parallel: Tensor) -> Tensor:
        return super().multiply(input_parallel).clamp(max=0.5)


class _Loud(LoraLinear):
    def forward(self, input_: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(input_, **options)
        return 2 * output, bias


def _hooked(kind: str) -> Callable[[], list[nn.Module]]:
    def build() -> list[nn.Module]:
        layers = adapt(columns(), (0, 2))
        getattr(layers[0], f"register_{kind}_hook")(lambda *_: None)
        return layers

    return build


def _with(change: Callable[[list[nn.Module]], Any]) -> Callable[[], list[nn.Module]]:
    def build() -> list[nn.Module]:
        layers = adapt(columns(), (0, 2))
        change(layers)
        return layers

    return build


def _replaced(**options: Any) -> Callable[[], list[nn.Module]]:
    """The layers, the second one built over the same config with other options."""
    config = ModelParallelConfig()
    return lambda: [columns(config=config)[0], columns(config=config, **options)[1], columns(config=config)[2]]


def _clamp() -> list[nn.Module]:
    layers = columns()
    layers[1].__class__ = _Clamped
    return layers


def _loud() -> list[nn.Module]:
    layers = adapt(columns(), (0, 2))
    layers[0].__class__ = _Loud
    return layers


def _called_base_with_a_hook() -> list[nn.Module]:
    layers = adapt(columns(), (0, 2))
    _switch_off(layers[0])
    _base(layers[0]).register_forward_hook(lambda *_: None)
    return layers


def _switch_off(layer: nn.Module) -> None:
    if isinstance(layer, LoraLinear):
        layer.active_adapter = None


ONE_BY_ONE: dict[str, Callable[[], list[nn.Module]]] = {
    "a forward hook": _hooked("forward"),
    "a forward pre-hook": _hooked("forward_pre"),
    "a backward hook": _hooked("full_backward"),
    "a backward pre-hook": _hooked("full_backward_pre"),
    "a hook on a bare layer": _with(lambda layers: layers[1].register_forward_hook(lambda *_: None)),
    "a hook on a base that is called": _called_base_with_a_hook,
    "a product of its own": _clamp,
    "a wrapper's own forward": _loud,
    "a forward put on an instance": _with(lambda layers: setattr(layers[1], "forward", layers[1].forward)),
    "dropout": lambda: adapt(columns(), (0, 2), dropout=0.1),
    "a trainable base beside adapters": _with(lambda layers: layers[1].requires_grad_()),
    "a layer of another dtype": _with(lambda layers: layers[1].double()),
    "one layer with a bias": _replaced(bias=True),
    "a wider output": _replaced(output_dtype=torch.float64),
    "a gathered output": _replaced(gather_output=True),
    "a bias that is not added": _replaced(skip_bias_add=True),
    "another config": lambda: [columns()[0], columns()[1], columns()[2]],
    "no column layer": _with(lambda layers: layers.append(nn.Linear(IN, 2))),
}


@pytest.mark.parametrize("reason", ONE_BY_ONE)
def test_what_one_product_would_not_do_goes_one_by_one(reason: str) -> None:
    assert multiply_together(ONE_BY_ONE[reason](), seeded(6, 3, IN, seed=4)) is None


def test_hooks_on_all_modules_go_one_by_one() -> None:
    layers, input_ = columns(), seeded(6, 3, IN, seed=4)
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert multiply_together(layers, input_) is None
    finally:
        handle.remove()
    assert multiply_together(layers, input_) is not None


def test_autocast_beside_adapters_and_a_wrong_width_go_one_by_one() -> None:
    layers = adapt(columns(), (0, 2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert multiply_together(layers, seeded(6, 3, IN, seed=4)) is None
    assert multiply_together(layers, seeded(6, 3, IN + 1, seed=4)) is None
    assert multiply_together(layers, seeded(6, 3, IN, seed=4).double()) is None


def test_dropout_joins_where_nothing_is_dropped() -> None:
    layers, input_ = adapt(columns(), (0, 2), dropout=0.1), seeded(6, 3, IN, seed=4)
    nn.ModuleList(layers).eval()
    torch.testing.assert_close(together(layers, input_), one_by_one(layers, input_))


def test_adapters_that_are_off_or_named_apart_take_part_as_they_are() -> None:
    layers, input_, grad = adapt(columns(), (0, 1, 2)), seeded(6, 3, IN, seed=4), seeded(6, 3, OUT, seed=5)
    _switch_off(layers[0])
    expected = step(one_by_one, copy.deepcopy(layers), input_, grad)
    assert_close_to(step(together, layers, input_, grad), expected, tolerance=1e-6)
    assert expected["0.lora_A.default"] is None


def _noted(tensor: Tensor, *, into: list[tuple[int, ...]]) -> Tensor:
    into.append(tuple(tensor.shape))
    return tensor


def test_weights_that_are_gathered_for_the_call_leave_no_concatenation_behind() -> None:
    """The mark is the one that FSDP2 puts on modules whose parameters it gathers."""
    layers, input_ = adapt(columns(), (0, 2)), seeded(6, 3, IN, seed=4)
    grad, joint = seeded(6, 3, OUT, seed=5), (OUT, IN)
    expected = step(together, layers, input_, grad)
    for is_gathered in (False, True):
        for layer in layers:
            vars(_base(layer))["_is_fsdp_managed_module"] = is_gathered
        saved: list[tuple[int, ...]] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, saved=saved: saved.append(tuple(t.shape)) or t, lambda t: t
        ):
            actual = step(together, layers, input_, grad)
        assert (joint in saved) == (not is_gathered)
        assert_close_to(actual, expected, tolerance=0)
    for layer in layers:
        _switch_off(layer)
    assert multiply_together(layers, input_) is None
