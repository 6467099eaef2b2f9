"""Files and folders that appear under their name complete, or not at all.

A writer works in a temporary folder beside the target (`.NAME.tmp-RANDOM`), holds a lock on it, and renames at the end.
A writer that is killed leaves only that folder: no reader looks at it, and its lock is gone, so the next writer of the
same target deletes it. A lock, unlike a process number in the name, is also right between containers on one disk.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_frozen.errors import CheckpointError


@contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """Yield a path to write a file to; it becomes the file `path` when the body ends without an exception.

    The yielded path has the same name in a temporary folder, so what goes by suffixes works.
    Raises CheckpointError if `path` is a folder, and for an OSError, as of a full disk. Parent folders are made. No
    collectives: call it on one rank.
    """
    path = Path(path)
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder, and a file must be written there; remove it or give another path")
    with _temporary(path) as folder:
        temporary = folder / path.name
        yield temporary
        temporary.chmod(folder.stat().st_mode & 0o666)  # some libraries write files that only their owner may read
        _sync(temporary)
        os.replace(temporary, path)
        _sync(path.parent)


@contextmanager
def atomic_folder(path: str | Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield a temporary folder to fill; it is renamed to `path` when the body ends without an exception.

    A folder that is there already and holds anything raises CheckpointError before the body, unless `replace` is true:
    then the old folder stays until the new one is complete (only between the last two renames is neither under its
    name). An OSError, as of a full disk, becomes a CheckpointError. Parent folders are made. No collectives: call it on
    one rank.
    """
    path = Path(path)
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"{path} is a file, and a folder must be written there; remove it or give another path")
    if not replace and path.is_dir() and any(path.iterdir()):
        raise CheckpointError(f"{path} already holds files; give an empty or new folder, or remove it first")
    with _temporary(path) as temporary:
        yield temporary
        for entry in temporary.rglob("*"):
            _sync(entry)
        _sync(temporary)
        if replace and path.is_dir():
            with _temporary(path) as old:
                os.replace(path, old)
                os.replace(temporary, path)
        else:
            os.replace(temporary, path)
        _sync(path.parent)


def is_temporary(path: Path) -> bool:
    """Whether the name is one that a writer of this module works under: whole files and folders never have it."""
    return re.fullmatch(r"\..+\.tmp-[0-9a-f]{8}", path.name) is not None


@contextmanager
def exclusive_lock(folder: Path, *, wait: bool = True) -> Iterator[None]:
    """Let one process at a time run the body: a lock on the folder itself, which dies with its holder.

    BlockingIOError if another one has it and `wait` is false.
    """
    lock = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise
        except OSError:
            pass  # a file system without locks: the atomic renames keep the result whole all the same
        yield
    finally:
        os.close(lock)


@contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    """A new locked folder beside `path`, deleted at the end if it is still under its temporary name."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for entry in path.parent.iterdir():
            if entry.name.startswith(f".{path.name}.tmp-"):
                _remove_if_abandoned(entry)
        temporary, lock = _create_locked(path)
    except OSError as error:
        raise _refusal(path, error) from error
    try:
        yield temporary
    except OSError as error:
        raise _refusal(path, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        os.close(lock)


def _refusal(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"cannot write {path} ({error}); check the path and its permissions, and free some space on its disk"
    )


def _create_locked(path: Path) -> tuple[Path, int]:
    while True:
        temporary = path.parent / f".{path.name}.tmp-{secrets.token_hex(4)}"
        temporary.mkdir()
        with suppress(FileNotFoundError):
            lock = os.open(temporary, os.O_RDONLY)
            with suppress(OSError):  # a file system without locks: nobody can take one either, so it is never deleted
                fcntl.flock(lock, fcntl.LOCK_EX)
            if temporary.exists():
                return temporary, lock
            os.close(lock)
        # Another writer found it between its making and its locking, and took it for abandoned: make another.


def _remove_if_abandoned(entry: Path) -> None:
    with suppress(OSError):
        lock = os.open(entry, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(entry, ignore_errors=True)
        finally:
            os.close(lock)


def _sync(path: Path) -> None:
    """Force a file's bytes or a folder's names to the disk, so that a rename never arrives there before them."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
