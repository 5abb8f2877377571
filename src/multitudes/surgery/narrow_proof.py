"""The proof of a narrowing: the narrowed network computes what the model does with its kept channels alone."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.core.calling import Input, call
from multitudes.core.draws.stochastic import expecting
from multitudes.core.noise import STILL, Redrawn
from multitudes.core.proof import alike, running_statistics
from multitudes.core.settings import holding
from multitudes.core.trace import hooked, observing, unmoved
from multitudes.surgery.cuts import CannotNarrow, Cut, follows, input_axis, makes, output_axis
from multitudes.surgery.observe import followed_attention
from multitudes.surgery.watch import Along

__all__ = ["prove", "runs_like", "standing_alone"]


def prove(
    model: nn.Module,
    narrowed: nn.Module,
    cuts: Mapping[str, Cut],
    example: Input,
    along: Along | None = None,
    sharpened: Collection[str] = (),
) -> None:
    """Compare a narrowed network with the model on an example, or raise an error that names the layer.

    The model runs at its full width, but each of its layers is the narrowed one, which sees the kept channels and gives
    its outputs to their places; all other channels are NaN. So what the model's own code does to channels between
    layers must come to the same in both: every layer's input is compared, and the output. Constants are moved
    meanwhile, since a norm that starts at zero would hide what is behind it; `along` says how those of parameters that
    stand alone were cut. Outputs of layers that are `sharpened` are made large: attention by small queries and keys is
    a mean, in which nobody could tell one head from another.
    """
    moved = _moved_constants(model, narrowed, cuts, along or {}, sharpened)
    with observing(model, narrowed), followed_attention(), moved:
        wanted, want = _at_full_width(model, narrowed, cuts, example, sharpened)
        got: list[tuple[str, Tensor]] = []

        def see(name: str, layer: nn.Module, args: Any, _: Tensor) -> None:
            if not isinstance(layer, nn.Embedding):
                got.append((name, args[0]))

        try:
            with hooked(narrowed, cuts, see):
                output = call(narrowed, example)
        except (RuntimeError, ValueError, IndexError) as error:
            raise CannotNarrow(_unfit(model, str(error).splitlines()[0])) from error
    for (name, x), (other, y) in zip(got, wanted, strict=False):
        y = y if x.shape == y.shape else _of_kept_heads(y)
        if name != other or x.shape != y.shape or not _equal(x, y):
            raise CannotNarrow(
                f"model ({type(model).__name__}) cannot be narrowed, since what its forward does before layer {name!r} "
                f"gives that layer other values, or others of its channels, when there are fewer of them"
                f"{_fixed(model)}"
            )
    if output.shape != want.shape:
        raise CannotNarrow(_unfit(model, f"it gives {list(output.shape)} instead of {list(want.shape)}"))
    if not _equal(output, want):
        raise CannotNarrow(
            f"model ({type(model).__name__}) cannot be narrowed, since what its forward does after layer "
            f"{got[-1][0]!r} gives another output when there are fewer channels"
        )
    trouble = _trouble_in_training(narrowed, example)
    if trouble and not _trouble_in_training(model, example):
        raise CannotNarrow(_unfit(model, f"in training, {trouble}"))


def runs_like(network: nn.Module, model: nn.Module, example: Input) -> bool:
    """Return whether a network gives finite predictions of the shape of a model's, and runs in training."""
    try:
        with observing(model, network):
            y, want = call(network, example), call(model, example)
    except (RuntimeError, ValueError, IndexError, TypeError):
        return False
    same = y.shape == want.shape and bool(y.isfinite().all())
    return same and (not _trouble_in_training(network, example) or bool(_trouble_in_training(model, example)))


def _trouble_in_training(network: nn.Module, example: Input) -> str:
    """Return the error of a run in training mode, which may take other ways through a network."""
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


def _of_kept_heads(x: Tensor) -> Tensor:
    """Take the heads that are kept from the input of a layer that is applied to each; the others are NaN throughout."""
    for axis in range(x.dim() - 1):
        there = ~x.isnan().movedim(axis, 0).flatten(1).all(1)
        x = x.index_select(axis, there.nonzero()[:, 0])
    return x


def _at_full_width(
    model: nn.Module, narrowed: nn.Module, cuts: Mapping[str, Cut], example: Input, sharpened: Collection[str]
) -> tuple[list[tuple[str, Tensor]], Tensor]:
    """Return the kept channels that each layer reads, in the order in which layers run, and the output."""
    seen: list[tuple[str, Tensor]] = []

    keywords: dict[str, dict[str, Any]] = {}

    def note(name: str, layer: nn.Module, args: Any, kwargs: Any) -> None:
        keywords[name] = kwargs

    def narrow(name: str, layer: nn.Module, args: Any, y: Tensor) -> Tensor:
        cut, kwargs = cuts[name], keywords[name]
        if isinstance(layer, nn.Embedding):
            small = narrowed.get_submodule(name)(*args, **kwargs)
            return torch.full_like(y, torch.nan).index_copy_(-1, cut.outputs.to(y.device), small.to(y.dtype))
        x = args[0].index_select(input_axis(layer), cut.inputs.to(y.device))
        seen.append((name, x))
        if name in sharpened and all(name != before for before, _ in seen[:-1]):
            _sharpen(narrowed.get_submodule(name), x)
        small = narrowed.get_submodule(name)(x, *args[1:], **kwargs)
        axis = input_axis(layer) if follows(layer) else output_axis(layer)
        return torch.full_like(y, torch.nan).index_copy_(axis, cut.outputs.to(y.device), small.to(y.dtype))

    with hooked(model, cuts, narrow, note):
        return seen, call(model, example)


def _sharpen(layer: nn.Module, x: Tensor) -> None:
    """Scale a layer's parameters so that its outputs are about as large as those of trained queries."""
    size = layer(x).nan_to_num().float().square().mean().sqrt()
    if size > 0:
        for parameter in layer.parameters():
            parameter.data = parameter.data * (3 / size).to(parameter.dtype)


@contextmanager
def _moved_constants(
    model: nn.Module, narrowed: nn.Module, cuts: Mapping[str, Cut], along: Along, sharpened: Collection[str]
) -> Iterator[None]:
    """Move parameters that are the same number throughout, of layers and those that stand alone, in both networks."""
    before: list[tuple[nn.Parameter, Tensor]] = []
    generator = torch.Generator().manual_seed(0)
    for parameter in [p for name in sharpened for p in narrowed.get_submodule(name).parameters()]:
        before.append((parameter, parameter.data))

    def move(parameter: nn.Parameter, values: Tensor) -> None:
        before.append((parameter, parameter.data))
        parameter.data = values

    for parameter in [p for name in cuts for p in narrowed.get_submodule(name).parameters()]:
        if _is_constant(parameter.data):
            move(parameter, _random(parameter.data, generator))
    for name in standing_alone(model):
        parameter, small = model.get_parameter(name), narrowed.get_parameter(name)
        if _is_constant(parameter.data):
            values = _random(parameter.data, generator)
            move(parameter, values)
            for axis, kept in along.get(name, ()):
                values = values.index_select(axis, kept.to(values.device))
            if values.shape == small.shape:
                move(small, values)
    try:
        yield
    finally:
        for parameter, values in reversed(before):
            parameter.data = values


def _is_constant(values: Tensor) -> bool:
    return values.is_floating_point() and values.numel() > 0 and bool((values == values.flatten()[0]).all())


def _random(values: Tensor, generator: torch.Generator) -> Tensor:
    return torch.rand(values.shape, generator=generator).to(values) / max(1, len(values) if values.dim() else 1)


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
