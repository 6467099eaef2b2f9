"""`megatron-frozen run SCRIPT`: somebody's launcher as it is, with megatron-core patched before its first line."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_frozen import environment
from megatron_frozen.errors import ConfigError
from megatron_frozen.integrations.megatron_core.patching import patch


def run_script(arguments: Sequence[str]) -> None:
    """Run ``SCRIPT [ARGUMENT ...]`` or ``-m MODULE [ARGUMENT ...]`` as ``python`` would, in this process.

    The script is ``__main__`` and has its own argv, its folder on the path of imports, and its exit code. An error of
    it is printed as Python prints it. The environment variable MEGATRON_FROZEN_PATCH set to 0 leaves the patch out.
    Rank 0 says on stderr what was patched.

    Raises ConfigError, before the script begins, where there is none, or the patch refuses the installed megatron-core.
    """
    is_module = list(arguments[:1]) == ["-m"]
    name, *rest = [*(arguments[1:] if is_module else arguments)] or [""]
    if not name or (name.startswith("-") and not is_module):
        given = f"'{' '.join(arguments)}'" if arguments else "nothing to run"
        raise ConfigError(f"run got {given}; give it a script or -m and a module, and their arguments")
    if not is_module and not Path(name).exists():
        raise ConfigError(f"run was told to run {name}, which is no file here; give the path of a Python script")
    # megatron-core may lie beside the script, as in a clone of Megatron-LM, so the path comes before the patch.
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.getcwd() if is_module else str(Path(name).resolve().parent)
    if is_module and not ((top := name.partition(".")[0]) and importlib.util.find_spec(top)):
        raise ConfigError(f"run was told to run the module {name}, which is not here; put its folder on PYTHONPATH")
    if environment.switch(environment.PATCH, default=True):
        report = patch()
        if environment.text("RANK") in (None, "0"):
            print(report, file=sys.stderr, flush=True)
    sys.argv = [name, *rest]
    try:
        if is_module:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(name, run_name="__main__")
    except (Exception, KeyboardInterrupt) as error:
        sys.excepthook(type(error), error, error.__traceback__)
        raise SystemExit(130 if isinstance(error, KeyboardInterrupt) else 1) from None
