"""Rules about the files of the repository as a whole: what is in them, and where their links lead."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.gates.source import ROOT

MAX_FILE_BYTES = 2**20
# Written in pieces, so that this file passes its own rule.
_MACHINE_PATHS = re.compile(r"/(wor" + r"k|far" + r"m|roo" + r"t)/|bash_job" + "s")
_REGISTRY_HOSTS = re.compile(r"pypi\.or" + r"g|pythonhoste" + r"d|deb\.debia" + r"n|registry\.npmj" + "s")
_WEIGHT_SUFFIXES = {".bin", ".gguf", ".pt", ".pth", ".safetensors", ".whl"}
_LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)\s]*)?\)")
_MAKE_TARGET = re.compile(r"`(?:[A-Z_]+=\S+ )*make ([a-z-]+)")


def tracked_files() -> list[Path]:
    """What git tracks or would track, so that a file is judged before it is committed."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [path for name in listing.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def text_faults(name: str, text: str) -> list[str]:
    return [
        f"{name}:{number}: {what}: {match.group()}"
        for number, line in enumerate(text.splitlines(), start=1)
        for what, pattern in (("a path of one machine", _MACHINE_PATHS), ("a registry's host", _REGISTRY_HOSTS))
        if (match := pattern.search(line))
    ]


def bulk_faults(name: str, num_bytes: int) -> list[str]:
    if Path(name).suffix in _WEIGHT_SUFFIXES:
        return [f"{name}: weights and wheels do not belong in the repository"]
    return [f"{name}: {num_bytes} bytes, at most {MAX_FILE_BYTES}"] if num_bytes > MAX_FILE_BYTES else []


def link_faults(name: str, text: str, *, folder: Path) -> list[str]:
    """Relative links of a Markdown file that lead to no file."""
    return [
        f"{name}: the link {target} leads nowhere"
        for target in _LINK.findall(text)
        if "://" not in target and not (folder / target).exists()
    ]


def make_target_faults(name: str, text: str, *, makefile: str) -> list[str]:
    """`make x` in a Markdown file where the Makefile has no x."""
    targets = re.findall(r"^([a-z-]+):", makefile, re.MULTILINE)
    return [f"{name}: the Makefile has no {word}" for word in _MAKE_TARGET.findall(text) if word not in targets]
