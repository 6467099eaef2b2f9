"""Raw collectives. Each takes a group (None = one rank: no communication) and returns ``(tensor, work)``.

``work`` is None when the result is ready; with ``async_op`` it is a handle whose ``wait()`` makes it so. What is sent
is always dense; what is passed in stays untouched unless the name ends in an underscore."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_frozen.comm.groups import WORLD, AnyGroup, Group, group_size, resolve
from megatron_frozen.errors import LayoutError

Result = tuple[torch.Tensor, dist.Work | None]

# torch 2.13 renamed both and warns of the old names, which are the only ones before.
_ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


def _is_async(wanted: bool) -> bool:  # noqa: FBT001
    """Return whether to hand out a handle: never in a compiled graph, which places the waiting itself."""
    return wanted and not torch.compiler.is_compiling()


def all_reduce_(tensor: torch.Tensor, *, group: Group, op: str = "sum", async_op: bool = False) -> Result:
    """Reduce a dense ``tensor`` of any shape in place over ``group``: one all-reduce."""
    if group_size(group) == 1:
        return tensor, None
    return tensor, dist.all_reduce(tensor, op=_OPS[op], group=group, async_op=_is_async(async_op))


def all_reduce(tensor: torch.Tensor, *, group: Group, op: str = "sum", async_op: bool = False) -> Result:
    """Return the sum or maximum of ``tensor`` over ``group``, in a dense copy: one all-reduce."""
    if group_size(group) == 1:
        return tensor, None
    return all_reduce_(tensor.clone(memory_format=torch.contiguous_format), group=group, op=op, async_op=async_op)


def all_gather(tensor: torch.Tensor, *, group: Group, dim: int = 0, async_op: bool = False) -> Result:
    """Return every rank's ``tensor`` joined along ``dim`` in rank order: one all-gather.

    Along another dim than 0 the joined result is one copy away, so ``async_op`` goes with dim 0 only.
    """
    world_size = group_size(group)
    if world_size == 1:
        return tensor, None
    dim %= tensor.dim()
    assert dim == 0 or not async_op, "an asynchronous all-gather joins along dim 0"
    shape = [world_size * tensor.shape[0], *tensor.shape[1:]]
    gathered = tensor.new_empty(shape)
    work = _ALL_GATHER(gathered, tensor.contiguous(), group=group, async_op=_is_async(async_op))
    if dim == 0:
        return gathered, work
    # Written out also where a view would do, which autograd lets no user write into. torch.cat refuses bf16 under an
    # autocast to fp16.
    num = tensor.shape[dim]
    joined = tensor.new_empty([*tensor.shape[:dim], world_size * num, *tensor.shape[dim + 1 :]])
    joined.unflatten(dim, (world_size, num)).copy_(gathered.view(world_size, *tensor.shape).movedim(0, dim))
    return joined, work


def reduce_scatter(tensor: torch.Tensor, *, group: Group, dim: int = 0, async_op: bool = False) -> Result:
    """Return this rank's slice along ``dim`` of the sum of ``tensor`` over ``group``: one reduce-scatter.

    Raises LayoutError where the dim does not divide by the number of ranks.
    """
    world_size = group_size(group)
    if world_size == 1:
        return tensor, None
    dim %= tensor.dim()
    check_divides(tensor, dim=dim, group=group)
    if dim != 0:
        tensor = tensor.unflatten(dim, (world_size, tensor.shape[dim] // world_size)).movedim(dim, 0).flatten(0, 1)
    scattered = tensor.new_empty([tensor.shape[0] // world_size, *tensor.shape[1:]])
    work = _REDUCE_SCATTER(scattered, tensor.contiguous(), group=group, async_op=_is_async(async_op))
    return scattered, work


def local_slice(tensor: torch.Tensor, *, group: Group, dim: int) -> torch.Tensor:
    """Return this rank's slice of ``tensor`` along ``dim`` as a dense tensor; no communication."""
    world_size = group_size(group)
    if world_size == 1:
        return tensor
    check_divides(tensor, dim=dim, group=group)
    return tensor.chunk(world_size, dim=dim)[dist.get_rank(group)].contiguous()


def check_divides(tensor: torch.Tensor, *, dim: int, group: Group) -> None:
    """Raise LayoutError unless ``tensor.shape[dim]`` divides by the number of ranks in ``group``."""
    world_size = group_size(group)
    if tensor.shape[dim] % world_size:
        raise LayoutError(
            f"dim {dim} of a tensor of shape {list(tensor.shape)} is to be cut over {world_size} ranks; "
            f"give a size that divides by {world_size}, by padding it"
        )


def broadcast_(tensor: torch.Tensor, *, src: int, group: AnyGroup) -> torch.Tensor:
    """Overwrite a dense ``tensor`` with that of rank ``src`` of ``group``: one broadcast."""
    group = resolve(group)
    if group_size(group) > 1:
        dist.broadcast(tensor, group=group, group_src=src)
    return tensor


def broadcast_object(obj: Any, *, group: AnyGroup = WORLD, src: int = 0) -> Any:
    """Return the picklable ``obj`` of rank ``src`` of ``group``: a broadcast of its size and one of its bytes."""
    group = resolve(group)
    if group_size(group) == 1:
        return obj
    box = [obj]
    dist.broadcast_object_list(box, group=group, group_src=src)
    return box[0]


def gather_objects(obj: Any, *, group: AnyGroup = WORLD) -> list[Any]:
    """Return every rank's picklable ``obj`` in rank order: an all-gather of sizes and one of bytes."""
    group = resolve(group)
    if group_size(group) == 1:
        return [obj]
    objects: list[Any] = [None] * group_size(group)
    dist.all_gather_object(objects, obj, group=group)
    return objects
