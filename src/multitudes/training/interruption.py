"""Defer Ctrl-C and SIGTERM until a training has written its checkpoint."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class DeferredSignals:
    """Defer SIGINT (Ctrl-C) and SIGTERM inside a `with` block, until `deliver` or the end of the block.

    A second Ctrl-C is delivered at once. Outside the main thread this has no effect.

    >>> try:
    ...     with DeferredSignals() as signals:
    ...         signal.raise_signal(signal.SIGINT)
    ...         print(signals.pending)
    ... except KeyboardInterrupt:
    ...     print("now")
    True
    now
    """

    def __init__(self) -> None:
        self._number: int | None = None
        self._before: dict[int, Any] = {}

    @property
    def pending(self) -> bool:
        """Whether a signal has arrived."""
        return self._number is not None

    def deliver(self) -> None:
        """Restore the handlers, and raise the signal that has arrived."""
        self._release()
        number, self._number = self._number, None
        if number is not None:
            signal.raise_signal(number)

    def __enter__(self) -> DeferredSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) not in (None, signal.SIG_IGN):
                    self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is None:
            self.deliver()
        self._release()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        again = number == self._number == signal.SIGINT
        self._number = number
        if again:
            self.deliver()

    def _release(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
