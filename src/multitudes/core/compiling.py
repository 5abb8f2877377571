"""Keep a function out of compiled graphs, without importing the compiler."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(function: Function) -> Function:
    """As `torch.compiler.disable`, which would import the compiler, two seconds, whether or not anything is compiled.

    >>> uncompiled(abs)(-1)
    1
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        compiler = sys.modules.get("torch._dynamo.eval_frame")
        if compiler is None:
            return function(*args, **kwargs)
        if (skip := getattr(compiler, "skip_code", None)) is not None:
            skip(run.__code__)  # type: ignore[attr-defined]  # which is all of this module that it could meet
        return torch.compiler.disable(function)(*args, **kwargs)

    run._torchdynamo_disable = True  # type: ignore[attr-defined]  # by which it knows what not to trace
    run._torchdynamo_disable_msg = None  # type: ignore[attr-defined]
    return run  # type: ignore[return-value]
