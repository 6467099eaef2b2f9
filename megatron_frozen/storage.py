"""Tensors that lie one above the other in one storage, which a view joins into one tensor without a copy.

Whether parts still adjoin is seen from their storage each time, as it changes under them: loading, optimizer steps and
pickling keep it, a copied module, a cast and sharding lose it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_frozen.errors import LayoutError


def adjacent_view(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the parts [n_i, ...] as one tensor [sum n_i, ...] over their own memory; None where they do not adjoin.

    They adjoin if they are dense, of one dtype, device and trailing shape, and each begins in the same storage where
    the one before it ends. One part is its own view. The view shares memory and no graph; no memory is read.
    """
    first = parts[0]
    if len(parts) == 1:
        return first.detach()
    if not _are_plain(parts):
        return None
    storage, offset, num_rows = first.untyped_storage(), first.storage_offset(), 0
    for part in parts:
        fits = (
            part.dtype == first.dtype
            and part.shape[1:] == first.shape[1:]
            and part.is_contiguous()
            and part.untyped_storage()._cdata == storage._cdata
            and part.storage_offset() == offset
        )
        if not fits:
            return None
        offset += part.numel()
        num_rows += part.shape[0]
    if storage.data_ptr() == 0 or offset * first.element_size() > storage.nbytes():  # on meta, or freed
        return None
    # Not the first part's strides: of a single row, which is dense whatever they say, they mean nothing.
    return first.detach().as_strided((num_rows, *first.shape[1:]), _dense_strides(first.shape))


def _dense_strides(shape: torch.Size) -> list[int]:
    strides, step = [], 1
    for size in reversed(shape[1:]):
        strides.append(step)
        step *= size
    return [step, *reversed(strides)]


def _are_plain(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether none is of a subclass, whose numbers are not in its own storage."""
    return all(type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter for tensor in tensors)


def concatenate(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a copy of the parts [n_i, ...] as one tensor [sum n_i, ...] of their widest dtype, without a graph."""
    return torch.cat([part.detach() for part in parts])


def join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the parts [n_i, ...] as one tensor [sum n_i, ...]: a view where they adjoin, else ``concatenate``."""
    view = adjacent_view(parts)
    return concatenate(parts) if view is None else view


def split_rows(full: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Return views of ``full`` [sum sizes, ...], one above the other, each a tensor that a parameter may own."""
    if full.shape[0] != sum(sizes) or not full.is_contiguous():
        raise LayoutError(
            f"a tensor of shape {list(full.shape)} and strides {list(full.stride())} cannot be cut into rows of "
            f"{list(sizes)}; give a dense one whose rows are their sum"
        )
    return list(full.split(list(sizes)))


def repack_(parts: Sequence[torch.Tensor]) -> bool:
    """Move parts [n_i, ...] into one new storage, in place and in order; return whether they adjoin now.

    They stay the same objects with the same values. Where moving is not ours to do, nothing is changed: parts of
    several dtypes, devices or trailing shapes, of a subclass such as DTensor, and parts that share their storage with
    anything that is not among them, as those in a wrapper's flat buffer do.
    """
    if len(parts) < 2 or adjacent_view(parts) is not None:
        return True
    first = parts[0]
    alike = _are_plain(parts) and all(
        (part.dtype, part.device, part.shape[1:]) == (first.dtype, first.device, first.shape[1:]) for part in parts
    )
    if not alike or not _own_their_storages(parts):
        return False
    with torch.no_grad():
        for part, rows in zip(parts, split_rows(concatenate(parts), [part.shape[0] for part in parts]), strict=True):
            part.data = rows
    return True


def _own_their_storages(parts: Sequence[torch.Tensor]) -> bool:
    """Return whether each storage holds nothing but parts, each byte of it one part's."""
    ends: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for part in sorted(parts, key=lambda part: part.storage_offset()):
        storage = part.untyped_storage()
        span = 1 + sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
        is_dense = part.numel() in (0, span)
        if not is_dense or part.storage_offset() * part.element_size() != ends.setdefault(storage.data_ptr(), 0):
            return False  # two parts overlap, or there is room between them for what is none of them
        ends[storage.data_ptr()] += part.numel() * part.element_size()
        sizes[storage.data_ptr()] = storage.nbytes()
    return ends == sizes
