"""Runs in which layers give something else than they compute."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from multitudes.core.calling import Input, call
from multitudes.core.trace import hooked
from multitudes.surgery.cuts import is_attention
from multitudes.surgery.observe import followed_attention

__all__ = ["Answer", "Read", "answered", "read_by"]


@dataclass(frozen=True)
class Read:
    """What a layer is called with: its inputs that have channels, of attention three, and its other arguments."""

    inputs: list[Tensor]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


Answer = Callable[[str, nn.Module, Read, Tensor], Tensor | tuple[Any, ...]]
"""What a layer, of some name, gives in the place of its output; of attention perhaps with its weights."""


def read_by(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Read:
    """Tell a layer's inputs from its other arguments; an embedding has indices alone."""
    names = ("query", "key", "value") if is_attention(layer) else tuple(kwargs)[:1]
    count = 0 if isinstance(layer, nn.Embedding) else max(1, len(names))
    named = [name for name in names if name in kwargs][: max(0, count - len(args))]
    others = {name: value for name, value in kwargs.items() if name not in named}
    return Read([*args[:count], *(kwargs[name] for name in named)], args[count:], others)


def answered(
    model: nn.Module,
    example: Input,
    names: Collection[str],
    answer: Answer,
    mode: AbstractContextManager[Any] = nullcontext(),  # noqa: B008
) -> Tensor:
    """The prediction of a network on an example where `answer` gives the outputs of some layers.

    Attention computes step by step: NaN in, NaN out. A function `mode` sees what the network calls before others do.
    """
    begun: list[Read] = []

    def enter(name: str, layer: nn.Module, args: Any, kwargs: Any) -> None:
        begun.append(read_by(layer, args, kwargs))

    def leave(name: str, layer: nn.Module, _: Any, y: Any) -> Any:
        given = answer(name, layer, begun.pop(), y[0] if isinstance(y, tuple) else y)
        return (given, *y[1:]) if isinstance(y, tuple) and isinstance(given, Tensor) else given

    with followed_attention(), mode, hooked(model, names, leave, enter):
        return call(model, example)
