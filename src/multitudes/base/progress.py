"""Progress of long computations."""

from __future__ import annotations

import sys
import time


class ProgressBar:
    """A progress line on stderr that `clear` erases; `total=0` if the total is unknown."""

    def __init__(self, total: int, shown: bool | None = None, unit: str = "batches") -> None:
        self.total, self.unit = total, unit
        self.shown = sys.stderr.isatty() if shown is None else shown
        self.start = time.monotonic()
        self.next_draw = self.start + (2.0 if shown is None else 0.0)
        self.width = 0

    def update(self, done: int) -> None:
        """Show that `done` units are done, at most ten times a second."""
        now = time.monotonic()
        if not self.shown or now < self.next_draw:
            return
        self.next_draw = now + 0.1
        line = f"{done} {self.unit}, {done / max(now - self.start, 1e-9):.1f} {self.unit}/s"
        if self.total:
            share = min(1.0, done / self.total)
            line = f"{share:4.0%} [{'=' * int(20 * share):20}] {line}"
        self._write(line.ljust(self.width))  # blanks erase the rest of a longer line
        self.width = len(line)

    def clear(self) -> None:
        """Erase the line."""
        if self.width:
            self._write(" " * self.width + "\r")

    def _write(self, text: str) -> None:
        sys.stderr.write("\r" + text)
        sys.stderr.flush()
