"""Dispatch modes that several threads may use at once.

Torch has process-wide flags for an active dispatch mode, and each mode restores the flags it found. If two threads
overlap, the one that leaves last restores the other's flags: they stay set, and `torch.compile` compiles nothing more.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

MODE_FLAGS = [
    name
    for name in (
        "_is_in_torch_dispatch_mode",
        "_is_in_non_infra_torch_dispatch_mode",
        "_is_in_any_mode_without_ignore_compile_internals",
    )
    if hasattr(_python_dispatch, name)  # older versions of torch have fewer
]
"""Torch's flags, by their names in `torch.utils._python_dispatch`; only these are reset."""

_tell_the_compiler = getattr(_python_dispatch, "set_is_in_mode_without_ignore_compile_internals", None)


class ThreadSafeMode:
    """Mixin for dispatch modes, listed before torch's base; the last mode to exit resets torch's flags."""

    _lock = threading.Lock()
    _active = 0
    _before: tuple[Any, ...] = ()

    def __enter__(self) -> Any:
        kind = ThreadSafeMode
        with kind._lock:
            if not kind._active:
                kind._before = tuple(getattr(_python_dispatch, name) for name in MODE_FLAGS)
            kind._active += 1
            return super().__enter__()  # type: ignore[misc]

    def __exit__(self, *args: Any) -> None:
        kind = ThreadSafeMode
        with kind._lock:
            super().__exit__(*args)  # type: ignore[misc]
            kind._active -= 1
            values = (True,) * len(MODE_FLAGS) if kind._active else kind._before
            for name, value in zip(MODE_FLAGS, values, strict=True):
                setattr(_python_dispatch, name, value)
            if _tell_the_compiler is not None:
                _tell_the_compiler(values[-1])


class RandomUse(ThreadSafeMode, TorchDispatchMode):
    """Record whether this thread draws from torch's random state, whatever other threads do.

    >>> with NumbersDrawn() as drawn:
    ...     _ = torch.ones(2) + 1
    >>> drawn.seen
    False
    >>> with drawn:
    ...     _ = torch.rand(2)
    >>> drawn.seen
    True
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.seen = self.seen or _draws(func, args, kwargs)
        return func(*args, **kwargs)


def _draws(function: Any, args: Any, kwargs: Any) -> bool:
    """Return whether a torch operation draws from torch's own random state.

    Attention and recurrent kernels do if they have dropout; other random operations, if they get no generator.
    """
    if torch.Tag.nondeterministic_seeded not in function.tags:
        return False
    arguments = function._schema.arguments
    given = {argument.name: argument.default_value for argument in arguments}
    given |= {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
    return given.get("generator") is None and all(given.get(name, 1) != 0 for name in ("dropout_p", "dropout"))
