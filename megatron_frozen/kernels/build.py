"""The kernels of ``csrc``, compiled by the machine's C++ compiler when they are first needed and kept in its cache."""

from __future__ import annotations

import ctypes
import hashlib
import shlex
import shutil
import subprocess
from functools import lru_cache
from pathlib import Path

from megatron_frozen.environment import CXX, cache_home, text
from megatron_frozen.errors import CheckpointError
from megatron_frozen.io import atomic_write, exclusive_lock

_SOURCES = Path(__file__).parent / "csrc"
# Not -march=native: what is in the cache may be read by another machine of the same home folder.
_FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl",
          "-mavx512bf16", "-mprefer-vector-width=512")  # fmt: skip
_DIGEST_BYTES = hashlib.sha256().digest_size
_LONGEST_S = 120.0  # compiling takes about two


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | str:
    """Return the compiled kernels, or why there are none, as the end of a sentence. Calls into them release the GIL.

    What the cache has is taken as it is, also where there is no compiler; else ``CXX``, g++ or clang++ makes it, in one
    of the processes that want it, while the others wait.
    """
    # In a folder of their own: that of the demo model is locked while it is fetched.
    target = Path(cache_home(), "megatron_frozen", "kernels", f"kernels-{_fingerprint()}.so")
    if (kernels := _loaded(target)) is not None:
        return kernels
    wish, found = text(CXX) or "", shutil.which("g++") or shutil.which("clang++")
    try:
        compiler = shlex.split(wish) or ([found] if found else [])
    except ValueError as error:
        return f"the environment variable CXX is no command ({error}): {wish}"
    if not compiler:
        return "there is no C++ compiler here: install g++, or name one in the environment variable CXX"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(target.parent):  # ranks that all compile take each other's processors
            return _loaded(target) or _compiled(compiler, target)
    except (CheckpointError, OSError, subprocess.SubprocessError) as error:
        reason = _reason(error.__cause__ or error)
        return f"the C++ compiler {shlex.join(compiler)} made no kernels in {target.parent}: {reason}"


def _fingerprint() -> str:
    digest = hashlib.sha256(" ".join(_FLAGS).encode())
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def _loaded(target: Path) -> ctypes.CDLL | None:
    """Return what the cache has; None for nothing, or for a file that a full disk or a crash left cut short or with
    holes: to load such a one ends the process."""
    try:
        content = target.read_bytes()
        is_whole = content[-_DIGEST_BYTES:] == _digest(content[:-_DIGEST_BYTES])
        return ctypes.CDLL(str(target)) if is_whole else None
    except OSError:
        return None


def _compiled(compiler: list[str], target: Path) -> ctypes.CDLL:
    """Put into the cache only what can be loaded, and its digest behind it, which no loader reads."""
    with atomic_write(target) as made:
        command = [*compiler, *_FLAGS, *map(str, sorted(_SOURCES.glob("*.cpp"))), "-o", str(made)]
        subprocess.run(command, check=True, capture_output=True, timeout=_LONGEST_S)
        content = made.read_bytes()
        made.write_bytes(content + _digest(content))
        return ctypes.CDLL(str(made))


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def _reason(error: BaseException) -> str:
    """Return a line of what the compiler said, or else of what happened to it."""
    said = error.stderr if isinstance(error, subprocess.CalledProcessError) else b""
    lines = (said.decode(errors="replace") or str(error)).strip().splitlines()
    return next((line for line in lines if "error" in line), lines[0] if lines else repr(error))
