"""Which module an operation belongs to, in the forward and in the backward that comes of it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

_MOST_EVENTS = 2**18  # some 100 steps of a model with 1000 modules


class ModuleTrail:
    """Follows all modules' forwards by global hooks, between ``__enter__`` and ``__exit__``.

    Autograd numbers its nodes in the order in which they are made. The numbers at which a module was entered and left
    so tell which nodes are its own, whatever runs them later and on whatever thread; what activation checkpointing
    computes again is entered again.
    """

    def __init__(self) -> None:
        """Start outside all modules."""
        self._names: WeakKeyDictionary[torch.nn.Module, str] = WeakKeyDictionary()
        self._stack: list[str] = []
        self._numbers: list[int] = []  # the events: from which number on, and in which module
        self._modules: list[str] = []
        self._hooks: Sequence[Any] = ()

    def __enter__(self) -> ModuleTrail:
        """Hook all modules."""
        enter = register_module_forward_pre_hook(self._enter)
        leave = register_module_forward_hook(self._leave, always_call=True)
        self._hooks = (enter, leave)
        return self

    def __exit__(self, *_: object) -> None:
        """Unhook them."""
        for hook in self._hooks:
            hook.remove()

    def place(self) -> tuple[str, bool]:
        """Return the innermost module whose operation is running, "" outside all, and whether in its backward."""
        node = torch._C._current_autograd_node()
        if self._stack or node is None:
            return (self._stack[-1] if self._stack else ""), False
        index = bisect_right(self._numbers, node._sequence_nr()) - 1
        return (self._modules[index] if index >= 0 else ""), True

    def _enter(self, module: torch.nn.Module, _: Any) -> None:
        if module not in self._names:
            root = type(module).__name__
            for name, inner in module.named_modules():
                self._names.setdefault(inner, f"{root}.{name}" if name else root)
        self._stack.append(self._names[module])
        self._note()

    def _leave(self, *_: Any) -> None:
        self._stack.pop()
        self._note()

    def _note(self) -> None:
        if len(self._numbers) >= _MOST_EVENTS:
            del self._numbers[: _MOST_EVENTS // 2], self._modules[: _MOST_EVENTS // 2]
        self._numbers.append(next_node())
        self._modules.append(self._stack[-1] if self._stack else "")


def next_node() -> int:
    """Return the number that autograd gives to the next node it makes in this thread."""
    return torch._C._autograd._get_sequence_nr()  # pyright: ignore[reportAttributeAccessIssue] - not in its stubs
