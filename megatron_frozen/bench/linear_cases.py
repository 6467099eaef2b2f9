"""The tensors that `bench linear` multiplies: leading dims, sizes, and how they lie in memory.

Shape suffixes: S = sequence, B = batch, O = out features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

Layout = Callable[[torch.Tensor], torch.Tensor]


def _contiguous(dense: torch.Tensor) -> torch.Tensor:
    return dense


def _hidden_slowest(dense: torch.Tensor) -> torch.Tensor:
    """Strides [B, 1, S B] of a [S, B, O]: folds, though it is not contiguous."""
    return dense.permute(2, 0, 1).contiguous().permute(1, 2, 0)


def _strided_hidden(dense: torch.Tensor) -> torch.Tensor:
    """Strides [2 B O, 2 O, 2]: no GEMM reads it in place."""
    return torch.stack((dense, dense), -1)[..., 0]


def _transposed_leading(dense: torch.Tensor) -> torch.Tensor:
    """A [B, S, O] tensor seen as [S, B, O], as logits are. With B = 1 too: ``contiguous`` would leave the strides."""
    return dense.transpose(0, 1).clone(memory_format=torch.contiguous_format).transpose(0, 1)


def _expanded_middle(dense: torch.Tensor) -> torch.Tensor:
    """One row for all of the batch, as a sum over it gives back."""
    return dense[:, :1].expand_as(dense)


LAYOUTS: dict[str, Layout] = {
    "contiguous": _contiguous,
    "hidden slowest": _hidden_slowest,
    "strided hidden": _strided_hidden,
    "transposed leading": _transposed_leading,
    "expanded middle": _expanded_middle,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One shape in one layout."""

    name: str
    """What the CSV and ``--only`` call it."""
    lead: tuple[int, ...]
    """Leading dims: [sequence, batch] or more."""
    out_features: int
    """Last dim of dY."""
    in_features: int
    """Last dim of X."""
    layout: Layout
    """From a contiguous tensor to one of its shape and values that lies otherwise."""
    stands_for: str = ""
    """The shape it is scaled down from."""
    folds: bool = True
    """Whether some order of its leading dims collapses, so that forward and dgrad need no copy."""
    in_order: bool = True
    """Whether its rows lie in the order of a contiguous X, so that the weight gradient needs no copy."""
    repeats: int = 1
    """How often each row stands in it."""
    max_samples: int | None = None
    """The most samples of each way, where its products take long; None: as many as are asked for."""


def _rank_4(dense: torch.Tensor) -> torch.Tensor:
    """A [D1, D2, D0, H] tensor seen as [D0, D1, D2, H]."""
    return dense.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3)


def _slice_of_dim_1(dense: torch.Tensor) -> torch.Tensor:
    """The first half of dim 1 of a tensor twice as wide: the inner dims collapse, the outer one does not."""
    return torch.cat((dense, dense), 1)[:, : dense.shape[1]]


_ORDER: dict[str, dict[str, bool]] = {
    "contiguous": {},
    "hidden slowest": {},
    "strided hidden": {"folds": False},
    "transposed leading": {"in_order": False},
    "expanded middle": {"in_order": False},
}


def _swept(layout: str, *, lead: tuple[int, int], sizes: tuple[int, int], stands_for: str = "") -> Case:
    shape = "x".join(map(str, (*lead, sizes[0])))
    return Case(
        name=f"{layout} {shape}",
        lead=lead,
        out_features=sizes[0],
        in_features=sizes[1],
        layout=LAYOUTS[layout],
        stands_for=stands_for,
        repeats=lead[1] if layout == "expanded middle" else 1,
        **_ORDER[layout],
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How large the cases are."""

    sequence: int
    """Of the layouts, over 8 rows of a batch; one of them takes twice the sequence, one twice the rows."""
    width: int
    """In and out features of the layouts; one of them gives out twice as many."""
    logits: tuple[int, int, int]
    """Tokens, vocabulary and width of the output layer."""
    control: tuple[int, int, int]
    """Tokens, out and in features of the negative control."""


FULL = Sizes(sequence=384, width=4096, logits=(512, 151936, 896), control=(4096, 10240, 8192))
HALF = Sizes(sequence=192, width=2048, logits=(256, 32000, 896), control=(4096, 10240, 8192))
SMALL = Sizes(sequence=24, width=64, logits=(32, 512, 48), control=(128, 80, 64))
_CHANGED_ROWS = ("transposed leading", "expanded middle")


def cases(sizes: Sizes) -> list[Case]:
    """Return the layouts at 4 shapes, the logits, rank 4, the slice and the negative control.

    On a CPU the old way takes 21 s a call at FULL sizes; at others the three further shapes come in two layouts, 11 in
    all. The control has its full size at HALF too, where a product takes 0.8 s: 3 samples of each way, some 85 s in
    all on 2 threads. SMALL only tries the code."""
    s, h = sizes.sequence, sizes.width
    is_full = sizes == FULL
    found: list[Case] = []
    for lead, out, stands_for in (
        ((s, 8), h, "384x8x4096, 4096 in"),
        ((s, 16), h, "384x16x4096, 4096 in"),
        ((2 * s, 8), h, "768x8x4096, 4096 in"),
        ((s, 8), 2 * h, "384x8x8192, 4096 in"),
    ):
        found += [
            _swept(layout, lead=lead, sizes=(out, h), stands_for="" if is_full else stands_for)
            for layout in (LAYOUTS if is_full or not found else _CHANGED_ROWS)
        ]
    tokens, vocabulary, width = sizes.logits
    for layout in ("contiguous", "transposed leading"):
        case = _swept(layout, lead=(tokens, 1), sizes=(vocabulary, width))
        found.append(replace(case, name=f"logits, {layout}", in_order=True))  # one batch row: no order to change
    rank_4 = Case(name="", lead=(s // 4, 4, 8), out_features=h, in_features=h, layout=_rank_4)
    found.append(replace(rank_4, name="rank 4, permuted", in_order=False))
    found.append(replace(rank_4, name="rank 4, slice of dim 1", layout=_slice_of_dim_1, folds=False))
    tokens, out, width = sizes.control
    stands_for = "" if sizes.control == FULL.control else "4096x1x10240, 8192 in"
    control = _swept("contiguous", lead=(tokens, 1), sizes=(out, width), stands_for=stands_for)
    max_samples = 3 if sizes == HALF else None
    found.append(replace(control, name="control, Llama-70B's QKV", max_samples=max_samples))
    return found
