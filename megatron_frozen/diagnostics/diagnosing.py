"""`megatron-frozen diagnose SCRIPT`: somebody's job as it is, watched for products that take longer than they need."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from megatron_frozen import environment
from megatron_frozen.diagnostics.diagnosis import Diagnosis
from megatron_frozen.script import Script


def diagnose_script(arguments: Sequence[str]) -> None:
    """Run a script or a module, see ``Script``, under a ``Diagnosis``; the first and the last rank report on stderr,
    as the last stage of a pipeline has the head. Not after ``os._exit`` or a kill.

    Raises ConfigError where there is none, or if torchrun's variables contradict each other.
    """
    script = Script(arguments, command="diagnose")
    rank, world_size, _ = environment.launched_rank()
    diagnosis, process = Diagnosis(), os.getpid()
    try:
        with diagnosis:
            script.run()
    finally:
        if rank in (0, world_size - 1) and os.getpid() == process:  # a forked process may end here too
            who = f"rank {rank}: " if world_size > 1 else ""
            print(f"{who}{diagnosis.report()}", file=sys.stderr, flush=True)
