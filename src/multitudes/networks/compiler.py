"""Keep a function out of compiled graphs, without importing the compiler."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(function: Function) -> Function:
    """Exclude a function from graphs, like `torch.compiler.disable`, but without importing the compiler (two seconds).

    >>> uncompiled(abs)(-1)
    1
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        compiler = sys.modules.get("torch._dynamo.eval_frame")
        if compiler is None:
            return function(*args, **kwargs)
        if (skip := getattr(compiler, "skip_code", None)) is not None:
            skip(run.__code__)  # type: ignore[attr-defined]  # the only frame of this module in a trace
        return torch.compiler.disable(function)(*args, **kwargs)

    run._torchdynamo_disable = True  # type: ignore[attr-defined]  # the compiler's own mark
    run._torchdynamo_disable_msg = None  # type: ignore[attr-defined]
    return run  # type: ignore[return-value]
