"""The output folder of a run: whose it is, where the run goes on from, and what it leaves behind.

| entry | what it holds |
|---|---|
| `run.json` | what the run is: a folder never mixes two runs |
| `checkpoints/step_NNNNNNNN/` | see checkpoint/train_state.py |
| `metrics.jsonl`, `tensorboard/`, `loss.png` | the loss over the steps |
| `adapter/` or `model/` | the result: a PEFT adapter, or with full fine-tuning a Hugging Face folder |
| `summary.json` | what the end of the run showed |
"""

from __future__ import annotations

import contextlib
import hashlib
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_frozen.checkpoint.train_state import load_state, newest_complete
from megatron_frozen.errors import ConfigError
from megatron_frozen.io import exclusive_lock, read_json, write_json
from megatron_frozen.io.atomic import is_temporary
from megatron_frozen.train.config import DEMO_MODEL, TrainConfig
from megatron_frozen.train.schema import to_plain

CHECKPOINTS, RUN, SUMMARY = "checkpoints", "run.json", "summary.json"

_RESULTS = ("adapter", "model", SUMMARY)
_PIECES, _PIECE_BYTES = 64, 1 << 16  # of a weight file, for its fingerprint
_CONTENTS = {"train_data_sha256": "train_data", "model_fingerprint": "model"}
_IDENTITY = ("dtype", "lora", "seq_length", "packing", "on_bad_line", "seed")


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """Where a run starts."""

    resume_from: Path | None
    """A complete checkpoint; None = the beginning."""
    messages: tuple[str, ...] = ()
    """What the user should know about the choice."""
    summary: dict[str, Any] | None = None
    """Set if the run is finished already: what its end showed."""


def identity(config: TrainConfig) -> dict[str, Any]:
    """What makes two runs the same run: the settings that a resume must not change, and the content of the training
    data and the model, wherever they lie."""
    plain = to_plain(config)
    return {
        **{name: plain[name] for name in _IDENTITY},
        "train_data_sha256": hashlib.sha256(Path(config.train_data).read_bytes()).hexdigest(),
        "model_fingerprint": DEMO_MODEL if config.model == DEMO_MODEL else _fingerprint(Path(config.model)),
    }


def _fingerprint(folder: Path) -> str:
    """SHA-256 of config.json and of each weight file's name, size, header and pieces all along it: what any training
    changes, without reading it all."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        num_bytes = path.stat().st_size
        digest.update(f"{path.name} {num_bytes} ".encode())
        with path.open("rb") as file:
            for piece in range(_PIECES):
                file.seek(piece * num_bytes // _PIECES)
                digest.update(file.read(_PIECE_BYTES))
    return digest.hexdigest()


class FolderClaim:
    """The hold of one process on an output folder: two jobs in it would delete each other's checkpoints."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._held: contextlib.ExitStack | None = None

    def take(self) -> None:
        """Hold the folder until `close`, if it is there. ConfigError if another process holds it."""
        if self._held is not None or not self._folder.is_dir():
            return
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(exclusive_lock(self._folder, wait=False))
            except BlockingIOError:
                raise ConfigError(
                    f"output_dir {self._folder} is in use by another job; wait until that ends, or give another one"
                ) from None
            self._held = stack.pop_all()

    def close(self) -> None:
        """Let the folder go."""
        if self._held is not None:
            self._held.close()


def find_start(config: TrainConfig) -> Start:
    """Decide where to start, reading the folder only. One rank calls it.

    ConfigError if output_dir holds another run, something else, or a run where none is allowed (resume=never). A start
    that failed before its first checkpoint has left nothing to mix with: another config may begin in its place.
    """
    folder = Path(config.output_dir)
    has_run = (folder / RUN).is_file()
    if not has_run and folder.is_dir() and not all(map(is_temporary, folder.iterdir())):
        raise ConfigError(f"output_dir {folder} holds other files and no run; give a new or empty folder")
    newest, incomplete = newest_complete(folder / CHECKPOINTS)
    if has_run and (newest is not None or any((folder / name).exists() for name in _RESULTS)):
        if config.resume == "never":
            raise ConfigError(
                f"output_dir {folder} holds another run and resume is never; give another one, or resume=auto to go on"
            )
        _check_same_run(read_json(folder / RUN), config, where=f"output_dir {folder}")
    if config.resume not in ("auto", "never"):
        return _start_at(Path(config.resume), config)
    if not has_run:
        return Start(resume_from=None)
    messages = [f"{path} is not complete (its save was cut short), it is left aside" for path in incomplete]
    if newest is None:
        messages.append(f"{folder} holds no complete checkpoint, starting at step 0")
        return Start(resume_from=None, messages=tuple(messages))
    return _newest_start(newest, messages, config)


def begin(config: TrainConfig) -> None:
    """Mark output_dir as the folder of this run, with the paths for the reader's sake. One rank calls it."""
    write_json(
        Path(config.output_dir, RUN), {"model": config.model, "train_data": config.train_data, **identity(config)}
    )


def _newest_start(newest: Path, messages: list[str], config: TrainConfig) -> Start:
    step = load_state(newest)["step"]
    _check_steps_left(newest, step, config)
    summary_file = Path(config.output_dir, SUMMARY)
    if step == config.max_steps and summary_file.is_file():
        summary = read_json(summary_file)
        if summary["step"] == config.max_steps:
            return Start(resume_from=newest, messages=tuple(messages), summary=summary)
    return Start(resume_from=newest, messages=(*messages, f"resuming from {newest}"))


def _start_at(checkpoint: Path, config: TrainConfig) -> Start:
    state = load_state(checkpoint)
    _check_same_run(state["run"], config, where=f"the checkpoint {checkpoint}")
    _check_steps_left(checkpoint, state["step"], config)
    newest, _ = newest_complete(Path(config.output_dir, CHECKPOINTS))
    if newest is not None and load_state(newest)["step"] > state["step"]:
        raise ConfigError(
            f"resume: {newest} is later than {checkpoint}, so the next resume=auto would not know which to take; "
            f"remove it, or give another output_dir"
        )
    return Start(resume_from=checkpoint, messages=(f"resuming from {checkpoint}",))


def _check_steps_left(checkpoint: Path, step: int, config: TrainConfig) -> None:
    if step > config.max_steps:
        raise ConfigError(
            f"max_steps is {config.max_steps} and {checkpoint} is at step {step} already; "
            f"raise max_steps, or give another output_dir"
        )


def _check_same_run(saved: dict[str, Any], config: TrainConfig, *, where: str) -> None:
    for name, value in identity(config).items():
        if saved.get(name) != value:
            raise ConfigError(
                f"{where} belongs to another run: {_difference(name, saved.get(name), value)}; "
                f"give another output_dir, or the settings of that run"
            )


def _difference(name: str, there: Any, here: Any) -> str:
    """What differs between the two values of an identity's key `name`."""
    if name in _CONTENTS:
        return f"the content of {_CONTENTS[name]} has changed"
    if isinstance(there, dict) and isinstance(here, dict):
        inner = next(key for key in {**there, **here} if there.get(key) != here.get(key))
        return _difference(f"{name}.{inner}", there.get(inner), here.get(inner))
    # A run with LoRA and one without: the settings of the one are no help.
    there, here = ("set" if isinstance(value, dict) else repr(value) for value in (there, here))
    return f"{name} is {there} there and {here} here"


def print_summary(summary: dict[str, Any], config: TrainConfig) -> None:
    """Show what a run's end showed, and the command that asks its result a question."""
    lines = [f"finished after {summary['step']} step{'' if summary['step'] == 1 else 's'}"]
    if summary["loss_after"] is not None:
        before = "unknown" if summary["loss_before"] is None else f"{summary['loss_before']:.4f}"
        lines.append(f"held-out loss: {before} before, {summary['loss_after']:.4f} after")
    if summary["question"] is not None:
        lines.append(f"question: {summary['question']}")
        if summary["reference"] is not None:
            lines.append(f"reference: {summary['reference']}")
        lines += [f"before: {summary['answer_before']}", f"after: {summary['answer_after']}"]
    lines += [f"result: {summary['result']}", f"try it: {_try_it(summary['result'], config)}"]
    print("\n".join(lines), flush=True)


def _try_it(result: str, config: TrainConfig) -> str:
    """A shell command that works in the current folder."""
    program = Path(sys.executable).with_name("megatron-frozen")
    command = [_from_here(program)] if program.exists() else [_from_here(Path(sys.executable)), "-m", "megatron_frozen"]
    model = ["--model", result] if config.lora is None else ["--model", config.model, "--adapter", result]
    return f'{shlex.join([*command, "generate", *model])} --prompt "..."'


def _from_here(path: Path) -> str:
    here = Path.cwd()
    return str(path.relative_to(here) if here in path.parent.parents else path)  # a bare name would not be found
