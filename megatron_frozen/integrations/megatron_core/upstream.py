"""The only file that imports megatron-core, and only when something of it is asked for.

``core("transformer.spec_utils")`` is its module of that name, whose contents this package reads, subclasses and
patches. That TransformerEngine and apex are absent is no news of ours: what megatron-core warns of it as it is imported
here is left out.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from types import ModuleType
from typing import Any

from megatron_frozen.errors import ConfigError

_ROOT = "megatron.core"


def core(name: str = "") -> Any:
    """Return the module ``megatron.core``, or the one below it of the dotted ``name``, imported now if it was not yet.

    Raises ConfigError where megatron-core cannot be imported, and says why.
    """
    full_name = f"{_ROOT}.{name}" if name else _ROOT
    loaded = sys.modules.get(full_name)
    if loaded is not None:
        return loaded
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"(Transformer Engine and )?Apex (is|are) not installed")
            import megatron.core  # noqa: F401 - for the message below, whatever part of it was asked for

            return importlib.import_module(full_name)
    except Exception as error:  # RuntimeError too: a TransformerEngine without its library raises that
        raise ConfigError(
            f"megatron-core cannot be imported, {full_name} failed with {type(error).__name__}: {error}; "
            f"install megatron-core for this interpreter, or leave its integration out"
        ) from error


def version() -> str:
    """Return the version of the megatron-core that is imported, such as 0.16.1."""
    return core("package_info").__version__


def release() -> tuple[int, int]:
    """Return its major and minor number, such as (0, 16)."""
    info = core("package_info")
    return int(info.MAJOR), int(info.MINOR)


def imported_modules() -> list[ModuleType]:
    """Return the modules of megatron-core that this process has imported so far."""
    return [module for name, module in list(sys.modules.items()) if f"{name}.".startswith(f"{_ROOT}.") and module]
