"""metrics.jsonl: one JSON object a line, appended as the run goes; a resumed run cuts it back to its first step."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_frozen.errors import CheckpointError
from megatron_frozen.io import atomic_write


class MetricsFile:
    """The metric records of one run. One rank writes it.

    A record has `kind` ("train" or "eval"), `step` (optimizer steps done) and the values of that kind.
    """

    def __init__(self, path: Path, *, from_step: int | None) -> None:
        """Open `path`; records after step `from_step` are dropped, all of them if it is None."""
        self.records = [] if from_step is None else [r for r in read_metrics(path) if r["step"] <= from_step]
        with atomic_write(path) as temporary:
            temporary.write_text("".join(json.dumps(record) + "\n" for record in self.records), encoding="utf-8")
        self._path, self._file = path, path.open("a", encoding="utf-8")

    def write(self, kind: str, *, step: int, **values: Any) -> None:
        """Append one record; other processes can read it when this returns. CheckpointError if the disk is full."""
        record = {"kind": kind, "step": step, **values}
        self.records.append(record)
        try:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        except OSError as error:
            raise CheckpointError(
                f"cannot add to {self._path} ({error.strerror}); free space on its disk, and start again to resume"
            ) from error

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):  # only what a failed write has left, and that was told
            self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records in `path`, none if it is missing, up to the first line that is none (cut short by a crash)."""
    if not path.exists():
        return []
    records = []
    for line in path.read_bytes().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            break
        if not isinstance(record, dict) or type(record.get("step")) is not int or "kind" not in record:
            break
        records.append(record)
    return records
