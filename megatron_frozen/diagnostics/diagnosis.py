"""Finding products of somebody else's job that run batched, or copy an operand, where one 2-D product would do.

For some layouts torch multiplies [..., K] by a matrix [K, N] as a batched product, a small one for each slice that
reads the whole matrix each time; elsewhere it first copies an operand although its leading dims collapse in another
order. The numbers are right, so only a look at what reaches the dispatcher shows it.

Shape suffixes: B = slices of a batched product, M = rows of each, K = summed over, N = columns, R = rows of a fold.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_frozen.diagnostics.findings import Direction, Fault, Finding, text_of
from megatron_frozen.diagnostics.module_trail import ModuleTrail, next_node
from megatron_frozen.kernels import in_memory
from megatron_frozen.layout import fold_leading, fold_pair, plan_fold

_COPY, _BATCHED = torch.ops.aten.clone.default, torch.ops.aten.bmm.default
_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, _BATCHED)
_SAMPLES = 3  # calls of a kind that are timed: the first one also sets up what it needs
_RECENT = 32  # copies that a product may still come for


class _Layout(NamedTuple):
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Layout:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class _Copy:
    source: _Layout
    storage: StorageWeakRef
    seconds: float


class Diagnosis(TorchDispatchMode):
    """Watches what runs under it, in this thread and in the backward that it starts.

    ``with Diagnosis() as found: step()``, then ``print(found.report())`` or ``found.findings``. All values stay what
    they are. The first calls of each suspect kind are timed and run once more folded, on the same operands, for which
    the device is synchronised and another result held. What runs in compiled graphs or in other processes is not seen.
    No collectives.
    """

    def __init__(self) -> None:
        """Start with nothing found."""
        super().__init__()
        self.num_products = 0
        self.watched_s = 0.0
        self._found: dict[tuple[object, ...], Finding] = {}
        self._copy_s: dict[tuple[object, ...], list[float]] = {}
        self._copies: deque[_Copy] = deque(maxlen=_RECENT)
        self._matrices: dict[int, int] = {}  # of products by one matrix: the node's number, and the matrix' storage
        self._trail = ModuleTrail()
        self._start = 0.0

    def __enter__(self) -> Diagnosis:
        """Begin to watch."""
        self._trail.__enter__()
        self._start = time.perf_counter()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        """End it; what was found stays."""
        super().__exit__(*error)
        self.watched_s += time.perf_counter() - self._start
        self._trail.__exit__()

    @property
    def findings(self) -> list[Finding]:
        """What was found, the costliest first."""
        return sorted(self._found.values(), key=lambda finding: -finding.wasted_s)

    def report(self) -> str:
        """Return a table of what takes noticeably longer than folded and what to do about it, or that nothing does."""
        return text_of(self.findings, num_products=self.num_products, watched_s=self.watched_s)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operation, and look at it if it is a product or a copy of real tensors."""
        del types
        call = partial(func, *args, **(kwargs or {}))
        operands = args[-2:] if func in _PRODUCTS else args[:1] if func is _COPY else ()
        if not operands or operands[0].is_meta or not in_memory(*operands):
            return call()
        if func is _COPY:
            return self._copied(args[0], call)
        self.num_products += 1
        look = self._multiplied_batched if func is _BATCHED else self._multiplied
        return look(operands[0], operands[1], call)

    def _copied(self, source: torch.Tensor, call: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Copy ``source`` [..., K], and remember it if it folds without a copy."""
        layout = _Layout.of(source)
        if source.dim() < 3 or source.is_contiguous() or not plan_fold(layout.shape, layout.stride).is_view:
            return call()
        seconds = self._copy_s.setdefault((layout, source.device), [])
        if len(seconds) < _SAMPLES:
            copy, took = _timed(call, device=source.device)
            seconds.append(took)
        else:
            copy = call()
        if copy.is_contiguous():
            self._copies.append(_Copy(layout, StorageWeakRef(copy.untyped_storage()), min(seconds)))
        return copy

    def _multiplied(self, left: torch.Tensor, right: torch.Tensor, call: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Multiply [M, K] by [K, N], and note it if the rows were copied for it and for nothing else.

        A weight gradient wants rows of two tensors in one order, so that it may need the copy, and what shares it with
        a weight gradient too.
        """
        copy = self._taken_copy(left)
        if self._taken_copy(right) or copy is None or left.shape[1] != copy.source.shape[-1] or right.requires_grad:
            return call()
        module, is_backward = self._trail.place()
        direction = Direction.DGRAD if is_backward else Direction.FORWARD
        kind = {"module": module, "direction": direction, "fault": Fault.COPIED, "matrix": tuple(right.shape)}
        finding = self._finding(copy.source, **kind)
        if finding.calls > _SAMPLES:
            return call()
        product, took = _timed(call, device=left.device)
        repeats = plan_fold(copy.source.shape, copy.source.stride).repeats  # such rows need one product
        finding.note(as_run_s=copy.seconds + took, folded_s=took / repeats)
        return product

    def _taken_copy(self, operand: torch.Tensor) -> _Copy | None:
        """Return the copy that the operand is a view of, once."""
        storage = operand.untyped_storage()._cdata
        copy = next((copy for copy in self._copies if copy.storage.cdata == storage), None)
        if copy is not None:
            self._copies.remove(copy)
        return None if copy is None or copy.storage.expired() else copy

    def _multiplied_batched(
        self, left: torch.Tensor, right: torch.Tensor, call: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """Multiply [B, M, K] by [B, K, N], and note it if all slices on the right are one matrix, or if this is the
        weight gradient of such a product."""
        node = torch._C._current_autograd_node()
        of_forward = None if node is None else self._matrices.get(node._sequence_nr())
        matrix_storage = right.untyped_storage()._cdata
        is_by_one = right.shape[0] > 1 and right.stride(0) == 0
        if not is_by_one and of_forward is None:
            return call()
        module, is_backward = self._trail.place()
        if not is_backward and (left.requires_grad or right.requires_grad):
            self._matrices[next_node() - 1] = matrix_storage  # autograd has just made the node
        if of_forward not in (None, matrix_storage):
            direction, rows, matrix = Direction.WGRAD, right, (left.shape[1], right.shape[2])
            folded = partial(_folded_wgrad, left, right)
        else:
            direction, rows, matrix = (
                Direction.DGRAD if is_backward else Direction.FORWARD,
                left,
                tuple(right.shape[1:]),
            )
            folded = partial(_folded, left, right)
        kind = {"module": module, "direction": direction, "fault": Fault.BATCHED, "matrix": matrix}
        finding = self._finding(_Layout.of(rows), **kind)
        if finding.calls > _SAMPLES:
            return call()
        product, as_run_s = _timed(call, device=left.device)
        finding.note(as_run_s=as_run_s, folded_s=_timed(folded, device=left.device)[1])
        return product

    def _finding(self, rows: _Layout, **kind: Any) -> Finding:
        """Return the one of these rows and this kind, with this call counted."""
        finding = self._found.setdefault((rows, *kind.values()), Finding(**kind, **rows._asdict()))
        finding.calls += 1
        return finding


def _folded(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Multiply [B, M, K] by the one matrix of [B, K, N] as one product."""
    rows_RK, _ = fold_leading(left)
    return _BATCHED(rows_RK.unsqueeze(0), right[:1])


def _folded_wgrad(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Multiply [B, K, M] by [B, M, N] and sum over B, as one product."""
    left_RK, right_RN = fold_pair(left.mT, right)
    return _BATCHED(left_RK.t().unsqueeze(0), right_RN.unsqueeze(0))


def _timed(call: Callable[[], torch.Tensor], *, device: torch.device) -> tuple[torch.Tensor, float]:
    """Return the result and the seconds that it took, on the device too."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    start = time.perf_counter()
    result = call()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return result, time.perf_counter() - start
