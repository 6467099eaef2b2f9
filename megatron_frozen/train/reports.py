"""What a run tells: progress, metrics, TensorBoard, loss curve, summary. Only the first rank writes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from megatron_frozen.comm import WORLD, group_rank
from megatron_frozen.io import write_json
from megatron_frozen.train.config import TrainConfig
from megatron_frozen.train.metrics import MetricsFile
from megatron_frozen.train.plot import plot_loss
from megatron_frozen.train.progress import Progress
from megatron_frozen.train.run_folder import SUMMARY, print_summary
from megatron_frozen.train.tensorboard import TensorBoardLog
from megatron_frozen.train.trainer import StepReport


class Reports:
    """The outputs of one run."""

    def __init__(self, config: TrainConfig, *, first_step: int, resumed: bool) -> None:
        self._config = config
        self._writes = group_rank(WORLD) == 0
        self._start = time.monotonic()
        self._logs: tuple[MetricsFile | TensorBoardLog, ...] = ()
        self._folder = Path(config.output_dir)
        if self._writes:
            from_step = first_step if resumed else None
            self._metrics = MetricsFile(self._folder / "metrics.jsonl", from_step=from_step)
            self._logs = (self._metrics, TensorBoardLog(self._folder / "tensorboard", from_step=from_step))
        self._progress = Progress(first_step=first_step, max_steps=config.max_steps, visible=self._writes)

    def say(self, text: str) -> None:
        """One line for the user."""
        self._progress.say(text)

    def step(self, step: int, report: StepReport) -> None:
        """Step `step` is done."""
        self._progress.report(step, loss=report.loss, tokens_per_s=report.tokens_per_s)
        if step % self._config.log_every == 0 or step == self._config.max_steps:
            for log in self._logs:
                log.write(
                    "train",
                    step=step,
                    loss=report.loss,
                    grad_norm=report.grad_norm,
                    learning_rate=report.learning_rate,
                    tokens_per_s=round(report.tokens_per_s, 1),
                    elapsed_s=round(time.monotonic() - self._start, 3),
                )

    def evaluation(self, step: int, *, loss: float, tokens: int) -> None:
        """The held-out loss after `step` steps."""
        self.say(f"step {step}: held-out loss {loss:.4f} over {tokens} tokens")
        for log in self._logs:
            log.write("eval", step=step, loss=loss, tokens=tokens)

    def finish(self, summary: dict[str, Any]) -> None:
        """Draw the loss curve, write and show the summary. The first rank calls it."""
        plot_loss(
            self._metrics.records, self._folder / "loss.png", title=f"{self._config.model}, {self._config.train_data}"
        )
        write_json(self._folder / SUMMARY, summary)
        print_summary(summary, self._config)

    def close(self) -> None:
        """Close the files."""
        self._progress.close()
        for log in self._logs:
            log.close()
