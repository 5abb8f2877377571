"""Locking: one thread at a time runs a network.

While a network runs, it holds the tensors of one member after the other, or is in another mode than before. A second
thread would see them, and predict something else.
"""

from __future__ import annotations

import os
import threading
from weakref import WeakKeyDictionary

from torch import nn

__all__ = ["one_thread"]

_LOCKS: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_FINDING = threading.Lock()


def one_thread(network: nn.Module) -> threading.RLock:
    """The lock of a network, which the thread that runs it holds; copies of the network have locks of their own."""
    with _FINDING:
        return _LOCKS.setdefault(network, threading.RLock())


def _forget() -> None:
    global _FINDING
    _FINDING = threading.Lock()
    _LOCKS.clear()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget)  # the threads that held them are not in the child
