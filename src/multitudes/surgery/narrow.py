"""Narrowing: a network of the same kind with its hidden widths scaled down.

Which of a layer's inputs survive depends on what happened between layers: additions, `cat`, `flatten`, pooling.
Instead of analysing that, it is observed: each layer chooses the channels that it keeps, the others are set
to NaN, and NaN goes through everything that a network does to channels, so that at the next layer the
surviving inputs are those that are not NaN. One run on an example gives every layer's kept inputs and outputs
(`watch`), and one more proves what was made of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace as replaced
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.core.calling import Input
from multitudes.core.draws.stochastic import Stochastic
from multitudes.core.trace import observing
from multitudes.surgery.activation_size import keep_scale
from multitudes.surgery.affine import is_computed, kind_of
from multitudes.surgery.attention import HeadChoice, observe_attention
from multitudes.surgery.cuts import (
    CannotNarrow,
    Cut,
    cut_layer,
    follows,
    inputs_of,
    is_attention,
    is_depthwise,
    makes,
    norm_groups,
    width_of,
)
from multitudes.surgery.heads import final_layers
from multitudes.surgery.initialise import is_hugging_face
from multitudes.surgery.layers import PRODUCTS, TRANSPOSED, Selector, is_frozen, replace, select, within
from multitudes.surgery.narrow_config import follow_configs, narrower_models
from multitudes.surgery.narrow_proof import prove, runs_like, standing_alone
from multitudes.surgery.observe import executed
from multitudes.surgery.watch import Along, Watch, changed, loses_the_same


def narrowed_copy(
    model: nn.Module,
    factor: float,
    gamma: int,
    min_channels: int,
    layers: Selector,
    example: Input,
    redrawn: bool = False,
) -> tuple[nn.Module, dict[str, Cut]]:
    """The narrowed copy with the kept channels' weights, proven on the example, and every layer's cut, by name.

    Channels are chosen at random, from torch's random state. Where weights are `redrawn` after, a Hugging Face model
    whose channels cannot be followed is the one that its configuration gives.
    """
    built = narrower_models(model, factor)
    grouping = factor, gamma, min_channels, _selected(model, layers)
    try:
        narrowed, cuts = _observed_copy(model, built, grouping, example)
    except ValueError:
        if redrawn and gamma == 1 and "" in built and runs_like(built[""], model, example):
            return built[""], _widths(model, built[""])
        raise
    if factor < 1 and not built:
        _warn_of_configs(narrowed, model)
    return narrowed, cuts


def _widths(model: nn.Module, narrow: nn.Module) -> dict[str, Cut]:
    """The widths of a narrower network's layers, as cuts."""
    pairs = {name: (inputs_of(m), width_of(m)) for name, m in _known(narrow).items() if makes(m)}
    known = {name for name, m in _known(model).items() if makes(m)}
    return {
        name: Cut(torch.arange(inputs), torch.arange(width), 1, f"{inputs} -> {width}, gamma 1")
        for name, (inputs, width) in pairs.items()
        if name in known
    }


def _warn_of_configs(narrowed: nn.Module, model: nn.Module) -> None:
    for name, module in model.named_modules():
        pairs = zip(module.parameters(), narrowed.get_submodule(name).parameters(), strict=True)
        if is_hugging_face(module) and any(whole.shape != small.shape for whole, small in pairs):
            warnings.warn(
                f"the configuration of {type(module).__name__} cannot express the narrowed widths: members predict and "
                "are saved by mt.save, but save_pretrained gives what from_pretrained does not load",
                stacklevel=4,
            )
            return


# -- observed ----------------------------------------------------------------------------------------------


def _observed_copy(
    model: nn.Module, built: dict[str, nn.Module], grouping: tuple[float, int, int, set[str]], example: Input
) -> tuple[nn.Module, dict[str, Cut]]:
    """The narrowed copy by what is observed of the network, and every layer's cut."""
    _check_layers(model)
    factor, gamma, min_channels, grouped = grouping
    known = _known(model)
    order = executed(model, example, [name for name, module in known.items() if makes(module)])
    if not order:
        raise CannotNarrow(f"model ({type(model).__name__}) has no layer that can be narrowed")
    counts = {
        name: width_of(layer)
        for prefix, network in built.items()
        for own, layer in _known(network).items()
        if makes(layer) and (name := f"{prefix}.{own}".strip(".")) in known
    }
    if counts.get(order[-1], 0) != width_of(known[order[-1]]):  # an output layer of the user's own
        counts.pop(order[-1], None)
    twins = _twins(known, order)
    watch, whole = _watched(model, example, known, order, factor, counts)
    split, heads = grouped - whole, watch.heads
    cuts = {
        name: _grouped(known[name], cut, factor, gamma if name in split else 1, min_channels, heads, name)
        for name, cut in watch.cuts.items()
    }
    along = _along(model, example, cuts, heads, built)
    cuts |= {name: cuts[other] for name, other in twins.items()}
    narrowed = _cut(model, cuts, along)
    changed(narrowed, [size for size in watch.sizes if not any(within(size.path[0], name) for name in built)])
    follow_configs(narrowed, built, [name for name in order[-1:] if name not in counts])
    prove(model, narrowed, cuts, example, along, heads.sources)
    return narrowed, cuts


def _watched(
    model: nn.Module,
    example: Input,
    known: dict[str, nn.Module],
    order: list[str],
    factor: float,
    counts: dict[str, int],
) -> tuple[Watch, set[str]]:
    """Observe every layer's cut and the heads that are kept, and the layers that are not split into groups.

    Those are the first, frozen ones, and those that give the output. `counts` are the widths that layers of Hugging
    Face models have by their configurations.
    """
    found, patterns = observe_attention(model, example, order)
    outputs = _output_layers(model, example)
    last = {name for name in order if any(within(each, name) for each in outputs)}
    seed = int(torch.randint(2**62, ()))

    def watched(whole: set[str]) -> Watch:
        generator = torch.Generator().manual_seed(seed)
        whole = whole - {name for name, count in counts.items() if count < width_of(known[name])}
        heads = HeadChoice(found, factor, generator, counts, whole)
        watch = Watch(heads, patterns)
        watch.run(model, example, known)
        return watch

    with observing(model):
        whole = {order[-1], *last} | {name for name in order if is_frozen(known[name])}
        watch = watched(whole)
        if frozen := _cut_frozen(model, watch.cuts):  # what it reads must be whole as well
            before = executed(model, example, known)
            whole |= set(before[: before.index(frozen[-1])])
            watch = watched(whole)
    return watch, whole | {order[0]}


def _output_layers(model: nn.Module, example: Input) -> list[str]:
    """The layers that give the output, as far as gradients tell; the proof finds others."""
    try:
        return final_layers(model, example)
    except (ValueError, RuntimeError):  # as of code that cannot run with gradients
        return []


def _twins(known: dict[str, nn.Module], order: list[str]) -> dict[str, str]:
    """For tables that do not run themselves, the layer that runs with the same weight; any other is refused."""
    owners = {id(p): name for name in order for p in known[name].parameters()}
    twins: dict[str, str] = {}
    for name, layer in known.items():
        if not makes(layer) or name in order:
            continue
        same = {owners.get(id(p)) for p in layer.parameters()}
        other = same.pop() if isinstance(layer, nn.Embedding) and len(same) == 1 else None
        if other is None:
            raise CannotNarrow(
                f"layer {name!r} does not run on the example in evaluation, so its widths cannot be seen: pass an "
                "example on which it runs, or take it out"
            )
        twins[name] = other
    return twins


def _known(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that make channels or follow them, by name; what is inside attention belongs to it."""
    known = {name: module for name, module in model.named_modules() if makes(module) or follows(module)}
    inside = {f"{name}.out_proj" for name, module in known.items() if is_attention(module)}
    return {name: module for name, module in known.items() if name not in inside}


def _selected(model: nn.Module, layers: Selector) -> set[str]:
    """The layers that may be split into groups."""
    try:
        return set(select(model, layers, {name: m for name, m in _known(model).items() if kind_of(m) in PRODUCTS}))
    except ValueError:
        if layers is None:
            return set()
        raise


# -- parameters that stand alone ---------------------------------------------------------------------------


def _along(
    model: nn.Module, example: Input, cuts: Mapping[str, Cut], heads: HeadChoice, built: Mapping[str, nn.Module]
) -> Along:
    """The cuts of parameters: in Hugging Face models to what they are in the narrower ones, elsewhere where they meet
    channels that are cut.

    What such a parameter would lose along the last axis of a width, or of a number of heads, that fits must be what the
    layers behind it lose, which is observed.
    """
    made = {name: model.get_submodule(name) for name in cuts}
    layers = [(width_of(m), cuts[name].outputs) for name, m in made.items() if makes(m) and not is_depthwise(m)]
    widths = {width: kept for width, kept in layers if len(kept) < width}
    exact = {(width, len(kept)): kept for width, kept in layers}
    fixed: dict[str, tuple[tuple[int, Tensor], ...]] = {}
    along: dict[str, tuple[tuple[int, Tensor], ...]] = {}
    for name in standing_alone(model):
        whole, near = model.get_parameter(name), heads.inside(name.rpartition(".")[0])
        if of := [prefix for prefix in built if within(name, prefix)]:
            small = built[of[0]].get_parameter(name.removeprefix(f"{of[0]}."))
            counts = {(size, len(kept)): kept for size, kept in (*heads.inside("").items(), *near.items())}
            fixed[name] = _between(name, whole.shape, small.shape, exact | counts)
            continue
        lost = widths if any(size in widths for size in whole.shape) else near
        fitting = [axis for axis, size in enumerate(whole.shape) if len(lost.get(size, range(size))) < size]
        if fitting and whole.requires_grad:
            along[name] = ((fitting[-1], lost[whole.shape[fitting[-1]]]),)
    if along and not loses_the_same(model, example, cuts, along):
        along = {name: kept for name, kept in along.items() if loses_the_same(model, example, cuts, {name: kept})}
    return fixed | along


def _between(
    name: str, whole: torch.Size, small: torch.Size, kept: Mapping[tuple[int, int], Tensor]
) -> tuple[tuple[int, Tensor], ...]:
    """The axes along which two shapes differ, and the entries that are kept of each."""
    axes = [(axis, pair) for axis, pair in enumerate(zip(whole, small, strict=True)) if pair[0] != pair[1]]
    if missing := [pair for _, pair in axes if pair not in kept]:
        raise CannotNarrow(
            f"parameter {name!r} would have {missing[0][1]} of {missing[0][0]} entries, and no layer keeps as many "
            "channels"
        )
    return tuple((axis, kept[pair]) for axis, pair in axes)


# -- cut ---------------------------------------------------------------------------------------------------


def _cut(model: nn.Module, cuts: Mapping[str, Cut], along: Along) -> nn.Module:
    """The copy with smaller layers and parameters; layers that shared a weight share it, where they keep the same."""
    layers = {name: model.get_submodule(name) for name in cuts if not is_frozen(model.get_submodule(name))}
    small = {name: cut_layer(layer, cuts[name], name) for name, layer in layers.items()}
    first: dict[int, nn.Parameter] = {}
    for name, layer in layers.items():
        for own, parameter in layer._parameters.items():
            if parameter is not None:
                mine: Any = small[name]._parameters[own]
                shared = first.setdefault(id(parameter), mine)
                if mine is not None and shared is not mine and shared.shape == mine.shape and torch.equal(shared, mine):
                    small[name].register_parameter(own, shared)
    try:
        narrowed = replace(model, small)
    except ValueError as error:  # of weights that are shared
        raise CannotNarrow(str(error)) from error
    for name, kept in along.items():
        path, _, own = name.rpartition(".")
        whole: Any = model.get_parameter(name)
        values = whole.data
        for axis, index in kept:
            values = values.index_select(axis, index.to(values.device))
        narrowed.get_submodule(path).register_parameter(own, nn.Parameter(values.clone(), whole.requires_grad))
    return narrowed


# -- what cannot be narrowed -------------------------------------------------------------------------------


def _cut_frozen(model: nn.Module, cuts: dict[str, Cut]) -> list[str]:
    """The layers with frozen parameters that would lose inputs, in the order in which they run."""
    frozen: dict[str, Any] = {n: model.get_submodule(n) for n in cuts if is_frozen(model.get_submodule(n))}
    return [
        name for name, layer in frozen.items()
        if len(cuts[name].inputs) < inputs_of(layer)
        or (is_attention(layer) and [len(kept) for kept in cuts[name].others] != [layer.kdim, layer.vdim])
    ]  # fmt: skip


def _check_layers(model: nn.Module) -> None:
    for name, module in model.named_modules():
        kind = f"layer {name!r} is a {type(module).__name__}"
        if isinstance(module, Stochastic) and any(True for _ in module.parameters()):
            raise CannotNarrow(f"{kind}, whose random weights cannot be narrowed")
        if kind_of(module) in PRODUCTS and is_computed(module):
            raise CannotNarrow(
                f"{kind} whose weight is computed from others (by weight_norm, spectral_norm, pruning), which cannot "
                "be narrowed"
            )
        own = module._parameters and not makes(module) and not follows(module)
        if own and type(module).__module__.startswith("torch.nn"):
            raise CannotNarrow(f"{kind}, which cannot be narrowed")


def warn_of_whole(model: nn.Module, narrowed: nn.Module, members: int = 1) -> None:
    """Warn where most of a narrowed network's parameters stand alone and are as large as they were."""
    shapes = {name: parameter.shape for name, parameter in narrowed.named_parameters()}
    whole = [name for name in standing_alone(model) if model.get_parameter(name).shape == shapes.get(name)]
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
    if sum(p.numel() for p in narrowed.parameters()) == sum(p.numel() for p in model.parameters()):
        return narrowed
    layers = {name: model.get_submodule(name) for name in cuts}
    tables = {id(p) for m in layers.values() if isinstance(m, nn.Embedding) for p in m.parameters()}
    alone = {n: m for n, m in layers.items() if not any(id(p) in tables for p in m.parameters())}
    products = {name: cuts[name].outputs for name, layer in alone.items() if makes(layer)}
    keep_scale(model, narrowed, example, example, products)
    return narrowed


def _grouped(layer: Any, cut: Cut, factor: float, gamma: int, min_channels: int, heads: HeadChoice, name: str) -> Cut:
    """The cut with the largest gamma, up to the wanted one, that the layer's widths allow."""
    if follows(layer):
        regrouped = isinstance(layer, nn.GroupNorm) and len(cut.inputs) % layer.num_groups
        note = f"{layer.num_groups} groups -> {norm_groups(layer, len(cut.inputs))}" if regrouped else ""
        return replaced(cut, note=note)
    own, width = getattr(layer, "groups", 1), width_of(layer)
    exact = width * factor
    single = is_depthwise(layer) or is_attention(layer) or isinstance(layer, (*TRANSPOSED, nn.Embedding))
    wanted = 1 if single else gamma
    used = next(
        g for g in range(wanted, 0, -1)
        if g == 1 or (not (len(cut.inputs) % (own * g) or len(cut.outputs) % (own * g))
        and len(cut.inputs) // (own * g) >= min_channels)
    )  # fmt: skip
    rounded = f", rounded up from {exact:g}" if width != len(cut.outputs) > exact + 1e-9 else ""
    bound = f", {said}" if (said := heads.note(name)) else ""
    note = f"{len(cut.inputs)} -> {len(cut.outputs)}{bound}, gamma {used}{'' if bound else rounded}"
    return replaced(cut, gamma=used, note=note)
