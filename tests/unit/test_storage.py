"""Parts that adjoin in memory: seen, joined without a copy, moved together."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import nn

from megatron_frozen.errors import LayoutError
from megatron_frozen.storage import adjacent_view, join, repack_, split_rows

SIZES = (3, 1, 4)


def adjacent(*trailing: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(part) for part in split_rows(torch.randn(8, *trailing, dtype=dtype), SIZES)]


@pytest.mark.parametrize("trailing", [(5,), ()], ids=["weights", "biases"])
def test_adjacent_parts_join_as_a_view(trailing: tuple[int, ...]) -> None:
    parts = adjacent(*trailing)
    view = join(parts)
    assert view.data_ptr() == parts[0].data_ptr()
    assert not view.requires_grad
    torch.testing.assert_close(view, torch.cat(list(parts)).detach(), rtol=0, atol=0)


def test_one_part_is_its_own_view_whatever_its_strides() -> None:
    part = torch.randn(5, 3).t()
    view = join([part])
    assert (view.data_ptr(), view.stride()) == (part.data_ptr(), part.stride())


class Marked(torch.Tensor):
    """Of a class whose numbers might lie elsewhere."""


def _disjoint() -> dict[str, list[torch.Tensor]]:
    full = torch.randn(8, 5)
    a, b, c = split_rows(full, SIZES)
    spread = torch.randn(9, 5)
    return {
        "order": [b, a, c],
        "gap": [spread[:3], spread[4:5], spread[5:]],
        "overlap": [full[:3], full[2:3], full[3:]],
        "own storages": [part.clone() for part in (a, b, c)],
        "dtypes": [a, b.double(), c],
        "strides": [torch.randn(5, 3).t(), b, c],
        "widths": [torch.randn(10, 5)[:, :5], torch.randn(2, 5)],
        "empty first": [torch.empty(0, 5), a, b],
        "subclass": [a.as_subclass(Marked), b, c],
    }


@pytest.mark.parametrize("kind", _disjoint())
def test_other_parts_are_copied_once(kind: str) -> None:
    parts = _disjoint()[kind]
    assert adjacent_view(parts) is None
    torch.testing.assert_close(join(parts), torch.cat(parts), rtol=0, atol=0)


@pytest.mark.parametrize("stride", [1, 5, 40])
def test_the_stride_of_a_single_row_has_no_say(stride: int) -> None:
    full = torch.randn(8, 5)
    for whole, first in (
        (full, full.as_strided((1, 5), (stride, 1))),
        (full.view(40), full.as_strided((1,), (stride,))),
    ):
        parts = [first, whole[1:4]]
        assert join(parts).data_ptr() == full.data_ptr()
        torch.testing.assert_close(join(parts), torch.cat(parts), rtol=0, atol=0)


def test_two_storages_over_the_same_memory_do_not_adjoin() -> None:
    full = torch.randn(8, 5)
    other = torch.from_numpy(full.numpy())
    assert other.data_ptr() == full.data_ptr()
    assert adjacent_view([full[:3], other[3:]]) is None


def test_an_empty_part_within_a_buffer_adjoins() -> None:
    parts = split_rows(torch.randn(4, 5), [0, 4, 0])
    assert join(parts).data_ptr() == parts[1].data_ptr()


def test_parts_on_meta_or_with_freed_storage_do_not_adjoin() -> None:
    assert adjacent_view(split_rows(torch.empty(8, 5, device="meta"), SIZES)) is None
    parts = adjacent(5)
    parts[0].untyped_storage().resize_(0)
    assert adjacent_view(parts) is None


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = adjacent(5)

    def parts(self) -> list[nn.Parameter]:
        return [self.a, self.b, self.c]


def _reloaded(holder: Holder) -> None:
    buffer = io.BytesIO()
    torch.save(holder.state_dict(), buffer)
    buffer.seek(0)
    holder.load_state_dict(torch.load(buffer), assign=True)


def _stepped(holder: Holder) -> None:
    for part in holder.parts():
        part.grad = torch.ones_like(part)
    torch.optim.AdamW(holder.parameters()).step()


KEEP = {
    "load_state_dict": lambda holder: holder.load_state_dict(Holder().state_dict()),
    "save and load assigned": _reloaded,
    "optimizer step": _stepped,
    "to() that changes nothing": lambda holder: holder.float().to("cpu"),
}


@pytest.mark.parametrize("change", KEEP)
def test_adjacency_survives(change: str) -> None:
    holder = Holder()
    KEEP[change](holder)
    assert adjacent_view(holder.parts()) is not None


LOSE: dict[str, Callable[[Holder], Holder]] = {"deepcopy": copy.deepcopy, "cast": lambda holder: holder.double()}


@pytest.mark.parametrize("change", LOSE)
def test_adjacency_is_lost_and_repacked(change: str) -> None:
    holder = LOSE[change](Holder())
    before = [part.detach().clone() for part in holder.parts()]
    identities = [id(part) for part in holder.parts()]
    assert adjacent_view(holder.parts()) is None
    assert repack_(holder.parts())
    assert adjacent_view(holder.parts()) is not None
    assert [id(part) for part in holder.parts()] == identities
    for part, value in zip(holder.parts(), before, strict=True):
        torch.testing.assert_close(part.detach(), value, rtol=0, atol=0)


def test_repacking_leaves_what_others_hold() -> None:
    flat = torch.randn(60)
    in_a_flat_buffer = [flat[20:35].view(3, 5), flat[:20].view(4, 5)]
    for parts in (in_a_flat_buffer, [torch.randn(3, 5), torch.randn(4, 6)], [torch.randn(3), torch.randn(3).double()]):
        pointers = [part.data_ptr() for part in parts]
        assert not repack_(parts)
        assert [part.data_ptr() for part in parts] == pointers


def test_repacking_leaves_parts_that_overlap_beside_what_others_hold() -> None:
    full = torch.randn(8, 5)
    for parts in ([full[:4], full[:4]], [full[:6], full[4:6]], [full[:2], full[4:8], full[6:8]]):
        assert not repack_(parts)
        assert all(part.untyped_storage().data_ptr() == full.data_ptr() for part in parts)


def test_rows_are_cut_from_a_dense_tensor_of_their_sum() -> None:
    for full in (torch.randn(9, 5), torch.randn(5, 8).t()):
        with pytest.raises(LayoutError, match=r"cannot be cut into rows of \[3, 1, 4\]"):
            split_rows(full, SIZES)
