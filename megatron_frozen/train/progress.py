"""What the first rank shows while a run goes on: the only file that imports tqdm."""

from __future__ import annotations

import math
import sys
import time


class Progress:
    """A progress bar on a terminal; elsewhere (a log file) one plain line per report, at most one each few seconds."""

    def __init__(self, *, first_step: int, max_steps: int, visible: bool, line_every_s: float = 10.0) -> None:
        """`first_step` steps are done already; nothing at all is shown unless `visible`."""
        self._visible, self._max_steps = visible, max_steps
        self._line_every_s, self._last_line_s = line_every_s, -math.inf
        self._first_report: tuple[int, float] | None = None  # step and time: the rate is counted from there
        self._bar = None
        if visible and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=max_steps, initial=first_step, unit="step", dynamic_ncols=True, desc="train")

    def report(self, step: int, *, loss: float, tokens_per_s: float) -> None:
        """Step `step` is done."""
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {loss:.4f}, {tokens_per_s:.0f} tokens/s", refresh=False)
            self._bar.update(step - self._bar.n)
            return
        now_s = time.monotonic()
        first_step, first_s = self._first_report = self._first_report or (step, now_s)
        if self._visible and (step == self._max_steps or now_s - self._last_line_s >= self._line_every_s):
            self._last_line_s = now_s
            left = (
                _clock((now_s - first_s) / (step - first_step) * (self._max_steps - step)) if step > first_step else "?"
            )
            self.say(f"step {step}/{self._max_steps}  loss {loss:.4f}  {tokens_per_s:.0f} tokens/s  {left} left")

    def say(self, text: str) -> None:
        """Print `text` without tearing the bar."""
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        elif self._visible:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.close()


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes:02d}:{rest:02d}"
