"""Which module an operation belongs to, in the forward and in the backward that comes of it."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

_MOST_EVENTS = 2**18  # some 100 steps of a model with 1000 modules


class _Thread(threading.local):
    """Of each thread its own state."""

    def __init__(self) -> None:
        self.state = _State()


class _State:
    """Which modules a thread is in, and which were entered or left before which node it made."""

    def __init__(self) -> None:
        self.stack: list[tuple[str, int | None]] = []  # modules, and the number of the node that entered each
        self.numbers: list[int] = []  # the events: from which number on, and in which module
        self.modules: list[str] = []
        # After which forward, and in which backward, modules were entered again.
        self.again: tuple[int, int] = (-1, -1)

    def note(self) -> None:
        if len(self.numbers) >= _MOST_EVENTS:
            del self.numbers[: _MOST_EVENTS // 2], self.modules[: _MOST_EVENTS // 2]
        self.numbers.append(_next_node())
        self.modules.append(self.stack[-1][0] if self.stack else "")

    def module_of(self, number: int) -> str:
        index = bisect_right(self.numbers, number) - 1
        return self.modules[index] if index >= 0 else ""


class ModuleTrail:
    """Follows all modules' forwards by global hooks, between ``__enter__`` and ``__exit__``.

    Autograd numbers the nodes that a thread makes in their order. The numbers at which a module was entered and left
    so tell which nodes are its own, whatever runs them later. On a GPU the backward has a thread of its own: what
    activation checkpointing computes again there is entered again and numbered by that thread.
    """

    def __init__(self) -> None:
        """Start outside all modules."""
        self._names: WeakKeyDictionary[torch.nn.Module, str] = WeakKeyDictionary()
        self._hooks: Sequence[Any] = ()
        self._start()

    def _start(self) -> None:
        self._thread = _Thread()
        self._home = self._thread.state  # of the thread whose forwards are followed
        self._num_entered = 0

    def __enter__(self) -> ModuleTrail:
        """Hook all modules."""
        self._start()
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
        here, number = self._thread.state, _running_node()
        if number is None or (here.stack and here.stack[-1][1] == number):
            return (here.stack[-1][0] if here.stack else ""), False
        # with gradients on, this is a function without modules that checkpointing calls again
        return self._maker().module_of(number), not torch.is_grad_enabled()

    def running_node(self) -> tuple[int, int] | None:
        """Return what tells the node that is running from all others, None outside a backward."""
        number = _running_node()
        return None if number is None else (id(self._maker()), number)

    def last_node(self) -> tuple[int, int]:
        """Return the same of the node that this thread made last."""
        return id(self._thread.state), _next_node() - 1

    def _maker(self) -> _State:
        """Return the thread that made the running node: this one, if it runs what it has just computed again."""
        here = self._thread.state
        num_entered, backward = here.again
        is_inner = num_entered == self._num_entered and backward != torch._C._current_graph_task_id()
        return here if is_inner else self._home

    def _enter(self, module: torch.nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling():  # a graph is entered as a whole
            return
        if module not in self._names:
            root = type(module).__name__
            for name, inner in module.named_modules():
                self._names.setdefault(inner, f"{root}.{name}" if name else root)
        here, number = self._thread.state, _running_node()
        if number is not None:
            here.again = (self._num_entered, torch._C._current_graph_task_id())
        elif here is self._home:
            self._num_entered += 1
        here.stack.append((self._names[module], number))
        here.note()

    def _leave(self, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        here = self._thread.state
        if here.stack:  # or it was entered before this began
            here.stack.pop()
        here.note()


def _running_node() -> int | None:
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def _next_node() -> int:
    """Return the number that autograd gives to the next node it makes in this thread."""
    return torch._C._autograd._get_sequence_nr()  # pyright: ignore[reportAttributeAccessIssue] - not in its stubs
