"""The proof of a narrowing: the narrowed network computes what the model does with its kept channels alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.core.calling import Input, call
from multitudes.core.draws.stochastic import expecting
from multitudes.core.noise import STILL, Redrawn
from multitudes.core.proof import alike, running_statistics, unmoved
from multitudes.core.settings import holding
from multitudes.surgery.cuts import Cut, follows, input_axis, makes, output_axis
from multitudes.surgery.observe import hooked, observing

__all__ = ["prove", "standing_alone"]


def prove(model: nn.Module, narrowed: nn.Module, cuts: dict[str, Cut], example: Input) -> None:
    """Compare a narrowed network with the model on an example, or raise an error that names the layer.

    The model runs at its full width, but each of its layers is the narrowed one, which sees the kept channels and gives
    its outputs to their places; all other channels are NaN. So what the model's own code does to channels between
    layers must come to the same in both: every layer's input is compared, and the output. Layers' constants are moved
    meanwhile, since a norm that starts at zero would hide what is behind it.
    """
    with observing(model, narrowed), _moved_constants(narrowed, cuts):
        wanted, want = _at_full_width(model, narrowed, cuts, example)
        got: list[tuple[str, Tensor]] = []

        def see(name: str, _: nn.Module, args: Any, __: Tensor) -> None:
            got.append((name, args[0]))

        try:
            with hooked(narrowed, cuts, see):
                output = call(narrowed, example)
        except (RuntimeError, ValueError, IndexError) as error:
            raise ValueError(_unfit(model, str(error).splitlines()[0])) from error
    for (name, x), (other, y) in zip(got, wanted, strict=False):
        if name != other or x.shape != y.shape or not _equal(x, y):
            raise ValueError(
                f"model ({type(model).__name__}) cannot be narrowed, since what its forward does before layer {name!r} "
                f"gives that layer other values, or others of its channels, when there are fewer of them"
                f"{_fixed(model)}; deep_ensemble keeps it whole"
            )
    if output.shape != want.shape:
        raise ValueError(_unfit(model, f"it gives {list(output.shape)} instead of {list(want.shape)}"))
    if not _equal(output, want):
        raise ValueError(
            f"model ({type(model).__name__}) cannot be narrowed, since what its forward does after layer "
            f"{got[-1][0]!r} gives another output when there are fewer channels; deep_ensemble keeps it whole"
        )
    trouble = _trouble_in_training(narrowed, example)
    if trouble and not _trouble_in_training(model, example):
        raise ValueError(_unfit(model, f"in training, {trouble}"))


def _trouble_in_training(network: nn.Module, example: Input) -> str:
    """What goes wrong in a run in training mode, which may take other ways through a network."""
    try:
        with (
            holding(network.modules(), "training", True),
            running_statistics(network),
            expecting(network),
            unmoved(network, example),
            torch.no_grad(),
            Redrawn(STILL),
        ):
            call(network, example)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        return str(error).splitlines()[0]
    return ""


def _equal(one: Tensor, other: Tensor) -> bool:
    if not one.is_floating_point():
        return torch.equal(one, other)
    return bool(other.isfinite().all()) and alike(one[None], other[None])


def _at_full_width(
    model: nn.Module, narrowed: nn.Module, cuts: dict[str, Cut], example: Input
) -> tuple[list[tuple[str, Tensor]], Tensor]:
    """What each layer sees of its kept channels, in the order in which they run, and the output."""
    seen: list[tuple[str, Tensor]] = []

    def narrow(name: str, layer: nn.Module, args: Any, y: Tensor) -> Tensor:
        x, cut = args[0], cuts[name]
        if not isinstance(layer, nn.Embedding):
            x = x.index_select(input_axis(layer), cut.inputs.to(x.device))
        seen.append((name, x))
        small = narrowed.get_submodule(name)(x, *args[1:])
        axis = input_axis(layer) if follows(layer) else output_axis(layer)
        return torch.full_like(y, torch.nan).index_copy_(axis, cut.outputs.to(y.device), small.to(y.dtype))

    with hooked(model, cuts, narrow):
        return seen, call(model, example)


@contextmanager
def _moved_constants(narrowed: nn.Module, cuts: dict[str, Cut]) -> Iterator[None]:
    """Inside, no parameter of a layer is the same number throughout."""
    before: list[tuple[nn.Parameter, Tensor]] = []
    generator = torch.Generator().manual_seed(0)
    for name in cuts:
        for parameter in narrowed.get_submodule(name).parameters():
            values = parameter.data
            if values.is_floating_point() and values.numel() and bool((values == values.flatten()[0]).all()):
                before.append((parameter, values))
                parameter.data = torch.rand(values.shape, generator=generator).to(values) / len(values)
    try:
        yield
    finally:
        for parameter, values in before:
            parameter.data = values


def standing_alone(model: nn.Module) -> list[str]:
    """The names of parameters that belong to no layer that is cut."""
    owners = {f"{name}.{own}" if name else own: module for name, module in model.named_modules()
              for own, parameter in module._parameters.items() if parameter is not None}  # fmt: skip
    return [name for name, module in owners.items() if not makes(module) and not follows(module)]


def _unfit(model: nn.Module, reason: str) -> str:
    return (
        f"model ({type(model).__name__}) cannot be narrowed, since its forward fixes a hidden width: "
        f"{reason}{_fixed(model)}"
    )


def _fixed(model: nn.Module) -> str:
    alone = standing_alone(model)
    return f"; it has parameters of fixed width: {', '.join(alone)}" if alone else ""
