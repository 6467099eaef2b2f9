"""Linear layers over the layouts that their tensors come in: the old way, a plain flatten, ours, and the bare product.

| product | old | plain flatten | ours | bare product |
|---|---|---|---|---|
| forward | matmul of X and W^T | reshape of X | `linear_with_frozen_weight` | mm of contiguous operands |
| dgrad | matmul of dY and W, as Megatron-core had it | reshape of dY | its backward | the same |
| dgrad + wgrad | that, and one mm after a reshape of dY and of X | one reshape of both | the trainable one's | two mm |

X lies in the layout in the forward; dY does in the backwards, with a contiguous X. Where torch makes a batched product
of the old way, and it takes 10 times as long as the bare product and longer than 0.1 s, its time is that of a second
call on an eighth of the sequence, times 8 (samples = 0).

Where each row stands several times in the layout, the bare product multiplies all of them, which says little about
ours. There "distinct rows" is the floor: mm of each row once, contiguous; for dW that of the operands that
`wgrad_operands` makes, outside the timing: X summed, in parts that bf16 can hold. Ours may take a quarter longer where
it has a pass over memory besides: it writes each row of Y as often as it stands there, and reads X to sum it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from megatron_frozen.bench.linear_cases import FULL, HALF, SMALL, Case, cases
from megatron_frozen.bench.runner import (
    BenchConfig,
    Row,
    bar_picture,
    medians_ms,
    once_ms,
    stamp,
    telling,
    text_table,
    write_csv,
)
from megatron_frozen.bench.targets import at_least, at_most, number
from megatron_frozen.diagnostics import Recorder
from megatron_frozen.errors import ConfigError
from megatron_frozen.functional import linear_with_frozen_weight, linear_with_grad_accumulation_and_async_allreduce
from megatron_frozen.gemm import peers
from megatron_frozen.gemm.wgrad_operands import wgrad_operands
from megatron_frozen.layout import fold_leading
from megatron_frozen.testing import relative_error

OLD, FLATTEN, OURS, BARE, DISTINCT = "old", "plain flatten", "ours", "bare product", "distinct rows"
TORCH = "F.linear"
FORWARD, DGRAD, BOTH = "forward", "dgrad", "dgrad + wgrad"
SMALL_CALL, CONTROL = "small call", "control"
COLUMNS = ("case", "product", "way", "median_ms", "samples", "ratio_to_bare", "copied_bytes", "batched_products",
           "relative_error")  # fmt: skip
_SLOW = 10.0  # times the bare product: from here on the old way is not worth waiting for
_LONG_MS = 100.0  # what takes less is worth waiting for, whatever the bare product takes
_PARTS = 8
_NOTHING_TO_WIN = "old way's time over ours, where nothing is to be won"
_ALONE = (False, False, False)  # no fusion, no all-reduce, no sequence parallelism

Ways = dict[str, Callable[[], object]]


def run(config: BenchConfig) -> None:
    """Measure, print tables, write linear.csv and linear.png.

    Raises ConfigError where ``config.only`` names no case.
    """
    mark = stamp(config)
    rows: list[Row] = []
    targets: list[Row] = []
    for measured in measure(config):
        rows += [mark | row for row in measured]
        targets += [mark | row for row in verdicts(measured)]
        print(text_table(measured, COLUMNS), end="\n\n")
    if not rows:
        raise ConfigError(f"no case of this benchmark has '{config.only}' in its name; give a part of one, or leave it")
    path = config.output / "linear.csv"
    with telling(text_table(targets, ("case", "product", "figure", "value", "target", "met")), path=path):
        write_csv(path, rows + targets)
        _draw(path.with_suffix(".png"), rows)


def measure(config: BenchConfig) -> Iterator[list[Row]]:
    """Yield the rows of one case and product after the other."""
    for case in cases(SMALL if config.small else FULL if config.device == "cuda" else HALF):
        if config.only in case.name:
            for product in (FORWARD, DGRAD, BOTH):
                yield _measure(case, product, config=config)
    if config.only in SMALL_CALL:
        for product in (DGRAD, BOTH):
            yield _measure_small_call(product, config=config)


def _measure(case: Case, product: str, *, config: BenchConfig) -> list[Row]:
    config = replace(config, repeats=min(config.repeats, case.max_samples or config.repeats))
    given, ways = _ways(case, product, device=config.device)
    slow_ms = _estimate_ms(ways, config=config)
    timed = {name: way for name, way in ways.items() if name not in slow_ms}
    times = slow_ms | medians_ms(timed, config=config)
    rows: list[Row] = []
    results: dict[str, Sequence[torch.Tensor]] = {}
    for name, way in ways.items():
        row: Row = {
            "kind": "time", "case": case.name, "stands_for": case.stands_for, "product": product,
            "shape": "x".join(map(str, given.shape)), "strides": "x".join(map(str, given.stride())),
            "in_features": case.in_features, "out_features": case.out_features, "way": name,
            "median_ms": times[name], "samples": 0 if name in slow_ms else config.repeats,
            "ratio_to_bare": times[name] / times[BARE], "needs_copy": _needs_copy(case, product),
            "repeats": case.repeats,
        }  # fmt: skip
        if name not in slow_ms:
            with Recorder() as seen:
                results[name] = _tensors(way())
            row |= {"copied_bytes": seen.copied_bytes(), "batched_products": seen.count("aten.bmm")}
        rows.append(row)
    for row in rows:
        if row["way"] in results.keys() - {DISTINCT}:  # that has fewer rows
            row["relative_error"] = _error(results[str(row["way"])], results[BARE])
    return rows


def _estimate_ms(ways: Ways, *, config: BenchConfig) -> dict[str, float]:
    """Return the old way's time where it is far above the bare product's: that of a part of the sequence, times parts.

    Its products go over the sequence one by one, so that the time is proportional to its length; that of a weight
    gradient, one product, is a small part of it."""
    old = ways[OLD]
    assert isinstance(old, partial)
    given, weight, *inputs = old.args
    length = max(given.shape[0] // _PARTS, 1)
    part = partial(old.func, given[:length], weight, *(input_[:length] for input_ in inputs))
    with Recorder() as seen:
        part()
    if not seen.count("aten.bmm"):
        return {}
    whole_ms = once_ms(part, config=config) * given.shape[0] / length
    limit_ms = max(_SLOW * once_ms(ways[BARE], config=config), _LONG_MS)
    return {OLD: whole_ms} if whole_ms > limit_ms else {}


def _needs_copy(case: Case, product: str) -> bool:
    """Return whether the layout leaves no way around a copy: of an operand, or of repeated rows into an output."""
    if product == FORWARD:
        return not case.folds or case.repeats > 1
    return not case.folds or (product == BOTH and not case.in_order)


def _ways(case: Case, product: str, *, device: str) -> tuple[torch.Tensor, Ways]:
    """Return the tensor that lies in the case's layout, and the ways to multiply it."""
    generator = torch.Generator(device).manual_seed(0)

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator, device=device).bfloat16()

    weight = random(case.out_features, case.in_features)
    if product == FORWARD:
        given = case.layout(random(*case.lead, case.in_features))
        rows = given.reshape(-1, case.in_features).contiguous()
        return given, {
            OLD: partial(peers.batched, given, weight.t()),
            FLATTEN: partial(peers.flattened, given, weight.t()),
            OURS: partial(linear_with_frozen_weight, given, weight, None, *_ALONE),
            BARE: partial(peers.bare, rows, weight.t()),
            **_distinct(given, weight.t()),
        }
    given = case.layout(random(*case.lead, case.out_features))
    rows = given.reshape(-1, case.out_features).contiguous()
    input_ = random(*case.lead, case.in_features).requires_grad_()
    if product == DGRAD:
        output = linear_with_frozen_weight(input_, weight, None, *_ALONE)
        return given, {
            OLD: partial(peers.batched, given, weight),
            FLATTEN: partial(peers.flattened, given, weight),
            OURS: partial(torch.autograd.grad, output, input_, given, retain_graph=True),
            BARE: partial(peers.bare, rows, weight),
            **_distinct(given, weight),
        }
    plain, trainable = input_.detach(), weight.clone().requires_grad_()
    output = linear_with_grad_accumulation_and_async_allreduce(input_, trainable, None, *_ALONE)
    return given, {
        OLD: partial(peers.batched_gradients, given, weight, plain),
        FLATTEN: partial(peers.flattened_gradients, given, weight, plain),
        OURS: partial(torch.autograd.grad, output, (input_, trainable), given, retain_graph=True),
        BARE: partial(peers.bare_gradients, rows, weight, (rows, plain.view(-1, case.in_features))),
        **_distinct(given, weight, plain),
    }


def _distinct(given: torch.Tensor, right: torch.Tensor, input_: torch.Tensor | None = None) -> Ways:
    """Return the way that multiplies each row once, and with ``input_`` the gradient of ``right`` too; none where no
    row stands twice."""
    rows, fold = fold_leading(given)
    if fold.repeats == 1:
        return {}
    rows = rows.contiguous()
    if input_ is None:
        return {DISTINCT: partial(peers.bare, rows, right)}
    grad_RO, input_RI = wgrad_operands(given, input_, dtype=right.dtype)
    operands = (grad_RO.contiguous(), input_RI.contiguous())
    return {DISTINCT: partial(peers.bare_gradients, rows, right, operands)}


def _measure_small_call(product: str, *, config: BenchConfig) -> list[Row]:
    """Forward and backward of one token of 64 features: what a call costs in Python."""
    input_, grad_output = (torch.ones(1, 1, 64, device=config.device, dtype=torch.bfloat16) for _ in range(2))
    weight = torch.ones(64, 64, device=config.device, dtype=torch.bfloat16)
    linear = linear_with_frozen_weight
    if product == BOTH:
        weight.requires_grad_()
        linear = linear_with_grad_accumulation_and_async_allreduce
    needed = [input_.requires_grad_(), *([weight] if product == BOTH else [])]

    def ours() -> object:
        return torch.autograd.grad(linear(input_, weight, None, *_ALONE), needed, grad_output)

    times = medians_ms({TORCH: partial(peers.linear_step, input_, weight, grad_output), OURS: ours}, config=config)
    return [
        {"kind": "time", "case": SMALL_CALL, "product": f"forward + {product}", "shape": "1x1x64", "in_features": 64,
         "out_features": 64, "way": name, "median_ms": time, "samples": config.repeats}
        for name, time in times.items()
    ]  # fmt: skip


def _tensors(result: object) -> Sequence[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else result  # pyright: ignore[reportReturnType]


def _error(results: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Return the largest relative error against the bare products, bf16 results like these."""
    return max(relative_error(ours.reshape(bare.shape), bare) for ours, bare in zip(results, expected, strict=True))


def verdicts(measured: Sequence[Row]) -> list[Row]:
    """Return the figures of one case and product that have a target, beside it."""
    times = {str(row["way"]): number(row, "median_ms") for row in measured}
    ours = next(row for row in measured if row["way"] == OURS)
    of = {key: ours[key] for key in ("case", "product", "shape", "in_features", "out_features")}
    if TORCH in times:
        return [at_most("time of ours over F.linear's", times[OURS] / times[TORCH], limit=1.3, of=of)]
    limit = 1.25 if ours["needs_copy"] else 1.05
    is_repeating = number(ours, "repeats") > 1
    floor, figure = BARE, "time of ours over the bare product's"
    if is_repeating:
        floor, figure = DISTINCT, "time of ours over that of the distinct rows"
    rows = [
        at_most(figure, times[OURS] / times[floor], limit=limit, of=of),
        at_most("time of ours over the plain flatten's", times[OURS] / times[FLATTEN], limit=1.03, of=of),
    ]
    if is_repeating:
        rows.append(at_least("plain flatten's time over ours", times[FLATTEN] / times[OURS], limit=4, of=of))
    if not ours["needs_copy"]:
        rows.append(at_most("bytes that ours copied", number(ours, "copied_bytes"), limit=0, of=of))
    if str(ours["case"]).startswith(CONTROL):
        rows.append(at_most(_NOTHING_TO_WIN, times[OLD] / times[OURS], limit=1.05, of=of))
    return rows


def _draw(path: Path, rows: Sequence[Row]) -> None:
    groups: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["product"] == DGRAD and "ratio_to_bare" in row:
            groups.setdefault(str(row["case"]), {})[str(row["way"])] = number(row, "ratio_to_bare")
    if groups:
        bar_picture(path, groups, title="dX of a frozen linear", label="time / bare product's time")
