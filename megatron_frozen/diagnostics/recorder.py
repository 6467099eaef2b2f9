"""A recorder of operations as they reach the dispatcher, forward and backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

COPIES = ("aten.clone", "aten.copy_", "aten._to_copy", "aten.cat", "aten.stack", "aten._reshape_copy")
COLLECTIVES = {
    "c10d.allreduce_": "all_reduce",
    "c10d._allgather_base_": "all_gather",
    "c10d._reduce_scatter_base_": "reduce_scatter",
    "c10d.broadcast_": "broadcast",
}


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation: its name without the overload, the shapes of its tensor arguments, and the bytes it wrote.

    payload_bytes: of a collective, the size of the whole tensor, that is of its larger side; 0 of all else."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    written_bytes: int
    payload_bytes: int = 0


class Recorder(TorchDispatchMode):
    """Records every operation run under it, in this thread and in the backward it starts.

    ``with Recorder() as seen: y = layer(x); y.backward(g)``, then ``seen.count("aten.bmm")``,
    ``seen.copied_bytes(min_bytes=...)``, ``seen.collectives()``. Views write nothing. Products of views with other
    names (addmm for mm with a bias) count under their own."""

    def __init__(self) -> None:
        """Start with an empty list."""
        super().__init__()
        self.operations: list[Operation] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operation and note it."""
        result = func(*args, **(kwargs or {}))
        first = result[0] if isinstance(result, (tuple, list)) and result else result
        written = first.numel() * first.element_size() if isinstance(first, torch.Tensor) else 0
        shapes = tuple(tuple(arg.shape) for arg in args if isinstance(arg, torch.Tensor))
        name = str(func.overloadpacket)
        payload = _largest_bytes(args) if name in COLLECTIVES else 0
        self.operations.append(Operation(name, shapes, written, payload))
        return result

    def count(self, name: str) -> int:
        """Return how often the operation ``name`` ran, such as ``aten.mm``."""
        return sum(operation.name == name for operation in self.operations)

    def copies(self, *, min_bytes: int = 0) -> list[Operation]:
        """Return the operations that copied at least ``min_bytes``."""
        return [op for op in self.operations if op.name in COPIES and op.written_bytes >= max(min_bytes, 1)]

    def copied_bytes(self, *, min_bytes: int = 0) -> int:
        """Return the bytes written by copies of at least ``min_bytes`` each."""
        return sum(operation.written_bytes for operation in self.copies(min_bytes=min_bytes))

    def collectives(self) -> Counter[str]:
        """Return how often each collective ran."""
        return Counter(COLLECTIVES[op.name] for op in self.operations if op.name in COLLECTIVES)

    def payload_bytes(self) -> Counter[str]:
        """Return the bytes that each collective was about: the sum over its calls of the whole tensor's size."""
        total: Counter[str] = Counter()
        for operation in self.operations:
            if operation.name in COLLECTIVES:
                total[COLLECTIVES[operation.name]] += operation.payload_bytes
        return total


def _largest_bytes(args: Sequence[Any]) -> int:
    """Return the bytes of the largest tensor among arguments and lists of them."""
    flat = [item for arg in args for item in (arg if isinstance(arg, (tuple, list)) else [arg])]
    return max((item.numel() * item.element_size() for item in flat if isinstance(item, torch.Tensor)), default=0)
