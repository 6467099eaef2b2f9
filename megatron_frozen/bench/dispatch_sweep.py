"""The input gradient of a frozen layer over the layouts in which dY comes: the old way, a plain flatten, ours, and the
bare product of contiguous operands.

Shape suffixes: S = sequence, B = batch, O = out features, I = in features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from megatron_frozen import gemm
from megatron_frozen.autograd.linear_products import ProductPlan, start_dgrad
from megatron_frozen.bench.runner import BenchConfig, Row, medians_ms
from megatron_frozen.gemm import peers
from megatron_frozen.layout import fold_leading

# dY [S, B, O] against a weight [O, I]
SHAPES = ((384, 8, 4096, 4096), (384, 16, 4096, 4096), (768, 8, 4096, 4096), (384, 8, 8192, 4096))
SMALL_SHAPES = ((24, 3, 64, 48),)
LOGITS, SMALL_LOGITS = (512, 1, 151936, 896), (32, 1, 512, 48)
OLD, FLATTEN, OURS, BARE = "old", "plain flatten", "ours", "bare product"


def _contiguous(dense: torch.Tensor) -> torch.Tensor:
    return dense


def _hidden_slowest(dense: torch.Tensor) -> torch.Tensor:
    """Strides [B, 1, S B]: folds, though it is not contiguous."""
    return dense.permute(2, 0, 1).contiguous().permute(1, 2, 0)


def _strided_hidden(dense: torch.Tensor) -> torch.Tensor:
    """Strides [2 B O, 2 O, 2]: no GEMM reads it in place."""
    return torch.stack((dense, dense), -1)[..., 0]


def _transposed_leading(dense: torch.Tensor) -> torch.Tensor:
    """A [B, S, O] tensor seen as [S, B, O], as logits are. With B = 1 too: ``contiguous`` would leave the strides."""
    return dense.transpose(0, 1).clone(memory_format=torch.contiguous_format).transpose(0, 1)


def _expanded_middle(dense: torch.Tensor) -> torch.Tensor:
    """One row for all of the batch, as a sum or mean over it gives back."""
    return dense[:, :1].expand_as(dense)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": _contiguous,
    "hidden slowest": _hidden_slowest,
    "strided hidden": _strided_hidden,
    "transposed leading": _transposed_leading,
    "expanded middle": _expanded_middle,
}


def sweep(config: BenchConfig) -> Iterator[Row]:
    """Yield a row for each shape, layout and way; the logits pair as dgrad [S, 1, V] x [V, I] and as forward.

    relative_error: against the bare product, a bf16 result like it."""
    for S, B, O, I in SMALL_SHAPES if config.small else SHAPES:  # noqa: E741
        yield from _rows((S, B, O), I, layouts=list(LAYOUTS), product="dgrad", config=config)
    S, B, V, I = SMALL_LOGITS if config.small else LOGITS  # noqa: E741
    for product, hidden, width in (("dgrad", V, I), ("forward", I, V)):
        yield from _rows(
            (S, B, hidden), width, layouts=["contiguous", "transposed leading"], product=product, config=config
        )


def _rows(
    shape: tuple[int, int, int], width: int, *, layouts: list[str], product: str, config: BenchConfig
) -> Iterator[Row]:
    generator = torch.Generator(config.device).manual_seed(0)
    dense, right = (
        torch.randn(size, generator=generator, device=config.device, dtype=torch.float32).bfloat16()
        for size in (shape, (shape[-1], width) if product == "dgrad" else (width, shape[-1]))
    )
    for layout in layouts:
        given = LAYOUTS[layout](dense)
        ways = _ways(given, right, product=product)
        times = medians_ms(ways, config=config)
        expected = ways[BARE]().double()
        for name, way in ways.items():
            result = way().double().reshape(expected.shape)
            yield {
                "kind": "time", "product": product, "shape": "x".join(map(str, shape)), "width": width,
                "layout": layout, "strides": "x".join(map(str, given.stride())), "way": name,
                "median_ms": times[name], "ratio_to_bare": times[name] / times[BARE],
                "ours_is_faster_by": times[name] / times[OURS],
                "relative_error": float((result - expected).norm() / expected.norm()),
            }  # fmt: skip


def _ways(given: torch.Tensor, right: torch.Tensor, *, product: str) -> dict[str, Callable[[], torch.Tensor]]:
    matrix = right if product == "dgrad" else right.t()
    rows, plan = given.reshape(-1, given.shape[-1]).contiguous(), ProductPlan()

    def ours() -> torch.Tensor:
        folded, fold = fold_leading(given)
        if product == "dgrad":
            return start_dgrad(folded, right, fold=fold, plan=plan)()
        return fold.unfold_output(gemm.forward(folded, right))

    return {
        OLD: lambda: peers.batched(given, matrix),
        FLATTEN: lambda: peers.flattened(given, matrix),
        OURS: ours,
        BARE: lambda: peers.bare(rows, matrix),
    }
