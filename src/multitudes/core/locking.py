"""Locks: one thread at a time runs a network.

While a network runs, it holds the tensors of one member after the other, or is in another mode than before. A second
thread would see them, and predict something else.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from weakref import WeakKeyDictionary

import torch
from torch import nn

__all__ = ["evaluating", "initializing", "one_thread"]

_LOCKS: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_FINDING = threading.Lock()
_INITIALIZING = threading.RLock()


def initializing() -> threading.RLock:
    """The lock of code that initializes networks: torch has one random state for all threads.

    It is taken before a network's lock, never after it.
    """
    return _INITIALIZING


def one_thread(network: nn.Module) -> AbstractContextManager[object]:
    """The lock of a network, held by the thread that runs it; each copy of a network has a lock of its own.

    `torch.compile` cannot trace a lock: a compiled network is called without one.
    """
    if torch.compiler.is_compiling():
        return nullcontext()
    with _FINDING:
        return _LOCKS.setdefault(network, threading.RLock())


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside, each module's own mode again after; for one thread at a time."""
    shared = getattr(type(model), "shares", None)  # a multitude's network is no child of it
    network: nn.Module = model if shared is None else getattr(model, shared)
    with one_thread(network):
        modes = [(module, module.training) for module in (*model.modules(), network)]
        model.eval()
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode


def _forget() -> None:
    global _FINDING, _INITIALIZING
    _FINDING, _INITIALIZING = threading.Lock(), threading.RLock()
    _LOCKS.clear()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget)  # the threads that held them are not in the child
