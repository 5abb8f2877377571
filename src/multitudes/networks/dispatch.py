"""Dispatch modes for several threads at once, and functions that stay out of compiled graphs.

Torch has process-wide flags for an active dispatch mode, and each mode restores the flags that it found. If the modes
of two threads overlap, the flags stay set, and `torch.compile` stops compiling.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

Function = TypeVar("Function", bound=Callable[..., Any])

MODE_FLAGS = [
    name
    for name in (
        "_is_in_torch_dispatch_mode",
        "_is_in_non_infra_torch_dispatch_mode",
        "_is_in_any_mode_without_ignore_compile_internals",
    )
    if hasattr(_python_dispatch, name)  # older versions of torch have fewer
]
"""Names of torch's flags in `torch.utils._python_dispatch`."""

_set_compiler_flag = getattr(_python_dispatch, "set_is_in_mode_without_ignore_compile_internals", None)


class ThreadSafeMode:
    """Mixin for dispatch modes, to list before torch's base. The last mode to exit resets torch's flags."""

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
            if _set_compiler_flag is not None:
                _set_compiler_flag(values[-1])


class RandomUse(ThreadSafeMode, TorchDispatchMode):
    """Record whether this thread draws from torch's random state.

    >>> with RandomUse() as drawn:
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
    """Return whether an operation draws from torch's random state: with dropout, or without a generator."""
    if torch.Tag.nondeterministic_seeded not in function.tags:
        return False
    arguments = function._schema.arguments
    given = {argument.name: argument.default_value for argument in arguments}
    given |= {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
    return given.get("generator") is None and all(given.get(name, 1) != 0 for name in ("dropout_p", "dropout"))


# -- compiled graphs --------------------------------------------------------------------------------------------


def uncompiled(function: Function) -> Function:
    """Exclude a function from compiled graphs, without the two seconds that `torch.compiler.disable` takes to import.

    >>> uncompiled(abs)(-1)
    1
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        compiler = sys.modules.get("torch._dynamo.eval_frame")
        if compiler is None:
            return function(*args, **kwargs)
        if (skip := getattr(compiler, "skip_code", None)) is not None:
            skip(run.__code__)  # type: ignore[attr-defined]  # `run` is the only frame of this module in a trace
        return torch.compiler.disable(function)(*args, **kwargs)

    run._torchdynamo_disable = True  # type: ignore[attr-defined]  # read by the compiler
    run._torchdynamo_disable_msg = None  # type: ignore[attr-defined]
    return run  # type: ignore[return-value]
