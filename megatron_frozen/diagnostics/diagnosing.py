"""`megatron-frozen diagnose SCRIPT`: somebody's job as it is, watched for products that take longer than they need."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megatron_frozen import environment
from megatron_frozen.diagnostics.diagnosis import Diagnosis
from megatron_frozen.script import Script


def diagnose_script(arguments: Sequence[str]) -> None:
    """Run a script or a module, see ``Script``, under a ``Diagnosis``; rank 0 reports on stderr, however it ends.

    Raises ConfigError where there is none.
    """
    script = Script(arguments, command="diagnose")
    diagnosis = Diagnosis()
    try:
        with diagnosis:
            script.run()
    finally:
        if environment.text("RANK") in (None, "0"):
            print(diagnosis.report(), file=sys.stderr, flush=True)
