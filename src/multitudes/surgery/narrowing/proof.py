"""Verify that a narrowed network computes what the model computes with its kept channels alone."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.networks.calls import Input, call
from multitudes.networks.random_functions import STILL, RandomFrom
from multitudes.networks.settings import override_attribute
from multitudes.networks.stochastic import expecting
from multitudes.networks.trace import observing, preserve_state
from multitudes.networks.verification import agree, running_statistics
from multitudes.surgery.narrowing.cuts import CannotNarrow, Cut, form_of
from multitudes.surgery.narrowing.nan_watch import Along, holding_data
from multitudes.surgery.observe import LayerInputs, run_replacing


def prove(
    model: nn.Module,
    narrowed: nn.Module,
    cuts: Mapping[str, Cut],
    example: Input,
    along: Along | None = None,
    sharpened: Collection[str] = (),
) -> None:
    """Compare a narrowed network with the model on an example; raise an error that names a layer that differs.

    The model runs at its full width, but with each layer replaced by the narrowed one, which reads the kept channels
    and writes its outputs to their places; all other channels are NaN. The inputs of all layers and the output must
    agree. Constant parameters get other values meanwhile, since a norm that starts at zero would hide differences.
    Layers in `sharpened` get large weights: with small queries and keys, attention is the same mean for all heads.
    `along` holds the cuts of parameters outside of layers.
    """
    with observing(model, narrowed), holding_data(_moved_weights(model, narrowed, cuts, along or {}, sharpened)):
        wanted, want = _at_full_width(model, narrowed, cuts, example)
        got: list[tuple[str, list[Tensor]]] = []

        def record(name: str, layer: nn.Module, read: LayerInputs, y: Tensor) -> Tensor:
            got.append((name, read.inputs))
            return y

        try:
            output = run_replacing(narrowed, example, cuts, record)
        except (RuntimeError, ValueError, IndexError) as error:
            raise CannotNarrow(_unfit(model, str(error).splitlines()[0])) from error
    for (name, inputs), (other, expected) in zip(got, wanted, strict=False):
        if name != other or not all(map(_same_input, inputs, expected)):
            raise CannotNarrow(
                f"cannot narrow model ({type(model).__name__}): with fewer channels, its code before layer {name!r} "
                f"gives that layer other values or channels{_fixed(model)}"
            )
    if output.shape != want.shape:
        raise CannotNarrow(_unfit(model, f"it gives {list(output.shape)} instead of {list(want.shape)}"))
    if not _equal(output, want):
        raise CannotNarrow(
            f"cannot narrow model ({type(model).__name__}): with fewer channels, its code after layer {got[-1][0]!r} "
            "gives other outputs"
        )
    trouble = _trouble_in_training(narrowed, example)
    if trouble and not _trouble_in_training(model, example):
        raise CannotNarrow(_unfit(model, f"in training, {trouble}"))


def runs_like(network: nn.Module, model: nn.Module, example: Input) -> bool:
    """Return whether a network makes finite predictions of the same shape as a model, and runs in training."""
    try:
        with observing(model, network):
            y, want = call(network, example), call(model, example)
    except (RuntimeError, ValueError, IndexError, TypeError):
        return False
    same = y.shape == want.shape and bool(y.isfinite().all())
    return same and (not _trouble_in_training(network, example) or bool(_trouble_in_training(model, example)))


def _trouble_in_training(network: nn.Module, example: Input) -> str:
    """Return the error of a run in training mode; "" if there is none."""
    try:
        with (
            override_attribute(network.modules(), "training", True),
            running_statistics(network),
            expecting(network),
            preserve_state(network, example),
            torch.no_grad(),
            RandomFrom(STILL),
        ):
            call(network, example)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        return str(error).splitlines()[0]
    return ""


def _equal(one: Tensor, other: Tensor) -> bool:
    if not one.is_floating_point():
        return torch.equal(one, other)
    return bool(other.isfinite().all()) and agree(one[None], other[None])


def _same_input(x: Tensor, expected: Tensor) -> bool:
    """Return whether a layer of the narrowed network reads the same as in the model."""
    if x.shape != expected.shape:  # for layers that run per head, dropped heads are all NaN
        for axis in range(expected.dim() - 1):
            there = ~expected.isnan().movedim(axis, 0).flatten(1).all(1)
            expected = expected.index_select(axis, there.nonzero()[:, 0])
    return x.shape == expected.shape and _equal(x, expected)


def _at_full_width(
    model: nn.Module, narrowed: nn.Module, cuts: Mapping[str, Cut], example: Input
) -> tuple[list[tuple[str, list[Tensor]]], Tensor]:
    """Return the kept channels that each layer reads, in order of execution, and the output."""
    seen: list[tuple[str, list[Tensor]]] = []

    def narrow(name: str, layer: nn.Module, read: LayerInputs, y: Tensor) -> Tensor | tuple[Any, ...]:
        cut, axis = cuts[name], form_of(layer).axis
        kept = [x.index_select(axis, i.to(x.device)) for x, i in zip(read.inputs, cut.indices, strict=False)]
        seen.append((name, kept))
        small = narrowed.get_submodule(name)(*kept, *read.args, **read.kwargs)
        small, *weights = small if isinstance(small, tuple) else (small,)
        whole = torch.full_like(y, torch.nan).index_copy_(axis, cut.outputs.to(y.device), small.to(y.dtype))
        return (whole, *weights) if weights else whole

    return seen, run_replacing(model, example, cuts, narrow)


def _moved_weights(
    model: nn.Module, narrowed: nn.Module, cuts: Mapping[str, Cut], along: Along, sharpened: Collection[str]
) -> dict[nn.Parameter, Tensor]:
    """Return other values for constant parameters and `sharpened` layers of both networks."""
    moved: dict[nn.Parameter, Tensor] = {}
    generator = torch.Generator().manual_seed(0)
    for name in cuts:
        for parameter in narrowed.get_submodule(name).parameters():
            if name in sharpened and parameter.dim() > 1:
                spread = 3 / math.sqrt(parameter[0].numel())
                moved[parameter] = spread * torch.randn(parameter.shape, generator=generator).to(parameter)
            elif _is_constant(parameter.data):
                moved[parameter] = _random(parameter.data, generator)
    for name in free_parameters(model):
        parameter, small = model.get_parameter(name), narrowed.get_parameter(name)
        if _is_constant(parameter.data):
            values = moved[parameter] = _random(parameter.data, generator)
            for axis, kept in along.get(name, ()):
                values = values.index_select(axis, kept.to(values.device))
            if values.shape == small.shape:
                moved[small] = values
    return moved


def _is_constant(values: Tensor) -> bool:
    return values.is_floating_point() and values.numel() > 0 and bool((values == values.flatten()[0]).all())


def _random(values: Tensor, generator: torch.Generator) -> Tensor:
    return torch.rand(values.shape, generator=generator).to(values) / max(1, len(values) if values.dim() else 1)


def free_parameters(model: nn.Module) -> list[str]:
    """Return the names of the parameters outside of layers with channels."""
    alone = {name: module for name, module in model.named_modules() if not form_of(module).outputs}
    named = [
        (name, own) for name, m in alone.items() for own, parameter in m._parameters.items() if parameter is not None
    ]
    return [f"{name}.{own}" if name else own for name, own in named]


def _unfit(model: nn.Module, reason: str) -> str:
    return f"cannot narrow model ({type(model).__name__}): its forward fixes a hidden width: {reason}{_fixed(model)}"


def _fixed(model: nn.Module) -> str:
    alone = free_parameters(model)
    return f"; parameters of fixed width: {', '.join(alone)}" if alone else ""
