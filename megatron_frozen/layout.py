"""Folding: any [..., H] tensor as one 2-D matrix for a GEMM, with no copy wherever its strides allow one.

A matrix product over a tensor with leading dims is one 2-D GEMM only if those dims collapse into a single row
dimension. Rows are independent, so their order is free: sorting the leading dims by stride makes every permuted
layout collapse, dims of size 1 have no say, and a dim of stride 0 holds one row only, which is computed once and
expanded afterwards. What still cannot collapse is copied, once.

Shape suffixes: R = rows of the folded matrix, H = hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from megatron_frozen.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Fold:
    """How the leading dims of one tensor became the rows of a matrix, and how to give them back.

    lead_shape: the leading dims as they were. order: those that hold distinct rows, slowest first; the others have
    size 1 or stride 0. num_rows: product of their sizes. repeats: how many times each row stands in the tensor.
    is_view: whether the matrix aliases the tensor. is_natural: whether the rows stand in their own order, each once.
    """

    lead_shape: tuple[int, ...]
    order: tuple[int, ...]
    num_rows: int
    repeats: int
    is_view: bool
    is_natural: bool

    def unfold(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return ``matrix`` [R, N] as a view [*lead_shape, N]; repeated rows come back as stride-0 dims."""
        num_columns = matrix.shape[-1]
        if self.is_natural:
            return matrix.view(*self.lead_shape, num_columns)
        single = tuple(dim for dim in range(len(self.lead_shape)) if dim not in self.order)
        source = single + self.order  # the dim that each dim of `spread` stands for
        spread = matrix.view([1] * len(single) + [self.lead_shape[dim] for dim in self.order] + [num_columns])
        inverse = [source.index(dim) for dim in range(len(source))]
        return spread.permute(*inverse, len(source)).expand(*self.lead_shape, num_columns)

    def unfold_output(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return ``matrix`` [R, N], a fresh product, as [*lead_shape, N] that its user may write into.

        Autograd forbids in-place writes to a view that a custom function returns, so this is a tensor of its own over
        the same bytes; only repeated rows are written out, since no two elements of an output may share a place."""
        if self.is_natural:
            return torch.ops.aten._unsafe_view(matrix, [*self.lead_shape, matrix.shape[-1]])
        view = self.unfold(matrix)
        if self.repeats > 1:
            return view.clone(memory_format=torch.contiguous_format)
        if torch.compiler.is_compiling():
            return view
        storage = matrix.untyped_storage()
        return matrix.new_empty(0).set_(storage, view.storage_offset(), view.size(), view.stride())


def collapsed_stride(sizes: tuple[int, ...], strides: tuple[int, ...]) -> int | None:
    """Return the row stride of dims that collapse in the given order, or None; dims of size 1 are passed over."""
    row_stride = None
    expected = None
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size == 1:
            continue
        if expected is not None and stride != expected:
            return None
        if row_stride is None:
            row_stride = stride
        expected = stride * size
    return 0 if row_stride is None else row_stride


def is_gemm_operand(num_rows: int, num_columns: int, *, row_stride: int, column_stride: int) -> bool:
    """Return whether a BLAS reads the matrix in place: one stride is 1 and the other spans it."""
    if num_columns == 1 or column_stride == 1:
        return num_rows == 1 or row_stride >= num_columns
    return row_stride == 1 and num_rows > 1 and column_stride >= num_rows


def _slowest_first(dims: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Return ``dims`` by falling stride, equal ones in their order; by comparisons, as no ``sorted`` takes symbols."""
    order: list[int] = []
    for dim in dims:
        place = len(order)
        while place > 0 and strides[order[place - 1]] < strides[dim]:
            place -= 1
        order.insert(place, dim)
    return tuple(order)


def repeated_dims(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """Return the leading dims along which a tensor [..., H] holds one row more than once: those of stride 0."""
    return tuple(dim for dim in range(len(shape) - 1) if stride[dim] == 0 and shape[dim] > 1)


def _plan_fold(shape: tuple[int, ...], stride: tuple[int, ...]) -> Fold:
    lead, lead_stride = shape[:-1], stride[:-1]
    dims = range(len(lead))
    repeated = repeated_dims(shape, stride)
    distinct = tuple(d for d in dims if lead[d] != 1 and d not in repeated)
    num_rows = 1
    repeats = 1
    for d in dims:
        if d in distinct:
            num_rows *= lead[d]
        else:
            repeats *= lead[d]
    natural = repeats == 1
    if num_rows == 0 or shape[-1] == 0:  # nothing is stored, so nothing can be copied
        if repeats != 1:
            distinct, num_rows = tuple(dims), num_rows * repeats
        return Fold(lead, distinct, num_rows, 1, is_view=True, is_natural=True)
    by_stride = _slowest_first(distinct, lead_stride)
    for order in (distinct, by_stride):
        row_stride = collapsed_stride(tuple(lead[d] for d in order), tuple(lead_stride[d] for d in order))
        if row_stride is not None and is_gemm_operand(
            num_rows, shape[-1], row_stride=row_stride, column_stride=stride[-1]
        ):
            return Fold(lead, order, num_rows, repeats, is_view=True, is_natural=natural and order == distinct)
    return Fold(lead, distinct, num_rows, repeats, is_view=False, is_natural=natural)


_cached_plan = lru_cache(maxsize=4096)(_plan_fold)


def plan_fold(shape: tuple[int, ...], stride: tuple[int, ...]) -> Fold:
    """Return the fold of a tensor of this ``shape`` and ``stride``; pure, so it is remembered.

    Raises LayoutError for a tensor without dims.
    """
    if not shape:
        raise LayoutError("a tensor without dims has no hidden dim to multiply; give one of shape [..., hidden]")
    if torch.compiler.is_compiling():  # sizes may be symbols, which no cache can hash
        return _plan_fold(shape, stride)
    return _cached_plan(shape, stride)


def fold_leading(tensor: torch.Tensor) -> tuple[torch.Tensor, Fold]:
    """Return ``tensor`` [..., H] as a matrix [R, H] that a GEMM reads in place, and the way back.

    No bytes are copied for leading dims that collapse in some order, for size-1 dims of any stride, for stride-0 dims
    (dropped: R counts distinct rows only), for a transposed hidden dim. Otherwise the distinct rows are copied once.
    Any rank from 1, any dtype, any device, zero sizes included. ``fold.unfold(matrix)`` restores the leading dims of
    any [R, N] result as a view.

    Raises LayoutError for a tensor without dims.
    """
    fold = plan_fold(tuple(tensor.shape), tensor.stride())
    return _folded(tensor, fold), fold


def _folded(tensor: torch.Tensor, fold: Fold) -> torch.Tensor:
    num_columns = tensor.shape[-1]
    if fold.is_natural and fold.is_view:
        return tensor if tensor.dim() == 2 else tensor.reshape(fold.num_rows, num_columns)
    keep = tensor
    for dim in range(len(fold.lead_shape) - 1, -1, -1):
        if dim not in fold.order:
            keep = keep.select(dim, 0)
    rank = {dim: i for i, dim in enumerate(sorted(fold.order))}
    keep = keep.permute(*(rank[dim] for dim in fold.order), len(fold.order))
    if not fold.is_view:
        keep = keep.contiguous()
    return keep.reshape(fold.num_rows, num_columns)


def _common_order(
    lead: tuple[int, ...], *, first: tuple[int, ...], second: tuple[int, ...], first_is_larger: bool
) -> tuple[int, ...]:
    """Return the order of leading dims, given both tensors' lead strides, that copies fewest bytes; the natural one
    if equal.
    """

    def collapses(order: tuple[int, ...], strides: tuple[int, ...]) -> bool:
        return collapsed_stride(tuple(lead[d] for d in order), tuple(strides[d] for d in order)) is not None

    dims = tuple(range(len(lead)))
    by_first = _slowest_first(dims, first)
    by_second = _slowest_first(dims, second)
    larger, smaller = (first, second) if first_is_larger else (second, first)
    best, best_worth = dims, -1
    for order in (dims, by_first, by_second):
        worth = 2 * collapses(order, larger) + collapses(order, smaller)
        if worth > best_worth:
            best, best_worth = order, worth
    return best


_cached_order = lru_cache(maxsize=4096)(_common_order)


def fold_pair(first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [..., M] and [..., N] with equal leading dims as [R, M] and [R, N] whose rows stand in one common order.

    This is what a weight gradient needs, as it sums over rows. Neither is copied where some order collapses
    both; else the smaller one is. Stride-0 dims are written out; ``gemm.wgrad_operands`` comes here where summing them
    away would not make fewer rows.

    Raises LayoutError where the leading dims differ.
    """
    *lead, first_width = first.shape
    *second_lead, second_width = second.shape
    if lead != second_lead:
        raise LayoutError(
            f"a weight gradient was asked of leading dims {lead} and {second_lead}; "
            f"give both operands the same leading dims"
        )
    num_rows = 1
    for size in lead:
        num_rows *= size
    if first.is_contiguous() and second.is_contiguous():
        return first.reshape(num_rows, first_width), second.reshape(num_rows, second_width)
    common_order = _common_order if torch.compiler.is_compiling() else _cached_order  # no cache can hash symbols
    order = common_order(
        tuple(lead),
        first=first.stride()[:-1],
        second=second.stride()[:-1],
        first_is_larger=first_width >= second_width,
    )
    last = len(lead)
    return (
        first.permute(*order, last).reshape(num_rows, first_width),
        second.permute(*order, last).reshape(num_rows, second_width),
    )
