"""Hold back Ctrl-C and SIGTERM until a training has saved itself."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class DeferredSignals:
    """Hold back SIGINT (Ctrl-C) and SIGTERM inside a `with`; deliver them on `deliver`, or at its end.

    A second Ctrl-C is not held back. Only a process's main thread can hold signals; in other threads nothing happens.

    >>> try:
    ...     with DeferredSignals() as held:
    ...         signal.raise_signal(signal.SIGINT)
    ...         print(held.pending)
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
        """True if a signal has arrived."""
        return self._number is not None

    def deliver(self) -> None:
        """Deliver the signal that has arrived, by default as KeyboardInterrupt or the end of the process."""
        self._release()
        number, self._number = self._number, None
        if number is not None:
            signal.raise_signal(number)

    def __enter__(self) -> DeferredSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) not in (None, signal.SIG_IGN):
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is None:
            self.deliver()
        self._release()

    def _note(self, number: int, frame: FrameType | None) -> None:
        again = number == self._number == signal.SIGINT
        self._number = number
        if again:
            self.deliver()

    def _release(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
