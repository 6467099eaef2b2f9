"""Functions of torch's own CPU library that Python does not expose, found by symbol."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | None:
    """Return torch's CPU library; it is loaded already, so this opens nothing new. Calls into it release the GIL."""
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        path = Path(torch.__file__).parent / "lib" / name
        if path.is_file():
            return ctypes.CDLL(str(path))
    return None


def symbol(name: str, *argument_types: Any) -> Any:
    """Return the C function ``name`` that returns nothing and takes ``argument_types``, or None where it is absent."""
    function = getattr(_library(), name, None)
    if function is not None:
        function.argtypes, function.restype = argument_types, None
    return function


def address(name: str) -> int | None:
    """Return where the C function ``name`` stands, or None where it is absent."""
    function = getattr(_library(), name, None)
    return None if function is None else ctypes.cast(function, ctypes.c_void_p).value
