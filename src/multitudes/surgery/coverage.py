"""The share of a network's parameters and of its multiply-adds that a method reaches."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection

from torch import nn

from multitudes.core.calling import Input, plain_attention
from multitudes.core.multitude import REACH, Multitude
from multitudes.core.trace import record
from multitudes.surgery.observe import cheap_example

__all__ = ["kinds_left", "tell_reach"]

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
    parameters = _share(_parameters(model, converted), _parameters(model, [""]))
    counted = _multiply_adds(model, converted, on_purpose, example)
    told = f"reaches {parameters:.0%} of the parameters"
    unknown = "unknown without an example" if example is None else "not counted"
    told += f" (multiply-adds are {unknown})" if counted is None else ""
    told += "" if counted is None else f" and {_share(counted[0], counted[2]):.0%} of the multiply-adds"
    net.notes[REACH] = told.replace("%", " %")
    fair = _share(_parameters(model, converted), _parameters(model, [""]) - _parameters(model, on_purpose))
    small = fair < 0.5 or (counted is not None and _share(counted[0], counted[2] - counted[1]) < 0.5)
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
) -> tuple[int, int, int] | None:
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
    ours, others = (
        sum(call.work for call in trace.calls if any(call.module is model.get_submodule(name) for name in names))
        for names in (converted, on_purpose)
    )
    return (ours, others, trace.multiply_adds) if trace.multiply_adds else None
