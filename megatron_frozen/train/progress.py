"""What the first rank shows while a run goes on: the only file that imports tqdm."""

from __future__ import annotations

import sys
import time


class Progress:
    """A progress bar on a terminal; elsewhere (a log file) one plain line per report, at most one each few seconds."""

    def __init__(self, *, first_step: int, max_steps: int, visible: bool, line_every_s: float = 10.0) -> None:
        """`first_step` steps are done already; nothing at all is shown unless `visible`."""
        self._visible, self._max_steps, self._first_step = visible, max_steps, first_step
        self._line_every_s, self._last_line = line_every_s, -line_every_s
        self._start = time.monotonic()
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
        now = time.monotonic() - self._start
        if self._visible and (step == self._max_steps or now - self._last_line >= self._line_every_s):
            self._last_line = now
            left_s = now / (step - self._first_step) * (self._max_steps - step)
            self.say(
                f"step {step}/{self._max_steps}  loss {loss:.4f}  {tokens_per_s:.0f} tokens/s  {_clock(left_s)} left"
            )

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
