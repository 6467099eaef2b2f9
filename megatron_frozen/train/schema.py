"""Strict building of a configuration dataclass from the plain values of a YAML file.

Nothing is guessed and nothing is ignored: an unknown key, a missing one or a value of the wrong type is a
ConfigError that names the key as the user wrote it.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_frozen.errors import ConfigError, nearest

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
"""The dtypes of a config by the name that the file uses."""

_PLAIN = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}


def build(cls: type, values: Mapping[str, Any], *, prefix: str = "") -> Any:
    """An instance of the dataclass `cls` from `values`. `prefix` ("lora.") goes before key names in messages."""
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for key in values:
        if key not in fields:
            raise ConfigError(
                f"unknown config key '{prefix}{key}'{nearest(str(key), fields)}; the keys here are {', '.join(fields)}"
            )
    for name, field in fields.items():
        no_default = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if no_default and name not in values:
            raise ConfigError(
                f"the config key '{prefix}{name}' is missing; add it to the file or pass {prefix}{name}=VALUE"
            )
    return cls(**{key: coerce(value, hints[key], name=prefix + key) for key, value in values.items()})


def coerce(value: Any, hint: Any, *, name: str) -> Any:
    """`value` as the type `hint` asks for, or a ConfigError naming the key and what is allowed."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return _one_of(value, args, name=name)
    if origin is typing.Literal:
        if value not in args:
            raise _wrong(value, name, "one of " + ", ".join(map(str, args)) + nearest(str(value), map(str, args)))
        return value
    if origin in (tuple, Sequence):
        if not isinstance(value, (list, tuple)):
            raise _wrong(value, name, "a list, as in [a, b]")
        return tuple(coerce(item, args[0], name=name) for item in value)
    if hint is torch.dtype:
        if not isinstance(value, str) or value not in DTYPES:
            raise _wrong(value, name, "one of " + ", ".join(DTYPES))
        return DTYPES[value]
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if not isinstance(value, Mapping):
            raise _wrong(value, name, "a group of keys, or null")
        return build(hint, value, prefix=f"{name}.")
    return _plain(value, typing.cast("type", hint), name)


def _one_of(value: Any, hints: tuple[Any, ...], *, name: str) -> Any:
    if value is None and type(None) in hints:
        return None
    errors = []
    for hint in hints:
        if hint is not type(None):
            try:
                return coerce(value, hint, name=name)
            except ConfigError as error:
                errors.append(error)
    raise errors[0]


def _plain(value: Any, hint: type, name: str) -> Any:
    if hint is float and not isinstance(value, bool):
        # YAML 1.1 reads 2e-4 as a text: only 2.0e-4 is a number there.
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):
            raise _wrong(value, name, _PLAIN[float]) from None
    if type(value) is not hint:
        raise _wrong(value, name, _PLAIN[hint])
    if isinstance(value, str) and not _is_text(value):
        raise _wrong(value, name, "a text without NUL and without half characters")
    return value


def _is_text(value: str) -> bool:
    """Whether a path or a prompt can be made of it."""
    return "\0" not in value and not any("\ud800" <= char <= "\udfff" for char in value)


def _wrong(value: Any, name: str, allowed: str) -> ConfigError:
    return ConfigError(f"the config key '{name}' is {value!r}, which is not allowed; give {allowed}")


def to_plain(value: Any) -> Any:
    """A config dataclass as JSON values: the inverse of `build`."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [to_plain(item) for item in value]
    return {dtype: name for name, dtype in DTYPES.items()}[value] if isinstance(value, torch.dtype) else value
