"""fold_leading and fold_pair over any layout: values, bytes copied, and the way back."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_frozen.diagnostics import Recorder
from megatron_frozen.errors import LayoutError
from megatron_frozen.layout import collapsed_stride, fold_leading, fold_pair, is_gemm_operand, plan_fold

SETTINGS = settings(max_examples=400)


def storage_for(sizes: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """Return numbered storage big enough for a tensor of these sizes and strides."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True) if size > 0)
    return torch.arange(float(max(reach, 1)))


@st.composite
def tensors(draw: st.DrawFn, *, max_size: int = 4) -> torch.Tensor:
    """Any tensor of rank 1 to 6: permuted, expanded, sliced, overlapping, of size 0 or 1, of wild size-1 strides."""
    rank = draw(st.integers(1, 6))
    sizes = draw(st.lists(st.integers(0, max_size), min_size=rank, max_size=rank))
    kind = draw(st.sampled_from(["dense", "sliced", "any"]))
    if kind == "any":
        strides = draw(st.lists(st.integers(0, 12), min_size=rank, max_size=rank))
        return storage_for(sizes, strides).as_strided(sizes, strides)
    order = draw(st.permutations(range(rank)))
    gaps = [draw(st.integers(0, 2)) if kind == "sliced" else 0 for _ in range(rank)]
    base = torch.arange(float(math.prod(size + gap for size, gap in zip(sizes, gaps, strict=True))))
    base = base.view([sizes[d] + gaps[d] for d in order])
    for place, dim in enumerate(order):
        base = base.narrow(place, 0, sizes[dim])
    tensor = base.permute([order.index(d) for d in range(rank)])
    expanded = [draw(st.integers(2, 3)) if size == 1 and draw(st.booleans()) else size for size in sizes]
    tensor = tensor.expand(expanded)
    if draw(st.booleans()):  # a size-1 dim may carry any stride
        strides = [99 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
        tensor = tensor.as_strided(tensor.shape, strides)
    return tensor


def distinct_rows(tensor: torch.Tensor) -> int:
    """Return the product of the leading dims that are not broadcast."""
    pairs = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    return math.prod(1 if size > 1 and stride == 0 else size for size, stride in pairs)


def needs_copy(tensor: torch.Tensor) -> bool:
    """Decide by trying every order of the leading dims, independently of the code under test."""
    rows, columns = distinct_rows(tensor), tensor.shape[-1]
    dims = [
        (size, stride)
        for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
        if size != 1 and stride != 0
    ]
    if tensor.numel() == 0:
        return False
    for order in itertools.permutations(dims):
        if all(order[i][1] == order[i + 1][1] * order[i + 1][0] for i in range(len(order) - 1)):
            row_stride = order[-1][1] if order else columns
            column_stride = 1 if columns == 1 else tensor.stride(-1)
            if column_stride == 1 and (rows == 1 or row_stride >= columns):
                return False
            if rows > 1 and row_stride == 1 and column_stride >= rows:
                return False
    return True


@SETTINGS
@given(tensors())
def test_fold_equals_reshape_and_copies_only_what_cannot_collapse(tensor: torch.Tensor) -> None:
    with Recorder() as seen:
        matrix, fold = fold_leading(tensor)
    expected_bytes = distinct_rows(tensor) * tensor.shape[-1] * tensor.element_size() if needs_copy(tensor) else 0
    assert seen.copied_bytes() == expected_bytes
    assert len(seen.copies()) <= 1
    restored = fold.unfold(matrix)
    assert torch.equal(restored, tensor)
    assert torch.equal(restored.reshape(-1), tensor.reshape(-1))
    if tensor.numel():
        assert matrix.shape == (distinct_rows(tensor), tensor.shape[-1])
        assert fold.num_rows * fold.repeats == tensor.numel() // tensor.shape[-1]
    assert fold.is_view == (expected_bytes == 0)


@SETTINGS
@given(tensors())
def test_a_product_of_the_fold_is_the_product_of_the_tensor(tensor: torch.Tensor) -> None:
    weight = torch.arange(float(tensor.shape[-1] * 2)).view(tensor.shape[-1], 2)
    matrix, fold = fold_leading(tensor)
    product = matrix @ weight
    expected = torch.matmul(tensor, weight)
    assert torch.equal(fold.unfold(product), expected)
    output = fold.unfold_output(product)
    assert torch.equal(output, expected)
    output.add_(1)  # no two elements share a place
    assert torch.equal(output, expected + 1)


@SETTINGS
@given(tensors(), st.randoms(use_true_random=False))
def test_a_pair_shares_one_order_of_rows(tensor: torch.Tensor, random: Random) -> None:
    rank = tensor.dim()
    other_order = list(range(rank - 1))
    random.shuffle(other_order)
    lead = list(tensor.shape[:-1])
    other = torch.randint(-9, 9, [*(lead[d] for d in other_order), 3]).float()
    other = other.permute([other_order.index(d) for d in range(rank - 1)] + [rank - 1])
    left, right = fold_pair(tensor, other)
    rows = math.prod(lead)
    assert (left.shape[0], right.shape[0]) == (rows, rows)
    expected = tensor.reshape(rows, tensor.shape[-1]).t() @ other.reshape(rows, 3)
    assert torch.equal(left.t() @ right, expected)  # whole numbers, so exact in any order


def test_a_pair_of_one_permuted_layout_is_not_copied() -> None:
    grad, x = torch.randn(3, 6, 5).transpose(0, 1), torch.randn(3, 6, 7).transpose(0, 1)
    with Recorder() as seen:
        fold_pair(grad, x)
    assert seen.copied_bytes() == 0


def test_a_pair_of_two_layouts_copies_the_smaller() -> None:
    grad, x = torch.randn(3, 6, 50).transpose(0, 1), torch.randn(6, 3, 7)
    with Recorder() as seen:
        fold_pair(grad, x)
    assert seen.copied_bytes() == x.numel() * x.element_size()


def test_a_pair_of_other_leading_dims_is_refused() -> None:
    with pytest.raises(LayoutError, match="give both operands the same leading dims"):
        fold_pair(torch.randn(2, 3, 5), torch.randn(3, 2, 7))


def test_a_tensor_without_dims_is_refused() -> None:
    with pytest.raises(LayoutError, match="a tensor without dims has no hidden dim"):
        fold_leading(torch.tensor(1.0))


def test_the_default_stride_of_a_size_1_dim_does_not_matter() -> None:
    """Case 2: a size-1 dim with a big stride."""
    tensor = torch.randn(60000).as_strided((6, 1, 5), (5, 9999, 1))
    assert tensor.is_contiguous()
    matrix, _ = fold_leading(tensor)
    assert matrix.data_ptr() == tensor.data_ptr()
    assert matrix.stride() == (5, 1)
    gap = torch.empty_strided((4, 1, 8), (16, 4, 1)).normal_()
    matrix, _ = fold_leading(gap)
    assert (matrix.data_ptr(), matrix.stride()) == (gap.data_ptr(), (16, 1))


def test_folding_a_gap_stays_a_view_under_compile() -> None:
    """Case 2 under torch.compile."""

    @torch.compile(fullgraph=True, backend="aot_eager")
    def folded(tensor: torch.Tensor) -> torch.Tensor:
        return fold_leading(tensor)[0]

    gap = torch.empty_strided((4, 1, 8), (16, 4, 1)).normal_()
    matrix = folded(gap)
    assert (matrix.data_ptr(), matrix.stride()) == (gap.data_ptr(), (16, 1))


def test_a_broadcast_dim_is_one_row() -> None:
    matrix, fold = fold_leading(torch.randn(4, 1, 5).expand(4, 8, 5))
    assert matrix.shape == (4, 5)
    assert fold.repeats == 8
    assert fold.unfold(torch.randn(4, 3)).stride() == (3, 0, 1)


def test_plans_are_remembered() -> None:
    assert plan_fold((3, 6, 5), (5, 15, 1)) is plan_fold((3, 6, 5), (5, 15, 1))


def test_the_pure_parts() -> None:
    assert collapsed_stride((6, 1, 3), (15, 999, 5)) == 5
    assert collapsed_stride((6, 3), (5, 30)) is None
    assert collapsed_stride((1, 1), (7, 9)) == 0
    assert is_gemm_operand(6, 5, row_stride=8, column_stride=1)
    assert is_gemm_operand(6, 5, row_stride=1, column_stride=6)
    assert not is_gemm_operand(6, 5, row_stride=10, column_stride=2)
    assert not is_gemm_operand(6, 5, row_stride=2, column_stride=1)
