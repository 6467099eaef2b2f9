"""The exceptions that users see: each message says what was given, what is allowed and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MegatronFrozenError(ValueError):
    """Base of every error that this package raises for bad input."""


class ConfigError(MegatronFrozenError):
    """A setting is missing, unknown, of the wrong type, or does not fit another one."""


class CheckpointError(MegatronFrozenError):
    """A checkpoint, adapter or other file cannot be read or written as asked."""


class DataError(MegatronFrozenError):
    """A training or evaluation row cannot be used."""


class LayoutError(MegatronFrozenError):
    """A tensor's shape, stride or dtype does not fit the operation."""


class ParallelError(MegatronFrozenError):
    """The process groups do not fit the request, or another rank failed."""


def nearest(name: str, allowed: Iterable[str]) -> str:
    """Return ``", did you mean 'x'?"`` for the closest of ``allowed``, or an empty string."""
    match = difflib.get_close_matches(name, list(allowed), n=1)
    return f", did you mean '{match[0]}'?" if match else ""
