"""`megatron-frozen run SCRIPT`: somebody's launcher as it is, with megatron-core patched before its first line."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megatron_frozen import environment
from megatron_frozen.integrations.megatron_core.patching import patch
from megatron_frozen.script import Script


def run_script(arguments: Sequence[str]) -> None:
    """Run a script or a module, see ``Script``, in this process.

    MEGATRON_FROZEN_PATCH set to 0 in the environment leaves the patch out. Rank 0 says on stderr what was patched.

    Raises ConfigError, before the script begins, where there is none, or the patch refuses the installed megatron-core.
    """
    script = Script(arguments, command="run")  # first: megatron-core may lie beside it, as in a clone of Megatron-LM
    if environment.switch(environment.PATCH, default=True):
        report = patch()
        if environment.text("RANK") in (None, "0"):
            print(report, file=sys.stderr, flush=True)
    script.run()
