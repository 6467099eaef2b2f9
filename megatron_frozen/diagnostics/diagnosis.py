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
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_frozen.diagnostics.findings import Direction, Fault, Finding, text_of
from megatron_frozen.diagnostics.module_trail import ModuleTrail
from megatron_frozen.errors import MegatronFrozenError
from megatron_frozen.kernels import has_operators, in_memory
from megatron_frozen.layout import fold_leading, fold_pair, plan_fold

_aten = torch.ops.aten
_COPY = _aten.clone.default
_PLAIN = {_aten.mm.default, _aten.mm.out, _aten.addmm.default, _aten.addmm.out, _aten.addmm_.default}
_BATCHED = {_aten.bmm.default, _aten.bmm.out, _aten.baddbmm.default, _aten.baddbmm.out, _aten.baddbmm_.default}
_SEEN = {_COPY} | _PLAIN | _BATCHED
_SAMPLES = 3  # calls of a kind that are timed: the first one also sets up what it needs
_RECENT = 32  # copies that a product may still come for
_MOST_NODES = 2**16  # products whose backward may still come


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
    the device is synchronised and another result made first. Of what torch.compile has compiled it sees the products
    that are left to torch. What runs in other threads and processes, under ``torch.inference_mode`` or in a CUDA graph
    is not seen. No collectives.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile compile, whose own look at the operations is none of ours."""
        return True

    def __init__(self) -> None:
        """Start with nothing found."""
        super().__init__()
        self.num_products = 0
        self.watched_s = 0.0
        self._found: dict[tuple[object, ...], Finding] = {}
        self._copy_s: dict[tuple[object, ...], list[float]] = {}
        self._copies: deque[_Copy] = deque(maxlen=_RECENT)
        self._matrices: dict[tuple[int, int], int] = {}  # of products by one matrix: the node, and the matrix' storage
        self._trail = ModuleTrail()
        self._start: float | None = None

    def __enter__(self) -> Diagnosis:
        """Begin to watch.

        Raises MegatronFrozenError where it does so already.
        """
        if self._start is not None:
            raise MegatronFrozenError("this Diagnosis is watching already; leave it first, or make another one")
        self._trail.__enter__()
        self._start = time.perf_counter()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        """End it; what was found stays."""
        super().__exit__(*error)
        self._trail.__exit__()
        assert self._start is not None
        self.watched_s += time.perf_counter() - self._start
        self._start = None

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
        if types and any(has_operators(kind) and not issubclass(kind, FakeTensor) for kind in types):
            return NotImplemented  # so that theirs run, as DTensor's, and what those multiply comes here
        if func not in _SEEN:
            return func(*args, **(kwargs or {}))
        call = partial(func, *args, **(kwargs or {}))
        operands = args[:1] if func is _COPY else args[-2:]
        if not _is_seen(operands):
            return call()
        if func is _COPY:
            return self._copied(args[0], call)
        self.num_products += 1
        left, right = operands
        look = self._multiplied_batched if func in _BATCHED and left.shape[0] != 1 else self._multiplied
        return look(left, right, call)

    def _copied(self, source: torch.Tensor, call: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Copy ``source`` [..., K], or [..., K, 1] as einsum does, and remember it if it folds without a copy."""
        layout = _Layout.of(source)
        if layout.shape[-1:] == (1,):
            layout = layout._replace(shape=layout.shape[:-1], stride=layout.stride[:-1])
        if len(layout.shape) < 3 or source.is_contiguous() or not plan_fold(layout.shape, layout.stride).is_view:
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
        """Multiply [M, K] by [K, N], or one such pair of a batch, and note it if the rows were copied first for it.

        A weight gradient wants rows of two tensors in one order, so that it may need the copy, and what shares it with
        a weight gradient too.
        """
        copy = self._taken_copy(left)
        if self._taken_copy(right) or copy is None or right.requires_grad:
            return call()
        if left.shape[-1] != copy.source.shape[-1] or not left.is_contiguous():  # other rows, or its columns
            return call()
        module, is_backward = self._trail.place()
        direction = Direction.DGRAD if is_backward else Direction.FORWARD
        kind = {"module": module, "direction": direction, "fault": Fault.COPIED, "matrix": tuple(right.shape[-2:])}
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
        node = self._trail.running_node()
        of_forward = None if node is None else self._matrices.get(node)
        matrix_storage = right.untyped_storage()._cdata
        is_by_one = right.shape[0] > 1 and right.stride(0) == 0
        if not is_by_one and of_forward is None:
            return call()
        if left.shape[::2] != right.shape[:2] or left.dtype != right.dtype:  # torch says what is wrong
            return call()
        module, is_backward = self._trail.place()
        if not is_backward and torch.is_grad_enabled() and (left.requires_grad or right.requires_grad):
            if len(self._matrices) >= _MOST_NODES:
                del self._matrices[next(iter(self._matrices))]
            self._matrices[self._trail.last_node()] = matrix_storage  # autograd has just made the node
        if of_forward not in (None, matrix_storage):
            direction, rows, matrix = Direction.WGRAD, right, (left.shape[1], right.shape[2])
            folded = partial(_folded_wgrad, left, right)
        else:
            direction = Direction.DGRAD if is_backward else Direction.FORWARD
            rows, matrix, folded = left, tuple(right.shape[1:]), partial(_folded, left, right)
        kind = {"module": module, "direction": direction, "fault": Fault.BATCHED, "matrix": matrix}
        finding = self._finding(_Layout.of(rows), **kind)
        if finding.calls > _SAMPLES:
            return call()
        folded_s = _timed(folded, device=left.device)[1]  # first, as the first one finds everything cold
        product, as_run_s = _timed(call, device=left.device)
        finding.note(as_run_s=as_run_s, folded_s=folded_s)
        return product

    def _finding(self, rows: _Layout, **kind: Any) -> Finding:
        """Return the one of these rows and this kind, with this call counted."""
        finding = self._found.setdefault((rows, *kind.values()), Finding(**kind, **rows._asdict()))
        finding.calls += 1
        return finding


def _is_seen(operands: Sequence[torch.Tensor]) -> bool:
    """Return whether they have memory, one shape and strides, are of floating point, and may be timed."""
    if any(operand.is_meta or operand.is_nested or not operand.dtype.is_floating_point for operand in operands):
        return False
    if not in_memory(*operands):
        return False
    return not (operands[0].is_cuda and torch.cuda.is_current_stream_capturing())


def _folded(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Multiply [B, M, K] by the one matrix of [B, K, N] as one product."""
    rows_RK, _ = fold_leading(left)
    return _aten.bmm.default(rows_RK.unsqueeze(0), right[:1])


def _folded_wgrad(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Multiply [B, K, M] by [B, M, N] and sum over B, as one product."""
    left_RK, right_RN = fold_pair(left.mT, right)
    return _aten.bmm.default(left_RK.t().unsqueeze(0), right_RN.unsqueeze(0))


def _timed(call: Callable[[], torch.Tensor], *, device: torch.device) -> tuple[torch.Tensor, float]:
    """Return the result and the seconds that it took, on the device too."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    start = time.perf_counter()
    result = call()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return result, time.perf_counter() - start
