"""Somebody's Python script, run in this process as ``python`` would run it."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_frozen.errors import ConfigError


class Script:
    """``SCRIPT [ARGUMENT ...]`` or ``-m MODULE [ARGUMENT ...]``, looked up, with its folder on the path of imports."""

    def __init__(self, arguments: Sequence[str], *, command: str) -> None:
        """Find it, for the command of that name.

        Raises ConfigError where there is none.
        """
        self._is_module = list(arguments[:1]) == ["-m"]
        self._name, *self._rest = [*(arguments[1:] if self._is_module else arguments)] or [""]
        if not self._name or (self._name.startswith("-") and not self._is_module):
            given = f"'{' '.join(arguments)}'" if arguments else "nothing to run"
            raise ConfigError(f"{command} got {given}; give it a script or -m and a module, and their arguments")
        if not self._is_module and not Path(self._name).exists():
            raise ConfigError(
                f"{command} was told to run {self._name}, which is no file here; give the path of a Python script"
            )
        if not getattr(sys.flags, "safe_path", False):
            sys.path[0] = os.getcwd() if self._is_module else str(Path(self._name).resolve().parent)
        if self._is_module and not self._is_found():
            raise ConfigError(
                f"{command} was told to run the module {self._name}, which is not here; put its folder on PYTHONPATH"
            )

    def _is_found(self) -> bool:
        top = self._name.partition(".")[0]
        return bool(top) and importlib.util.find_spec(top) is not None

    def run(self) -> None:
        """Run it: it is ``__main__``, with its own argv and exit code. An error of it is printed as Python prints it.

        Raises SystemExit where it failed or exits by itself.
        """
        sys.argv = [self._name, *self._rest]
        try:
            if self._is_module:
                runpy.run_module(self._name, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(self._name, run_name="__main__")
        except (Exception, KeyboardInterrupt) as error:
            sys.excepthook(type(error), error, error.__traceback__)
            raise SystemExit(130 if isinstance(error, KeyboardInterrupt) else 1) from None
