"""Exact narrowing by the user's function `build(width)`, which constructs a network at a fraction of its width."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator

from torch import nn

from multitudes.ensemble.multitude import plain
from multitudes.networks.architecture import check_architecture
from multitudes.networks.calls import Input, call
from multitudes.networks.seeds import seeded
from multitudes.networks.trace import observing
from multitudes.surgery.observe import usual_example
from multitudes.surgery.select import Factory, check_model

Build = Callable[[float], nn.Module]
"""A function that constructs a network at a fraction of its width; `build(1.0)` is the full network."""


def build_function(model: nn.Module | Factory | Build) -> Build | None:
    """Return `model` if it is a function of a width, whose first argument is required or is `width=1.0`; else None.

    >>> build_function(lambda width: nn.Linear(8, round(4 * width))) is not None, build_function(nn.Identity)
    (True, None)
    """
    if isinstance(model, nn.Module) or not callable(model):
        return None
    try:
        parameters = list(inspect.signature(model).parameters.values())
    except ValueError:  # functions in C have no signature
        return None
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    of_width = len(required) == 1 and required[0] is parameters[0] and required[0].kind is not required[0].KEYWORD_ONLY
    by_name = bool(parameters) and not required and parameters[0].name == "width" and parameters[0].default == 1
    return model if of_width or by_name else None  # type: ignore[return-value]


def refuse_options(gamma: object, min_channels: object, layers: object, init: object, heads: object) -> None:
    """Raise an error if an option of automatic narrowing is set: it has no effect on a build function."""
    options = {
        "gamma": (gamma, 1), "min_channels": (min_channels, 64), "layers": (layers, None),
        "init": ("fresh" if init is None else init, "fresh"), "heads": (heads, None),
    }  # fmt: skip
    for name, (value, default) in options.items():
        if value is not default and value != default:
            raise ValueError(
                f"{name}={value!r} has no effect, since model is a function build(width) that constructs narrow "
                f"networks: omit {name}, or pass a network"
            )


def whole_network(build: Build) -> nn.Module:
    """Construct the network at its full width; restore torch's random state."""
    with seeded(0):
        return _call(build, 1.0)


def built_at(build: Build, width: float, count: int, whole: nn.Module, example: Input | None) -> Iterator[nn.Module]:
    """Construct `count` networks at a fraction of the width, one call each, and check them.

    They must have one architecture, fewer parameters than `whole`, and predictions of its shape on the example (by
    default noise of the most common shape, if that fits).
    """
    given: list[nn.Module] = []
    for _ in range(count):
        network = plain(_call(build, width))
        if any(network is other for other in given):
            raise ValueError("model must build a new network in every call, got the same one twice")
        if not given:
            _check_narrower(network, whole, width, example)
        else:
            try:
                check_architecture(given[0], network, len(given))
            except ValueError as error:
                raise ValueError(f"model({width:g}) must build the same architecture in every call: {error}") from error
        given.append(network)
        yield network


def _call(build: Build, width: float) -> nn.Module:
    try:
        network = build(width)
    except Exception as error:  # any error of the user's function
        raise ValueError(
            f"model({width:g}) raised {type(error).__name__}: {error}; model must be a function of a fraction of the "
            "width, above 0 and at most 1, that rounds its widths to integers"
        ) from error
    if not isinstance(network, nn.Module):
        raise ValueError(f"model({width:g}) must build an nn.Module, got a {type(network).__name__}")
    check_model(network, nested=True)
    return network


def _check_narrower(network: nn.Module, whole: nn.Module, width: float, example: Input | None) -> None:
    """Compare the sizes of the two networks, and the shapes of their predictions on an example."""
    small, large = (sum(parameter.numel() for parameter in each.parameters()) for each in (network, whole))
    if width < 1 and small >= large:
        raise ValueError(
            f"model({width:g}) has {small} parameters and model(1) has {large}: a smaller width must give a narrower "
            "network"
        )
    x = usual_example(whole) if example is None else example
    if x is None:
        return
    with observing(whole, network):
        want = list(call(whole, x).shape)
        try:
            got = list(call(network, x).shape)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"model({width:g}) cannot run an input that model(1) runs: {reason}") from error
    if got != want:
        raise ValueError(
            f"model({width:g}) gives predictions of shape {got}, and model(1) of shape {want}: only hidden widths may "
            "change, not those of inputs and outputs"
        )
