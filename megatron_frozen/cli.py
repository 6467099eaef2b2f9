"""The command line: `megatron-frozen COMMAND`, also `python -m megatron_frozen COMMAND`, alone or under torchrun.

Exit codes: 0 done, 1 failed, 2 wrong usage or config, 130 interrupted, 141 output that nobody reads any more.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from select import POLLERR, poll
from typing import Any

from megatron_frozen.bench.commands import NAMES, overview, run_bench
from megatron_frozen.bench.runner import REPEATS
from megatron_frozen.checkpoint.demo_model import fetch_demo_model
from megatron_frozen.diagnostics.diagnosing import diagnose_script
from megatron_frozen.diagnostics.facts import aligned, facts_table, installed_version
from megatron_frozen.environment import launched_rank
from megatron_frozen.errors import ConfigError, MegatronFrozenError
from megatron_frozen.gemm import select
from megatron_frozen.integrations.megatron_core.launching import run_script
from megatron_frozen.train.commands import answer_prompt, merge_folder
from megatron_frozen.train.config import load_config
from megatron_frozen.train.job import train
from megatron_frozen.train.launch import is_lost_rank
from megatron_frozen.train.schema import DTYPES

_OF_SCRIPTS = {"run": run_script, "diagnose": diagnose_script}
_UNREAD = 128 + signal.SIGPIPE  # as a shell has it
_FIRST_RANK_SPEAKS_S = 10.0  # how long another rank leaves it to the first one to say what went wrong


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. What goes wrong is one sentence on stderr, said by one rank."""
    arguments = _arguments(list(sys.argv[1:] if argv is None else argv))
    try:
        arguments.run(arguments)
    except KeyboardInterrupt:  # on every rank at once, so none has to wait for another
        if _rank_and_world_size()[0] == 0:
            _say(f"interrupted{arguments.interrupted}")
        return 130
    except BrokenPipeError as error:
        return _UNREAD if _is_reader_gone() else _fail(str(error), code=1)
    except (MegatronFrozenError, OSError) as error:
        return _fail(str(error), code=2 if isinstance(error, ConfigError) else 1)
    except Exception as error:  # the other ranks may be waiting for this one, so it speaks at once
        if is_lost_rank(error):
            _say(
                "another rank is gone or did not answer in time; look for its own message, and without one it may have "
                f"been killed, as for lack of memory ({error})"
            )
            return 1
        traceback.print_exc()
        _say(f"{type(error).__name__}: {error}")
        return 1
    return 0


def console_main() -> None:
    """Entry point of the script. After a failure the process ends without taking groups down, which could hang."""
    try:
        code = main()
    except SystemExit:  # of argparse, which may have printed its help
        if not _is_written_out():
            os._exit(_UNREAD)
        raise
    if not _is_written_out():
        code = code or _UNREAD
    if code:
        os._exit(code)


def _is_written_out() -> bool:
    """Write out what was printed, and return whether there was a reader for it."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BrokenPipeError:
        return False
    return True


def _is_reader_gone() -> bool:
    """Return whether stdout or stderr is a pipe that nobody reads any more, as `head` does after its lines."""
    outputs = poll()
    for descriptor in (1, 2):
        outputs.register(descriptor, 0)
    return any(event & POLLERR for _, event in outputs.poll(0))


def _fail(message: str, *, code: int) -> int:
    """Say `message` once: the other ranks leave it to the first one, whose end makes torchrun end them too."""
    if _rank_and_world_size()[0]:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(code))
        time.sleep(_FIRST_RANK_SPEAKS_S)
    _say(message)
    return code


def _say(message: str) -> None:
    rank, world_size = _rank_and_world_size()
    where = f" (rank {rank})" if world_size > 1 else ""
    print(f"megatron-frozen{where}: error: {message}", file=sys.stderr, flush=True)


def _rank_and_world_size() -> tuple[int, int]:
    """Of the process that has something to say, which may be that these variables are wrong."""
    try:
        return launched_rank()[:2]
    except ConfigError:
        return 0, 1


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Return the command and its options. What follows one that runs a script is the script's, and looked at by nobody
    else."""
    if argv and argv[0] in _OF_SCRIPTS and not {"-h", "--help"} & set(argv[1:2]):
        return argparse.Namespace(run=lambda _: _OF_SCRIPTS[argv[0]](argv[1:]), interrupted="")
    return _parser().parse_args(argv)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megatron-frozen", description="Tensor-parallel LoRA training.")
    version = f"%(prog)s {installed_version('megatron-frozen')}"
    parser.add_argument("--version", action="version", version=version, help="say which version this is")
    parser.set_defaults(interrupted="")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("train", help="train as a YAML file says, under torchrun or on one rank")
    command.add_argument(
        "config", type=Path, metavar="CONFIG.yaml", help="what to train, as in examples/lora_smollm2.yaml"
    )
    command.add_argument("overrides", nargs="*", metavar="key=value", help="settings in place of the file's: lora.r=8")
    command.set_defaults(
        run=lambda given: train(load_config(given.config, overrides=given.overrides)),
        interrupted="; the run goes on from its last checkpoint if started again",
    )

    command = commands.add_parser("generate", help="answer a prompt, with an adapter also without it")
    _add_model(command)
    command.add_argument("--adapter", type=Path, metavar="FOLDER", help="a PEFT adapter")
    command.add_argument("--prompt", required=True, metavar="TEXT", help="what to answer")
    command.add_argument(
        "--max-new-tokens", type=_positive, default=128, metavar="N", help="longest answer, in tokens (default 128)"
    )
    command.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 takes the likeliest token (default 0)"
    )
    command.add_argument("--seed", type=int, default=0, metavar="N", help="for a temperature above 0 (default 0)")
    command.set_defaults(run=answer_prompt)

    command = commands.add_parser("merge", help="write a model with its adapter merged in as a Hugging Face folder")
    _add_model(command)
    command.add_argument("--adapter", type=Path, required=True, metavar="FOLDER", help="a PEFT adapter")
    command.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="a new or empty folder")
    command.set_defaults(run=merge_folder)

    command = commands.add_parser("fetch-demo-model", help="make sure that the demo model is in the cache")
    command.add_argument(
        "--cache-folder",
        type=Path,
        metavar="FOLDER",
        help="the cache (default: megatron_frozen under $XDG_CACHE_HOME, or under ~/.cache)",
    )
    command.set_defaults(run=lambda given: print(fetch_demo_model(given.cache_folder)))

    _add_bench_options(
        commands.add_parser(
            "bench",
            help="measure, and write a CSV with what it was measured on",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            epilog=f"names:\n{overview()}",
        )
    )

    _add_script_commands(commands)

    command = commands.add_parser("env", help="what this installation runs on")
    command.set_defaults(run=lambda _: print(facts_table(), _backends_table(), sep="\n\n"))
    return parser


def _add_script_commands(commands: Any) -> None:
    for name, short, text in (
        ("run", "run a script with megatron-core patched",
         "MEGATRON_FROZEN_PATCH=0 in the environment leaves the patch out."),
        ("diagnose", "run a script and say which of its matrix products take longer than they need, where and why",
         "The report comes on stderr when the script ends, also by Ctrl-C; a few steps are enough. Of a compiled graph "
         "it sees the products that are left to torch, and nothing of other processes."),
    ):  # fmt: skip
        usage = f"megatron-frozen {name} SCRIPT [ARGUMENT ...] | -m MODULE [ARGUMENT ...]"
        commands.add_parser(name, help=short, usage=usage, description=text)


def _backends_table() -> str:
    """Which matrix backend serves bf16 operands into fp32 here, and why the others do not."""
    rows = [("gemm backend", "request", "serves it here")]
    for device in ("cpu", "cuda"):
        rows += [
            (name, request, f"no: {reason}" if reason else "yes") for name, request, reason in select.table(device)
        ]
    return aligned(rows)


def _add_model(command: argparse.ArgumentParser) -> None:
    command.add_argument("--model", required=True, metavar="FOLDER", help="a Hugging Face folder, or demo")
    command.add_argument("--dtype", choices=DTYPES, default="bf16", help="bf16 (default) or fp32")


def _add_bench_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("name", choices=NAMES, metavar="NAME", help=", ".join(NAMES))
    command.add_argument(
        "--output",
        type=Path,
        default=Path("runs/benchmarks"),
        metavar="FOLDER",
        help="where CSV files and pictures go (default: runs/benchmarks)",
    )
    command.add_argument("--device", choices=("cpu", "cuda"), help="cuda for gpu-check, else cpu (default)")
    command.add_argument(
        "--repeats",
        type=_positive,
        metavar="N",
        help=f"samples of each way (default {REPEATS}; growth and gpt-model as installed take at most 5, "
        "linear's control on a CPU 3, lora-step and rl-step a number of their own)",
    )
    command.add_argument(
        "--only", default="", metavar="TEXT", help="of linear or growth, what has this in its name (default: all)"
    )
    command.add_argument("--small", action="store_true", help="tiny sizes, to try it: its times mean nothing")
    command.set_defaults(run=run_bench)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above 0")
    return int(text)
