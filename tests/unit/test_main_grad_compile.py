"""Fused weight gradients in compiled graphs: one graph, the values of eager, flags set, nothing held."""

from __future__ import annotations

import gc
import io
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from megatron_frozen import (
    ColumnParallelLinear,
    Linear,
    ModelParallelConfig,
    linear_with_grad_accumulation_and_async_allreduce,
)
from megatron_frozen.errors import ConfigError
from megatron_frozen.main_grad import introduce, wgrad_into_main_grads

IN, OUT = 7, 5
BACKENDS = ["eager", "aot_eager", "inductor"]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def fused_weight(*, flag: bool = True, zero_out: bool = False, size: int = OUT) -> Any:
    weight: Any = torch.nn.Parameter(torch.randn(size, IN))
    introduce(weight)
    weight.main_grad = torch.full((size, IN), 3.0)
    if flag:
        weight.grad_added_to_main_grad = False
    if zero_out:
        weight.zero_out_wgrad = True
    return weight


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return linear_with_grad_accumulation_and_async_allreduce(
        x, weight, None, gradient_accumulation_fusion=True, allreduce_dgrad=False, sequence_parallel=False
    )


def step(function: Any, weight: Any, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Multiply all inputs, then run all backwards, as a pipeline does; return main_grad and the inputs' gradients."""
    weight.main_grad.fill_(3.0)
    leaves = [x.clone().requires_grad_() for x in inputs]
    outputs = [function(x, weight) for x in leaves]
    for output in outputs:
        output.backward(torch.ones_like(output))
    return [weight.main_grad.clone(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("flag", [False, True])
def test_one_graph_with_the_values_of_eager(backend: str, *, flag: bool) -> None:
    weight = fused_weight(flag=flag)
    seen_by_hook: list[Any] = []
    weight.register_post_accumulate_grad_hook(
        lambda w: seen_by_hook.append(getattr(w, "grad_added_to_main_grad", None))
    )
    compiled = torch.compile(linear, fullgraph=True, backend=backend)
    for num_inputs in (1, 2):
        inputs = [torch.randn(4, 2, IN) for _ in range(num_inputs)]
        actual, expected = step(compiled, weight, *inputs), step(linear, weight, *inputs)
        assert len(actual) == len(expected) == 1 + num_inputs
        assert all(torch.equal(ours, eager) for ours, eager in zip(actual, expected, strict=True))
    assert set(seen_by_hook) == ({True} if flag else {None})  # before a wrapper looks, on every pass


def largest_allocation(function: Any) -> int:
    """Return the most bytes that one operator allocates while the function runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    return max(event.cpu_memory_usage for event in profile.events() or [])


@pytest.mark.parametrize(("backend", "copies"), [("eager", False), ("aot_eager", True), ("inductor", False)])
def test_inductor_writes_in_place(backend: str, *, copies: bool) -> None:
    """aot_eager hands the operator a copy and copies it back: the control."""
    weight = fused_weight(flag=False, size=512)
    bytes_of_buffer = weight.main_grad.nbytes
    compiled = torch.compile(linear, fullgraph=True, backend=backend)
    for is_measured in (False, True):
        y = compiled(torch.randn(1, IN), weight)
        grad = torch.ones_like(y)
        if is_measured:
            largest = largest_allocation(partial(y.backward, grad))
            assert (largest >= bytes_of_buffer) is copies
        else:
            y.backward(grad)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tied_weight_gets_zeros(backend: str) -> None:
    weight = fused_weight(zero_out=True)
    y = torch.compile(linear, fullgraph=True, backend=backend)(torch.randn(4, 2, IN), weight)
    (dummy,) = torch.autograd.grad(y.sum(), weight)
    assert torch.equal(dummy, torch.zeros(OUT, IN))


@pytest.mark.parametrize("backend", BACKENDS)
def test_overwriting_is_decided_when_the_graph_runs(backend: str) -> None:
    weight = fused_weight()
    weight.overwrite_main_grad = True
    compiled = torch.compile(linear, fullgraph=True, backend=backend)
    x = torch.randn(4, 2, IN)
    product = x.sum((0, 1)).expand(OUT, IN)
    for flag, expected in ((False, product), (True, 3 + product), (False, product)):
        weight.main_grad.fill_(3.0)
        weight.grad_added_to_main_grad = flag
        y = compiled(x, weight)
        y.backward(torch.ones_like(y))
        torch.testing.assert_close(weight.main_grad, expected)


# Dynamo looks at .grad of a block's input.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_layers_share_one_graph_and_no_reference_is_left() -> None:
    """Case 48: one recompilation, as the first block's input has no gradient; none for weights of their own."""
    config = ModelParallelConfig(gradient_accumulation_fusion=True)
    blocks = [
        ColumnParallelLinear(IN, IN, config=config, init_method=torch.nn.init.normal_, bias=False) for _ in range(4)
    ]
    counter = CompileCounterWithBackend("aot_eager")
    # Each block goes through the one forward of its class, as blocks of a model do.
    compiled = torch.compile(lambda block, x: block(x)[0], fullgraph=True, backend=counter)
    weights: list[Any] = [block.weight for block in blocks]
    for weight in weights:
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(IN, IN), False
    for _ in range(2):
        x = torch.randn(4, 2, IN)
        for block in blocks:
            x = compiled(block, x)
        x.sum().backward()
    assert counter.frame_count <= 2
    assert all(weight.grad_added_to_main_grad and weight.main_grad.any() for weight in weights)
    watched = [weakref.ref(weight) for weight in weights]
    blocks.clear()
    weights.clear()
    block = weight = compiled = x = None
    torch._dynamo.reset()
    gc.collect()
    assert [ref() for ref in watched] == [None] * 4


def test_a_pickled_copy_sets_flags_of_its_own() -> None:
    layer: Any = Linear(IN, 2 * OUT, parameters_split=["q", "k"], fuse_wgrad_accumulation=True)
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    weights: list[Any] = [module.get_parameter(name) for module in (layer, loaded) for name in layer.weight_names]
    for weight in weights:
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(weight.shape), False
    torch.compile(loaded, fullgraph=True, backend="aot_eager")(torch.randn(4, IN)).sum().backward()
    assert [weight.grad_added_to_main_grad for weight in weights] == [False, False, True, True]


def test_a_list_of_buffers_takes_the_rows_of_one_gradient() -> None:
    """The form for split parameters: parts with buffers of their own, of which one is frozen out by leaving it away."""
    sizes = (2, 0, 3)
    weights = [fused_weight(size=size) for size in sizes]
    grad, x = torch.randn(4, 2, sum(sizes)), torch.randn(4, 2, IN)
    buffers = [weight.main_grad for weight in weights]
    wgrad_into_main_grads(buffers, grad, x, [weight._main_grad_key for weight in weights])
    whole = grad.reshape(-1, sum(sizes)).t() @ x.reshape(-1, IN)
    torch.testing.assert_close(torch.cat(buffers), 3 + whole)
    assert all(weight.grad_added_to_main_grad for weight in weights)


@pytest.mark.parametrize("num_parts", [1, 3])
def test_the_operator_keeps_its_promises(num_parts: int) -> None:
    buffers = [torch.zeros(OUT, IN) for _ in range(num_parts)]
    arguments = (buffers, torch.randn(4, OUT * num_parts), torch.randn(4, IN), [torch.tensor(0)] * num_parts)
    results = torch.library.opcheck(wgrad_into_main_grads, arguments)
    assert set(results.values()) == {"SUCCESS"}


def test_a_weight_that_is_gone_is_named() -> None:
    key = fused_weight()._main_grad_key
    gc.collect()
    with pytest.raises(ConfigError, match="holds the weight gradient of a parameter that no longer exists"):
        wgrad_into_main_grads([torch.zeros(OUT, IN)], torch.zeros(4, OUT), torch.zeros(4, IN), [key])


def test_without_a_backward_no_buffer_is_asked_for() -> None:
    weight = torch.nn.Parameter(torch.randn(OUT, IN))
    x = torch.randn(4, 2, IN)
    with torch.no_grad():
        assert torch.equal(torch.compile(linear, fullgraph=True, backend="eager")(x, weight), linear(x, weight))


def test_a_flag_on_an_unknown_weight_is_refused_while_tracing() -> None:
    weight: Any = torch.nn.Parameter(torch.randn(OUT, IN))
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(OUT, IN), False
    message = "carries a wrapper's flag but no key by which a compiled graph could set it"
    with pytest.raises(Exception, match=message):
        torch.compile(linear, fullgraph=True, backend="eager")(torch.randn(4, IN), weight)


def test_a_buffer_made_in_backward_is_refused_while_tracing() -> None:
    weight = fused_weight()
    weight.get_main_grad = None
    message = "gets its buffer from Megatron-FSDP in backward, which a compiled graph cannot wait for"
    with pytest.raises(Exception, match=message):
        torch.compile(linear, fullgraph=True, backend="eager")(torch.randn(4, IN), weight)
