"""Layers with split parameters on each rank, beside plain torch on the unsplit and unsharded layer."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from megatron_frozen import get_tensor_model_parallel_group, initialize_model_parallel, sum_partial_grads
from megatron_frozen.layers import LayerNormLinear, Linear
from megatron_frozen.testing import relative_error
from tests.unit.core_ranks import seeded

IN, SIZES = 8, {"q": 8, "k": 4, "v": 4}
FROZEN = {"none": (), "first": ("q",), "middle": ("k",), "all": ("q", "k", "v")}
PREFILL = 7.0  # what a main_grad holds before the first step
TOLERANCE = 2e-6


@dataclass(frozen=True, kw_only=True)
class Case:
    """One cell of the matrix; a layer is run with adjacent parts, then, still compiled, with disjoint ones."""

    kind: str
    bias: bool
    frozen: str
    fused: bool
    backend: str | None = None


def build(case: Case, *, rank: int = 0, world_size: int = 1, **options: Any) -> Linear | LayerNormLinear:
    """Return the layer with the values of the reference, on two ranks as a column layer unless options say more."""
    options.setdefault("parallel_mode", "column" if world_size > 1 else None)
    options |= {"parameters_split": SIZES, "bias": case.bias, "fuse_wgrad_accumulation": case.fused}
    if case.kind == "Linear":
        layer = Linear(IN, 16, **options)
    else:
        layer = LayerNormLinear(IN, 16, normalization=case.kind, **options)  # pyright: ignore[reportArgumentType]
    dim = 1 if options["parallel_mode"] == "row" else 0
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            full = full_value(name, parameter.dtype)
            is_cut = getattr(parameter, "tensor_model_parallel", False)
            parameter.copy_(full.chunk(world_size, dim=dim)[rank] if is_cut else full)
    for name in FROZEN[case.frozen]:
        getattr(layer, f"{name}_weight").requires_grad = False
    for part in trained_parts(layer) if case.fused else []:
        part.main_grad, part.grad_added_to_main_grad = torch.full(part.shape, PREFILL), False
    return layer


def trained_parts(layer: Any) -> list[Any]:
    return [part for name in layer.weight_names if (part := getattr(layer, name)).requires_grad]


def full_value(name: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the value of a parameter of the unsharded layer."""
    if name.startswith("layer_norm"):
        return seeded(IN, seed=len(name), dtype=dtype) / 4 + 1
    size = SIZES[name[0]]
    shape = (size, IN) if name.endswith("weight") else (size,)
    return seeded(*shape, seed=sum(map(ord, name)), dtype=dtype)


def data(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return an input [s, b, IN] and a gradient [s, b, 16] of the output."""
    return seeded(4, 3, IN, seed=1, dtype=dtype), seeded(4, 3, 16, seed=2, dtype=dtype)


def reference(case: Case) -> dict[str, Tensor]:
    """Return Y, dX and every gradient of plain torch, unsharded, with the joined weight, and nothing frozen."""
    input_, grad = data()
    names = [f"{part}_weight" for part in SIZES] + ([f"{part}_bias" for part in SIZES] if case.bias else [])
    norm_names = {"Linear": [], "RMSNorm": ["layer_norm_weight"]}.get(
        case.kind, ["layer_norm_weight", "layer_norm_bias"]
    )
    values = {name: full_value(name).requires_grad_() for name in [*norm_names, *names]}
    normalised = input_.requires_grad_()
    if case.kind == "LayerNorm":
        normalised = nn.functional.layer_norm(input_, (IN,), values["layer_norm_weight"], values["layer_norm_bias"])
    elif case.kind == "RMSNorm":
        normalised = nn.functional.rms_norm(input_, (IN,), values["layer_norm_weight"], 1e-5)
    bias = torch.cat([values[f"{part}_bias"] for part in SIZES]) if case.bias else None
    output = nn.functional.linear(normalised, torch.cat([values[f"{part}_weight"] for part in SIZES]), bias)
    grads = torch.autograd.grad(output, [input_, *values.values()], grad)
    return {"y": output.detach(), "dx": grads[0], **dict(zip(values, grads[1:], strict=True))}


def columns_of(full: Tensor, *, rank: int, world_size: int) -> Tensor:
    """Return this rank's columns of [..., 16]: its slice of each part, in order."""
    return torch.cat([part.chunk(world_size, -1)[rank] for part in full.split(list(SIZES.values()), -1)], -1)


@contextmanager
def counted_operators() -> Iterator[Counter[str]]:
    """Count operators as torch's profiler sees them, which looks into custom operators and compiled code."""
    counts: Counter[str] = Counter()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        yield counts
    counts.update({event.key: event.count for event in profile.key_averages()})


def make_disjoint(layer: Any) -> None:
    """Give each part memory of its own, as a cast, a copy or a wrapper does."""
    for name, parameter in layer.named_parameters():
        if not name.startswith("layer_norm"):
            parameter.data = parameter.data.clone()


def check_case(case: Case, *, rank: int = 0, world_size: int = 1) -> None:
    """Run adjacent and disjoint parts for two steps each and assert values, counts and the number of graphs."""
    layer = build(case, rank=rank, world_size=world_size)
    expected = reference(case)
    run: Any = layer
    counter = None
    if case.backend is not None:
        torch._dynamo.reset()
        counter = CompileCounterWithBackend(case.backend)
        run = torch.compile(layer, fullgraph=True, backend=counter)
    for step, memory in enumerate(("adjacent", "adjacent", "disjoint", "disjoint"), start=1):
        if step == 3:
            make_disjoint(layer)
        input_, grad = data()
        grad = columns_of(grad, rank=rank, world_size=world_size)
        layer.zero_grad()
        with counted_operators() as counts:
            output = run(input_.requires_grad_())
            output.backward(grad)
        what = f"{case}, {memory}, step {step}, rank {rank} of {world_size}"
        actual = {"y": output.detach(), "dx": input_.grad} | gradients(layer, fused=case.fused)
        check_values(actual, expected, case, step=step, rank=rank, world_size=world_size, what=what)
        if step % 2 == 0:  # compiling runs operators of its own
            check_counts(counts, case, memory=memory, what=what)
    if counter is not None:
        assert counter.frame_count == 1, f"{case}: compiled {counter.frame_count} times"


def gradients(layer: Any, *, fused: bool) -> dict[str, Tensor | None]:
    found = {name: parameter.grad for name, parameter in layer.named_parameters()}
    for part in trained_parts(layer) if fused else []:
        assert part.grad_added_to_main_grad is True
        (name,) = (name for name, parameter in layer.named_parameters() if parameter is part)
        found[name] = part.main_grad
    return found


def check_values(
    actual: dict[str, Tensor | None], expected: dict[str, Tensor], case: Case, *, step: int, rank: int,
    world_size: int, what: str,
) -> None:  # fmt: skip
    frozen = {f"{name}_weight" for name in FROZEN[case.frozen]}
    assert actual.keys() == expected.keys(), what
    for name, full in expected.items():
        value = actual[name]
        if name in frozen:
            assert value is None, f"{what}: {name} is frozen and has a gradient"
            continue
        assert value is not None, f"{what}: {name} has no gradient"
        want = full
        if name == "y":
            want = columns_of(full, rank=rank, world_size=world_size)
        elif name != "dx" and not name.startswith("layer_norm"):
            want = full.chunk(world_size)[rank]
            if case.fused and name.endswith("weight"):
                want = PREFILL + step * want
        error = relative_error(value, want)
        assert error < TOLERANCE, f"{what}: {name} is off by {error:.2g}"


def check_counts(counts: Counter[str], case: Case, *, memory: str, what: str) -> None:
    """Concatenations: one for each operand of disjoint parts. Products: forward, dX, and dW if a part trains."""
    num_concatenations = (1 + case.bias) * (memory == "disjoint")
    assert counts["aten::cat"] == num_concatenations, f"{what}: {counts['aten::cat']} concatenations"
    num_products = counts["aten::mm"] + counts["aten::addmm"]
    assert counts["aten::bmm"] == 0, what
    if not case.fused:
        assert num_products == 2 + (case.frozen != "all"), f"{what}: {num_products} products"


BACKENDS = ["eager", "aot_eager", "inductor"]
KINDS = ["Linear", "LayerNorm", "RMSNorm"]


def all_cases(kind: str, *, fused: bool) -> list[Case]:
    """Return every combination without compiling."""
    return [
        Case(kind=kind, bias=bias, frozen=frozen, fused=fused)
        for bias, frozen in itertools.product((False, True), FROZEN)
    ]


def covering_cases(kind: str, *, backend: str) -> list[Case]:
    """Return one case for each freezing: over the three kinds each pair of kind, bias, freezing and main_grad occurs
    on each backend, in other combinations on the next."""
    i, k = KINDS.index(kind), BACKENDS.index(backend)
    return [
        Case(kind=kind, bias=(i + j + k) % 2 == 1, frozen=frozen, fused=(i + j // 2 + k // 2) % 2 == 1, backend=backend)
        for j, frozen in enumerate(FROZEN)
    ]


def check_on_ranks(rank: int, world_size: int, chosen: list[Case]) -> int:
    """Check cases on each rank of the pool; return how many."""
    initialize_model_parallel(world_size)
    for case in chosen:
        check_case(case, rank=rank, world_size=world_size)
    return len(chosen)


def check_modes(rank: int, world_size: int, mode: str | None, backend: str | None) -> None:
    """Check a layer of each parallel mode under sequence parallelism, and a row layer without it."""
    initialize_model_parallel(world_size)
    group = get_tensor_model_parallel_group()
    is_row = mode == "row"
    for kind, sequence_parallel in itertools.product(("Linear",) if is_row else KINDS, (False, True)):
        case = Case(kind=kind, bias=True, frozen="middle", fused=False, backend=backend)
        layer = build(case, rank=rank, world_size=world_size, parallel_mode=mode, sequence_parallel=sequence_parallel)
        expected = reference(case)
        input_, grad = data()
        seen, wanted = input_, expected["y"]
        if is_row:
            seen = input_.chunk(world_size, -1)[rank]
        elif sequence_parallel:
            seen = input_.chunk(world_size)[rank]
        if mode == "column":
            grad, wanted = (columns_of(full, rank=rank, world_size=world_size) for full in (grad, wanted))
        elif sequence_parallel:
            grad, wanted = (full.chunk(world_size)[rank] for full in (grad, wanted))
        seen = seen.clone().requires_grad_()
        torch._dynamo.reset()
        run: Any = torch.compile(layer, fullgraph=True, backend=backend) if backend else layer
        output = run(seen)
        output.backward(grad)
        sum_partial_grads(layer.parameters(), group=group)
        what = f"{kind}, {mode}, sequence_parallel={sequence_parallel}"
        assert relative_error(output, wanted) < TOLERANCE, what
        assert seen.grad is not None
        dx = (
            expected["dx"].chunk(world_size, -1 if is_row else 0)[rank]
            if is_row or sequence_parallel
            else expected["dx"]
        )
        assert relative_error(seen.grad, dx) < TOLERANCE, f"{what}: dx"
        for name, parameter in layer.named_parameters():
            if name == "k_weight":
                assert parameter.grad is None, what
                continue
            full = expected[name]
            cut = getattr(parameter, "partition_dim", -1)
            part = full.chunk(world_size, cut)[rank] if cut >= 0 else full
            assert parameter.grad is not None, f"{what}: {name}"
            assert relative_error(parameter.grad, part) < TOLERANCE, f"{what}: {name}"
