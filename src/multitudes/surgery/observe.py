"""Run a network to find an input that fits, the order of its layers, and the share that a method converts."""

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

from multitudes.ensemble.multitude import REACH, Multitude
from multitudes.networks.attention import math_attention
from multitudes.networks.calls import Input, call, plain_attention
from multitudes.networks.seeds import seeded
from multitudes.networks.trace import hooked, observing, record
from multitudes.surgery.narrowing.cuts import is_attention
from multitudes.surgery.select import PRODUCTS

_SIDES = (32, 28, 224, 64, 16, 8, 96, 128, 48, 256, 299, 384, 512, 12, 20, 24, 40, 56, 80, 100, 112, 160, 192)
_LENGTHS = (128, 64, 32, 256, 512, 1000, 1024, 16, 8, 100, 96, 48, 2048, 4096, 16000)


def example_for(model: nn.Module, example: Input | None = None, tries: int | None = None) -> Input:
    """Return the example, or noise of the first of the usual shapes (at most `tries`) that the network accepts."""
    if example is not None:
        return example
    with seeded(0):  # the same random numbers follow with and without an example
        for x in islice(_usual_inputs(model), tries):
            with suppress(RuntimeError, ValueError, IndexError, TypeError, AssertionError), observing(model):
                call(model, x)
                return x
    raise ValueError(f"no input was found that fits the model ({type(model).__name__}): pass one batch as example=")


def usual_example(model: nn.Module) -> Input | None:
    """Return noise of the most common shape, or None if the network does not accept it."""
    try:
        return example_for(model, tries=1)
    except ValueError:
        return None


def _usual_inputs(model: nn.Module) -> Iterator[Input]:
    """Yield batches of two: tokens for Hugging Face's text models, or noise of the declared or usual sizes."""
    where = next(iter([*model.parameters(), *model.buffers()]), torch.zeros(0))
    tokens = getattr(getattr(model, "config", None), "vocab_size", None)
    if getattr(model, "main_input_name", None) == "input_ids" and isinstance(tokens, int):
        yield {"input_ids": torch.randint(tokens, (2, 8), device=where.device)}
    first = next((m for m in model.modules() if type(m) in PRODUCTS), None)
    own = getattr(model, "inputs", None)  # the number of inputs that the network declares
    declared = [(own,)] if isinstance(own, int) and not isinstance(own, bool) and own > 0 else []
    for shape in [*declared, *_shapes(first)]:
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
def unfused_attention() -> Iterator[None]:
    """Run attention step by step, since fused kernels may not propagate NaN."""
    with plain_attention(), math_attention():
        yield


def execution_order(model: nn.Module, example: Input, kinds: Collection[type[nn.Module] | str]) -> list[str]:
    """Return the names of the layers of these classes or names, in the order of execution."""
    return list(dict.fromkeys(call.name for call in record(model, example, kinds, tensors=False).ended))


def call_order(model: nn.Module, example: Input) -> list[str]:
    """Return the names of all modules that a forward calls, in the order of the calls, with repetitions."""
    return [call.name for call in record(model, example, tensors=False).calls if call.name]


# -- replaced outputs ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerInputs:
    """The arguments of a layer: its inputs with channels (three for attention), and the others."""

    inputs: list[Tensor]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


Replacement = Callable[[str, nn.Module, LayerInputs, Tensor], Tensor | tuple[Any, ...]]
"""`(name, layer, inputs, output) -> new output`, for attention optionally with its weights."""


def split_inputs(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayerInputs:
    """Separate a layer's inputs with channels, which an embedding does not have, from its other arguments."""
    names = ("query", "key", "value") if is_attention(layer) else tuple(kwargs)[:1]
    count = 0 if isinstance(layer, nn.Embedding) else max(1, len(names))
    named = [name for name in names if name in kwargs][: max(0, count - len(args))]
    others = {name: value for name, value in kwargs.items() if name not in named}
    return LayerInputs([*args[:count], *(kwargs[name] for name in named)], args[count:], others)


def run_replacing(
    model: nn.Module,
    example: Input,
    names: Collection[str],
    replace: Replacement,
    mode: AbstractContextManager[Any] = nullcontext(),  # noqa: B008
) -> Tensor:
    """Predict an example while `replace` sets the outputs of the named layers, inside a function `mode`."""
    begun: list[LayerInputs] = []

    def enter(name: str, layer: nn.Module, args: Any, kwargs: Any) -> None:
        begun.append(split_inputs(layer, args, kwargs))

    def leave(name: str, layer: nn.Module, _: Any, y: Any) -> Any:
        new = replace(name, layer, begun.pop(), y[0] if isinstance(y, tuple) else y)
        return (new, *y[1:]) if isinstance(y, tuple) and isinstance(new, Tensor) else new

    with unfused_attention(), mode, hooked(model, names, leave, enter):
        return call(model, example)


# -- the converted share -----------------------------------------------------------------------------------


_SHOWN = 5
"""The maximum number of layer kinds in a warning."""


def note_reach(
    net: Multitude,
    model: nn.Module,
    converted: Collection[str],
    example: Input | None = None,
    *,
    on_purpose: Collection[str] = (),
    warn: bool = True,
) -> None:
    """Note for `summary()` the share of `model` in its converted layers; warn if it is below one half.

    The warning ignores the layers that a method excludes `on_purpose`.
    """
    parts = converted, on_purpose, [""]
    reached = {"parameters": [_parameters(model, names) for names in parts]}
    counted = _multiply_adds(model, converted, on_purpose, example)
    if counted is not None:
        reached["multiply-adds"] = counted
    shares = " and ".join(f"{_share(ours, whole):.0%} of the {what}" for what, (ours, _, whole) in reached.items())
    unknown = "unknown without an example" if example is None else "not counted"
    shares += f" (multiply-adds are {unknown})" if counted is None else ""
    net.notes[REACH] = f"reaches {shares}".replace("%", " %")
    small = any(_share(ours, whole - others) < 0.5 for ours, others, whole in reached.values())
    left = unconverted_kinds(model, [*converted, *on_purpose])
    if warn and small and left:
        warnings.warn(
            f"the method {net.notes[REACH]} of model ({type(model).__name__}); left out are {left}", stacklevel=3
        )


def unconverted_kinds(model: nn.Module, converted: Collection[str]) -> str:
    """List the classes with the remaining parameters and their numbers of layers, largest first."""
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
    """Count those of converted layers, of layers excluded on purpose, and of all; None if no example runs."""
    if any(isinstance(module, nn.RNNBase | nn.Conv3d) for module in model.modules()) and example is None:
        return None
    x = usual_example(model) if example is None else example
    if x is None:
        return None
    try:
        with plain_attention():
            trace = record(model, x, {*converted, *on_purpose}, tensors=False, work=True)
    except Exception:  # any error of a network that cannot run here
        return None
    owners = [{id(model.get_submodule(name)) for name in names} for names in (converted, on_purpose)]
    counts = [sum(call.work for call in trace.calls if id(call.module) in own) for own in owners]
    return [*counts, trace.multiply_adds] if trace.multiply_adds else None
