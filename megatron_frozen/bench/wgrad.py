"""The weight gradient of bf16 operands into an fp32 buffer: our fused write, each backend's, and what it replaces.

Shape suffixes: T = tokens, I = in features, O = out features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from megatron_frozen import gemm
from megatron_frozen.bench.runner import (
    BenchConfig,
    Row,
    bar_picture,
    extra_mib,
    medians_ms,
    num_threads,
    stamp,
    telling,
    text_table,
    write_csv,
)
from megatron_frozen.bench.targets import at_least, at_most, number
from megatron_frozen.gemm import peers, select
from megatron_frozen.gemm.request import Product, Request
from megatron_frozen.testing import relative_error

# tokens, out features, in features
SHAPES = ((4096, 1024, 1024), (2048, 4096, 1024), (2048, 4096, 4096), (8192, 2048, 2048))
SMALL_SHAPES = ((256, 96, 64), (128, 33, 130))
OURS, BARE, ADDED, UPCAST = "ours", "bare product", "product + add", "fp32 upcast"
_SAMPLED = 64  # rows of the gradient that are compared with fp64
COLUMNS = ("threads", "tokens", "out_features", "in_features", "way", "backend", "median_ms", "ratio_to_bare",
           "relative_error", "extra_mib", "main_grad_mib")  # fmt: skip


def run(config: BenchConfig) -> None:
    """Measure, print the table with its targets, write wgrad.csv and wgrad.png.

    On a CPU with one and with two threads. Memory is that of the whole process, see ``extra_mib``."""
    shapes = SMALL_SHAPES if config.small else SHAPES
    rows: list[Row] = []
    for threads in (1, 2) if config.device == "cpu" else (torch.get_num_threads(),):
        with num_threads(threads):
            rows += [stamp(config) | row for shape in shapes for row in measure(shape, config=config)]
    targets = [row for measured in _by_case(rows) for row in verdicts(measured)]
    columns = ("threads", "tokens", "out_features", "in_features", "figure", "value", "target", "met")
    groups = {
        f"{case[0]['threads']} thr. {_sizes(case[0])}": {str(row["way"]): number(row, "median_ms") for row in case}
        for case in _by_case(rows)
    }
    path = config.output / "wgrad.csv"
    with telling(f"{text_table(rows, COLUMNS)}\n\n{text_table(targets, columns)}", path=path):
        write_csv(path, rows + targets)
        bar_picture(path.with_suffix(".png"), groups, title="dW into fp32", label="ms")


def measure(shape: tuple[int, int, int], *, config: BenchConfig) -> list[Row]:
    """Return a row for each way to add dY^T X to an fp32 main_grad, for operands of sizes (T, O, I)."""
    T, O, I = shape  # noqa: E741
    generator = torch.Generator(config.device).manual_seed(0)
    grad_TO, input_TI = (torch.randn(T, size, generator=generator, device=config.device).bfloat16() for size in (O, I))
    ways = _ways(grad_TO, input_TI)
    buffer_OI = torch.zeros(O, I, device=config.device)
    times = medians_ms({name: partial(way, buffer_OI) for name, (_, way) in ways.items()}, config=config)
    sampled = grad_TO[:, :_SAMPLED]
    exact = gemm.wgrad(sampled.double(), input_TI.double())
    rows: list[Row] = []
    for name, (backend, way) in ways.items():
        extra = extra_mib(partial(way, buffer_OI), device=config.device)
        result = way(buffer_OI.zero_())
        result = buffer_OI if result is None else result
        row: Row = {"kind": "time", "tokens": T, "out_features": O, "in_features": I, "way": name, "backend": backend}
        row |= {"median_ms": times[name], "ratio_to_bare": times[name] / times[BARE]}
        row |= {"relative_error": relative_error(result[:_SAMPLED], exact)}
        rows.append(row | {"extra_mib": extra, "main_grad_mib": buffer_OI.nbytes / 2**20})
    return rows


def _ways(
    grad_TO: torch.Tensor, input_TI: torch.Tensor
) -> dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor | None]]]:
    """Return name: (backend, function of main_grad), the chosen backend by its public entry and the others by wish."""
    request = Request(
        product=Product.WGRAD,
        device_type=grad_TO.device.type,
        operand_dtype=grad_TO.dtype,
        output_dtype=torch.float32,
        accumulate=True,
    )

    def by(wish: str, main_grad: torch.Tensor) -> None:
        select.multiply(request, grad_TO, input_TI, out=main_grad, wish=wish)

    def ours(main_grad: torch.Tensor) -> None:
        gemm.wgrad_into(main_grad, grad_TO, input_TI, accumulate=True)

    chosen = select.choose(request).NAME
    others = [
        backend.NAME
        for backend in select.backends(request.device_type)
        if backend.NAME not in (chosen, "reference") and backend.unsupported(request) is None
    ]
    return {
        OURS: (chosen, ours),
        BARE: ("", lambda main_grad: peers.bare(grad_TO.t(), input_TI)),
        ADDED: ("", lambda main_grad: peers.wgrad_and_add(main_grad, grad_TO, input_TI)),
        UPCAST: ("reference", partial(by, "reference")),
        **{f"fused by {name}": (name, partial(by, name)) for name in others},
    }


def verdicts(measured: Sequence[Row]) -> list[Row]:
    """Return the figures of one shape that have a target, beside it."""
    times = {str(row["way"]): number(row, "median_ms") for row in measured}
    ours = next(row for row in measured if row["way"] == OURS)
    memory = number(ours, "extra_mib") / number(ours, "main_grad_mib")
    of = {key: value for key, value in ours.items() if key not in COLUMNS[4:] and key != "kind"}
    return [
        at_most("time of ours over the bare product's", times[OURS] / times[BARE], limit=1.1, of=of),
        at_least("product + add's time over ours", times[ADDED] / times[OURS], limit=1.5, of=of),
        at_least("fp32 upcast's time over ours", times[UPCAST] / times[OURS], limit=4.0, of=of),
        at_most("relative error of ours", number(ours, "relative_error"), limit=1e-6, of=of),
        at_most("extra memory of ours over main_grad", memory, limit=1.0, of=of),
    ]


def _by_case(rows: Sequence[Row]) -> list[list[Row]]:
    cases: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        cases.setdefault((row["threads"], _sizes(row)), []).append(row)
    return list(cases.values())


def _sizes(row: Row) -> str:
    return f"{row['tokens']}x{row['out_features']}x{row['in_features']}"
