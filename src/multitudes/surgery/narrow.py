"""Narrowing: a network of the same kind with its hidden widths scaled down.

Which of a layer's inputs survive depends on what happened between layers: additions, `cat`, `flatten`, pooling.
Instead of analysing that, it is observed: each layer chooses the channels that it keeps, the others are set
to NaN, and NaN goes through everything that a network does to channels, so that at the next layer the
surviving inputs are those that are not NaN. One run on an example gives every layer's kept inputs and outputs
(`watch`), and one more proves what was made of them.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.core.calling import Input, call
from multitudes.core.checks import check_count, check_number
from multitudes.core.draws.stochastic import Stochastic
from multitudes.core.multitude import Multitude
from multitudes.core.proof import unmoved
from multitudes.surgery.activation_size import keep_scale
from multitudes.surgery.affine import is_computed, kind_of
from multitudes.surgery.cuts import Cut, cut_layer, follows, inputs_of, is_depthwise, makes, norm_groups, width_of
from multitudes.surgery.layers import PRODUCTS, TRANSPOSED, Factory, Selector, is_frozen, replace, select
from multitudes.surgery.narrow_proof import prove, standing_alone
from multitudes.surgery.observe import example_for, executed, hooked, observing
from multitudes.surgery.start import starting
from multitudes.surgery.watch import PATTERNS, Pattern, Watch, gives_output


def narrow(
    model: nn.Module | Factory,
    factor: float,
    gamma: int = 1,
    *,
    min_channels: int = 64,
    layers: Selector = None,
    example: Input | None = None,
    init: str | None = None,
    heads: Selector = None,
    seed: int | None = None,
) -> nn.Module:
    """A copy of `model` with every hidden width scaled by `factor`, rounded up; inputs and outputs are kept.

    Hidden layers that `layers` selects (all of them by default) are split into `gamma` groups where the widths
    divide and a group keeps at least `min_channels` inputs. With `init="pretrained"` the kept channels
    keep their weights, each layer's scaled so that its outputs are as large as they were on the example; with
    `init="heads"` too, but for the output layers, which are drawn anew (those that are found, or that `heads` selects).
    Layers with frozen parameters, and those that they read from, are not narrowed, and keep their weights.
    `example` is one batch of inputs, real ones at best; where it is left out, noise of the usual sizes is tried.

    >>> model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 3))
    >>> narrow(model, 0.5)
    Sequential(
      (0): Linear(in_features=8, out_features=32, bias=True)
      (1): ReLU()
      (2): Linear(in_features=32, out_features=3, bias=True)
    )
    """
    start = starting(model, 1, init, heads, example=example, seed=seed)
    if isinstance(model := start.given, Multitude):
        raise ValueError(f"model is a multitude ({type(model).__name__}): narrow its network first, or use packed")
    check_number("factor", factor, 0, high=1, above=True)
    check_count("gamma", gamma)
    with start.seeded():
        example = example_for(model, example)
        narrowed, cuts = narrowed_copy(model, factor, gamma, min_channels, layers, example)
        if factor < 1:
            warn_of_whole(model, narrowed)
        return start.begin(narrowed if start.redraws else rescaled(narrowed, model, cuts, example))


def narrowed_copy(
    model: nn.Module,
    factor: float,
    gamma: int,
    min_channels: int,
    layers: Selector,
    example: Input,
) -> tuple[nn.Module, dict[str, Cut]]:
    """The narrowed copy with the kept channels' weights, proven on the example, and every layer's cut, by name.

    Channels are chosen at random, from torch's random state; where that does not work out, in patterns.
    """
    _check_layers(model)
    known = {name: module for name, module in model.named_modules() if makes(module) or follows(module)}
    products = {name: module for name, module in known.items() if kind_of(module) in PRODUCTS}
    grouped = set(select(model, layers, products))
    order = executed(model, example, [name for name, module in known.items() if makes(module)])
    if not order:
        raise ValueError(f"model ({type(model).__name__}) has no layer that can be narrowed")
    _check_reached(model, known, example)
    idle = [name for name, module in known.items() if makes(module) and name not in order]
    if idle:
        raise ValueError(
            f"layer {idle[0]!r} does not run on the example in evaluation, so its widths cannot be seen: pass an "
            "example on which it runs, or take it out; deep_ensemble keeps it whole"
        )
    seed, first = int(torch.randint(2**62, ())), ValueError()
    for pattern in PATTERNS:
        try:
            kept, whole = _observed(model, factor, known, order, example, pattern, seed)
            split = grouped - whole
            cuts = {
                name: _grouped(known[name], cut, factor, gamma if name in split else 1, min_channels)
                for name, cut in kept.items()
            }
            return apply_cuts(model, cuts, example), cuts
        except ValueError as error:
            first = first if first.args else error
    raise first


def _observed(
    model: nn.Module,
    factor: float,
    known: dict[str, nn.Module],
    order: list[str],
    example: Input,
    pattern: Pattern,
    seed: int,
) -> tuple[dict[str, Cut], set[str]]:
    """Every layer's cut, and the layers that are not split into groups: the first, frozen ones, those that give the
    output."""

    def watched(whole: set[str]) -> tuple[Watch, Tensor]:
        watch = Watch(factor, whole, torch.Generator().manual_seed(seed), pattern)
        return watch, watch.run(model, example, known)

    with observing(model):
        whole = {order[-1]} | {name for name in order if is_frozen(known[name])}
        watch, output = watched(whole)
        if bool(output.isnan().any()):  # several layers give the output
            whole |= {name for name in order if gives_output(model, name, example, known)}
            watch, _ = watched(whole)
        if frozen := _cut_frozen(model, watch.cuts):  # what it reads must be whole as well
            before = executed(model, example, known)
            whole |= set(before[: before.index(frozen[-1])])
            watch, _ = watched(whole)
    return watch.cuts, whole | {order[0]}


def _cut_frozen(model: nn.Module, cuts: dict[str, Cut]) -> list[str]:
    """The layers with frozen parameters that would lose inputs, in the order in which they run."""
    frozen = {name: model.get_submodule(name) for name in cuts if is_frozen(model.get_submodule(name))}
    return [name for name, layer in frozen.items() if len(cuts[name].inputs) < inputs_of(layer)]


def _check_reached(model: nn.Module, known: dict[str, nn.Module], example: Input) -> None:
    """A layer that runs in training alone is not observed, and would keep its width."""
    reached: list[str] = []
    with hooked(model, known, lambda name, *_: reached.append(name)), unmoved(model, ()), torch.no_grad():
        modes = [(module, module.training) for module in model.modules()]
        try:
            call(model.train(), example)
        except (RuntimeError, ValueError):  # as batch norms do of a single row
            return
        finally:
            for module, mode in modes:
                module.training = mode
    missing = [name for name in dict.fromkeys(reached) if name not in executed(model, example, known)]
    if missing:
        raise ValueError(
            f"layer {missing[0]!r} ({type(known[missing[0]]).__name__}) runs in training and not in evaluation, where "
            "the network is observed, so it cannot be narrowed; deep_ensemble keeps it whole"
        )


def _check_layers(model: nn.Module) -> None:
    for name, module in model.named_modules():
        kind = f"layer {name!r} is a {type(module).__name__}"
        if isinstance(module, Stochastic) and any(True for _ in module.parameters()):
            raise ValueError(f"{kind}, whose random weights cannot be narrowed; deep_ensemble keeps it whole")
        if kind_of(module) in PRODUCTS and is_computed(module):
            raise ValueError(
                f"{kind} whose weight is computed from others (by weight_norm, spectral_norm, pruning), which cannot "
                "be narrowed; deep_ensemble keeps it whole"
            )
        own = module._parameters and not makes(module) and not follows(module)
        if own and type(module).__module__.startswith("torch.nn"):
            raise ValueError(f"{kind}, which cannot be narrowed; deep_ensemble keeps it whole")


def apply_cuts(model: nn.Module, cuts: dict[str, Cut], example: Input) -> nn.Module:
    """The narrowed copy, with the kept channels' weights; proven on the example.

    Parameters that stand alone are kept whole where that fits, and else cut where they are as wide as a cut layer.
    """
    first: ValueError | None = None
    fitting = _fitting_axes(model, cuts)
    layers = {name: model.get_submodule(name) for name in cuts if not is_frozen(model.get_submodule(name))}
    for along in ({}, fitting) if fitting else ({},):
        narrowed = replace(model, {name: cut_layer(layer, cuts[name], name) for name, layer in layers.items()})
        _cut_parameters(narrowed, along, cuts, model)
        try:
            prove(model, narrowed, cuts, example)
            return narrowed
        except ValueError as error:
            first = first or error
    assert first is not None
    raise first


def _fitting_axes(model: nn.Module, cuts: dict[str, Cut]) -> dict[str, int]:
    """Of the parameters that stand alone, the last axis that is as long as some cut layer is wide."""
    widths = _cut_widths(model, cuts)
    axes: dict[str, int] = {}
    for name in standing_alone(model):
        parameter = model.get_parameter(name)
        fitting = [axis for axis, size in enumerate(parameter.shape) if size in widths]
        if fitting and parameter.requires_grad:
            axes[name] = fitting[-1]
    return axes


def _cut_widths(model: nn.Module, cuts: dict[str, Cut]) -> dict[int, Tensor]:
    """The channels that layers of each width keep."""
    made = {name: model.get_submodule(name) for name in cuts}
    return {
        width_of(layer): cuts[name].outputs
        for name, layer in made.items()
        if makes(layer) and not is_depthwise(layer) and len(cuts[name].outputs) < width_of(layer)
    }


def _cut_parameters(narrowed: nn.Module, along: dict[str, int], cuts: dict[str, Cut], model: nn.Module) -> None:
    widths = _cut_widths(model, cuts)
    for name, axis in along.items():
        path, _, own = name.rpartition(".")
        whole = model.get_parameter(name)
        kept = widths[whole.shape[axis]].to(whole.device)
        small = nn.Parameter(whole.data.index_select(axis, kept).clone(), whole.requires_grad)
        narrowed.get_submodule(path).register_parameter(own, small)


def warn_of_whole(model: nn.Module, narrowed: nn.Module, members: int = 1) -> None:
    """Warn where most of a narrowed network's parameters stand alone and are as large as they were."""
    whole = [n for n in standing_alone(model) if model.get_parameter(n).shape == narrowed.get_parameter(n).shape]
    size = sum(model.get_parameter(name).numel() for name in whole)
    total = sum(p.numel() for p in narrowed.parameters())
    if size > total / 2:
        shown = ", ".join(map(repr, whole[:5])) + (", ..." if len(whole) > 5 else "")
        before = sum(p.numel() for p in model.parameters())
        cost = f", so that {members} members have {members * total / before:.1f} times its parameters" * (members > 1)
        warnings.warn(
            f"model ({type(model).__name__}) is hardly narrowed: {shown} stand alone and keep their width{cost}",
            stacklevel=3,
        )


def rescaled(narrowed: nn.Module, model: nn.Module, cuts: dict[str, Cut], example: Input) -> nn.Module:
    """The narrowed network with its weights scaled so that activations are as large as the model's."""
    products = {name: cut.outputs for name, cut in cuts.items() if kind_of(model.get_submodule(name)) in PRODUCTS}
    keep_scale(model, narrowed, example, example, products)
    return narrowed


def _grouped(layer: Any, cut: Cut, factor: float, gamma: int, min_channels: int) -> Cut:
    """The cut with the largest gamma, up to the wanted one, that the layer's widths allow."""
    if follows(layer):
        regrouped = isinstance(layer, nn.GroupNorm) and len(cut.inputs) % layer.num_groups
        note = f"{layer.num_groups} groups -> {norm_groups(layer, len(cut.inputs))}" if regrouped else ""
        return Cut(cut.inputs, cut.outputs, 1, note)
    own, width = getattr(layer, "groups", 1), width_of(layer)
    exact = width * factor
    wanted = 1 if is_depthwise(layer) or isinstance(layer, (*TRANSPOSED, nn.Embedding)) else gamma
    used = next(
        g for g in range(wanted, 0, -1)
        if g == 1 or (not (len(cut.inputs) % (own * g) or len(cut.outputs) % (own * g))
        and len(cut.inputs) // (own * g) >= min_channels)
    )  # fmt: skip
    rounded = f", rounded up from {exact:g}" if width != len(cut.outputs) > exact + 1e-9 else ""
    note = f"{len(cut.inputs)} -> {len(cut.outputs)}, gamma {used}{rounded}"
    return Cut(cut.inputs, cut.outputs, used, note)
