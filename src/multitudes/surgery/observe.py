"""Observe a network at work: an input that fits it, its layers in order, what a method reaches of it.

In some runs layers give something else than they compute.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.core.attention import math_attention
from multitudes.core.calling import Input, call, plain_attention
from multitudes.core.multitude import REACH, Multitude
from multitudes.core.seeding import seeded
from multitudes.core.trace import hooked, observing, record
from multitudes.surgery.cuts import is_attention
from multitudes.surgery.layers import PRODUCTS

_SIDES = (32, 28, 224, 64, 16, 8, 96, 128, 48, 256, 299, 384, 512, 12, 20, 24, 40, 56, 80, 100, 112, 160, 192)
_LENGTHS = (128, 64, 32, 256, 512, 1000, 1024, 16, 8, 100, 96, 48, 2048, 4096, 16000)


def example_for(model: nn.Module, example: Input | None = None, tries: int | None = None) -> Input:
    """The given example, or noise of a shape that fits the network, found by trying so many of the usual sizes."""
    if example is not None:
        return example
    with seeded(0):  # so that neither torch's random state nor what is drawn after depends on whether one is given
        for x in islice(_usual_inputs(model), tries):
            with suppress(RuntimeError, ValueError, IndexError, TypeError, AssertionError), observing(model):
                call(model, x)
                return x
    raise ValueError(f"no input was found that fits the model ({type(model).__name__}): pass one batch as example=")


def cheap_example(model: nn.Module) -> Input | None:
    """Noise of the most usual size, where that fits the network, and one image or row is soon computed."""
    try:
        return example_for(model, tries=1)
    except ValueError:
        return None


def _usual_inputs(model: nn.Module) -> Iterator[Input]:
    """Batches of two: tokens for a Hugging Face model of texts, else noise of what the network says, or usual sizes."""
    where = next(iter([*model.parameters(), *model.buffers()]), torch.zeros(0))
    tokens = getattr(getattr(model, "config", None), "vocab_size", None)
    if getattr(model, "main_input_name", None) == "input_ids" and isinstance(tokens, int):
        yield {"input_ids": torch.randint(tokens, (2, 8), device=where.device)}
    first = next((m for m in model.modules() if type(m) in PRODUCTS), None)
    own = getattr(model, "inputs", None)  # where a network says how many numbers it takes
    said = [(own,)] if isinstance(own, int) and not isinstance(own, bool) and own > 0 else []
    for shape in [*said, *_shapes(first)]:
        yield torch.randn(2, *shape, device=where.device, dtype=where.dtype if where.is_floating_point() else None)


def _shapes(first: Any) -> list[tuple[int, ...]]:
    if isinstance(first, nn.Linear):
        return [(first.in_features,), (8, first.in_features)]
    if first is None:
        return []
    channels, spatial = first.in_channels, len(first.kernel_size)
    sides = _LENGTHS if spatial == 1 else _SIDES if spatial == 2 else _SIDES[:6]
    return [(channels, *[side] * spatial) for side in sides]


@contextmanager
def followed_attention() -> Iterator[None]:
    """Let attention compute step by step: NaN in, NaN out, which fused kernels do not promise."""
    with plain_attention(), math_attention():
        yield


def executed(model: nn.Module, example: Input, kinds: Collection[type[nn.Module] | str]) -> list[str]:
    """The names of the layers of these kinds or names, in the order in which a forward reaches them."""
    return list(dict.fromkeys(call.name for call in record(model, example, kinds, tensors=False).ended))


def call_order(model: nn.Module, example: Input) -> list[str]:
    """The names of all modules that a forward calls, each time, in the order in which it enters them."""
    return [call.name for call in record(model, example, tensors=False).calls if call.name]


# -- layers that give something else -------------------------------------------------------------------------


@dataclass(frozen=True)
class Read:
    """The arguments of a layer: its inputs that have channels, of attention three, and the others."""

    inputs: list[Tensor]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


Answer = Callable[[str, nn.Module, Read, Tensor], Tensor | tuple[Any, ...]]
"""A function that gives a layer's output in its place; of attention perhaps with its weights."""


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


# -- what a method reaches -----------------------------------------------------------------------------------


_SHOWN = 5
"""The most kinds of layers that a warning names."""


def tell_reach(
    net: Multitude,
    model: nn.Module,
    converted: Collection[str],
    example: Input | None = None,
    *,
    on_purpose: Collection[str] = (),
    warn: bool = True,
) -> None:
    """Note for `summary()` what share of `model` its converted layers, by name, are; warn where it is below one half.

    Layers that a method leaves out `on_purpose` do not count for the warning.
    """
    parts = converted, on_purpose, [""]
    reached = {"parameters": [_parameters(model, names) for names in parts]}
    counted = _multiply_adds(model, converted, on_purpose, example)
    if counted is not None:
        reached["multiply-adds"] = counted
    told = " and ".join(f"{_share(ours, whole):.0%} of the {what}" for what, (ours, _, whole) in reached.items())
    unknown = "unknown without an example" if example is None else "not counted"
    told += f" (multiply-adds are {unknown})" if counted is None else ""
    net.notes[REACH] = f"reaches {told}".replace("%", " %")
    small = any(_share(ours, whole - others) < 0.5 for ours, others, whole in reached.values())
    left = kinds_left(model, [*converted, *on_purpose])
    if warn and small and left:
        warnings.warn(
            f"the method {net.notes[REACH]} of model ({type(model).__name__}); left out are {left}", stacklevel=3
        )


def kinds_left(model: nn.Module, converted: Collection[str]) -> str:
    """The classes that hold the other parameters, largest first, and how many layers of each there are."""
    taken = {id(module) for name in converted for module in model.get_submodule(name).modules()}
    layers: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for module in model.modules():
        own = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        if own and id(module) not in taken:
            layers[type(module).__name__] += 1
            sizes[type(module).__name__] += own
    kinds = [f"{kind} ({layers[kind]})" for kind, _ in sizes.most_common()]
    return ", ".join(kinds[:_SHOWN]) + (", ..." if len(kinds) > _SHOWN else "")


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 1.0


def _parameters(model: nn.Module, names: Collection[str]) -> int:
    found = {id(p): p.numel() for name in names for p in model.get_submodule(name).parameters()}
    return sum(found.values())


def _multiply_adds(
    model: nn.Module, converted: Collection[str], on_purpose: Collection[str], example: Input | None
) -> list[int] | None:
    """Count those of the converted layers, of layers left out on purpose, and of all; None if no example runs."""
    if any(isinstance(module, nn.RNNBase | nn.Conv3d) for module in model.modules()) and example is None:
        return None
    x = cheap_example(model) if example is None else example
    if x is None:
        return None
    try:
        with plain_attention():
            trace = record(model, x, {*converted, *on_purpose}, tensors=False, work=True)
    except Exception:  # whatever a network may raise that cannot be run here: nothing is known then
        return None
    owners = [{id(model.get_submodule(name)) for name in names} for names in (converted, on_purpose)]
    counts = [sum(call.work for call in trace.calls if id(call.module) in own) for own in owners]
    return [*counts, trace.multiply_adds] if trace.multiply_adds else None
