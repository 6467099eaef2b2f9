"""JSON objects in files, with errors that name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_frozen.errors import CheckpointError
from megatron_frozen.io.atomic import atomic_write


def read_json(path: str | Path) -> dict[str, Any]:
    """The JSON object in the file `path`. Raises CheckpointError, naming the file, if it is missing or no object."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {path} ({error.strerror}); check the path") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); repair it or copy it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a JSON {type(value).__name__}, and must hold an object {{...}}")
    return value


def write_json(path: str | Path, value: dict[str, Any], *, indent: int | None = 2) -> None:
    """Write `value` as JSON to the file `path`, atomically, in UTF-8 with its own characters (no escapes)."""
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(value, indent=indent, ensure_ascii=False) + "\n", encoding="utf-8")
