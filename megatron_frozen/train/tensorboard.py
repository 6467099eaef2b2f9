"""TensorBoard: the only file that imports it."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class TensorBoardLog:
    """Scalars of one run as TensorBoard events. One rank writes them."""

    def __init__(self, folder: Path, *, from_step: int | None) -> None:
        """Write into `folder`; events after step `from_step` of an earlier start are hidden."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=None if from_step is None else from_step + 1)

    def write(self, kind: str, *, step: int, **values: Any) -> None:
        """Add each value as `kind/name`."""
        for name, value in values.items():
            self._writer.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        """Write what is left and close."""
        self._writer.close()
