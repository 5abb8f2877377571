"""Scale down the hidden widths of a network.

Which inputs a layer keeps depends on the operations before it: additions, `cat`, `flatten`, pooling. These are
observed: each layer's dropped channels are set to NaN, which goes through all operations, and the next layer keeps the
inputs that are not NaN. One run on an example finds all cuts (`nan_watch.py`), and another verifies the narrowed
network (`proof.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace as replaced
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.networks.calls import Input
from multitudes.networks.stochastic import Stochastic
from multitudes.networks.trace import observing
from multitudes.surgery.activation_size import keep_scale
from multitudes.surgery.affine import is_computed, kind_of
from multitudes.surgery.initialize import is_hugging_face
from multitudes.surgery.narrowing.attention_heads import HeadChoice, observe_attention
from multitudes.surgery.narrowing.cuts import (
    CannotNarrow,
    Cut,
    Form,
    cut_layer,
    form_of,
    is_attention,
    is_depthwise,
    norm_groups,
)
from multitudes.surgery.narrowing.huggingface_configs import follow_configs, narrower_models
from multitudes.surgery.narrowing.nan_watch import Along, Watch, apply_sizes, loses_the_same
from multitudes.surgery.narrowing.proof import free_parameters, prove, runs_like
from multitudes.surgery.observe import execution_order
from multitudes.surgery.output_layers import final_layers
from multitudes.surgery.select import PRODUCTS, TRANSPOSED, Selector, is_frozen, replace, select, within


def narrowed_copy(
    model: nn.Module,
    factor: float,
    gamma: int,
    min_channels: int,
    layers: Selector,
    example: Input,
    redrawn: bool = False,
) -> tuple[nn.Module, dict[str, Cut]]:
    """Return a narrowed copy, verified on the example, with the weights of randomly kept channels, and all cuts.

    If weights are `redrawn` afterwards, a Hugging Face model whose channels cannot be observed is built from its
    narrowed configuration.
    """
    built = narrower_models(model, factor)
    split = _selected(model, layers)
    try:
        narrowed, cuts = _observed_copy(model, built, factor, example, gamma, min_channels, split)
    except ValueError:
        if redrawn and gamma == 1 and "" in built and runs_like(built[""], model, example):
            forms = {name: form for name, form in _known(built[""]).items() if form.makes}
            return built[""], {
                name: Cut(torch.arange(f.inputs), torch.arange(f.outputs), note=f"{f.inputs} -> {f.outputs}, gamma 1")
                for name, f in forms.items()
            }
        raise
    if factor < 1 and not built:
        _warn_of_configs(narrowed, model)
    return narrowed, cuts


def _warn_of_configs(narrowed: nn.Module, model: nn.Module) -> None:
    for name, module in model.named_modules():
        pairs = zip(module.parameters(), narrowed.get_submodule(name).parameters(), strict=True)
        if is_hugging_face(module) and any(whole.shape != small.shape for whole, small in pairs):
            warnings.warn(
                f"the configuration of {type(module).__name__} cannot express the narrowed widths: use mt.save; "
                "from_pretrained cannot load what save_pretrained writes",
                stacklevel=4,
            )
            return


# -- observation -------------------------------------------------------------------------------------------


def _observed_copy(
    model: nn.Module,
    built: dict[str, nn.Module],
    factor: float,
    example: Input,
    gamma: int,
    min_channels: int,
    split: set[str],
) -> tuple[nn.Module, dict[str, Cut]]:
    """Observe the cuts and return the narrowed copy with them; layers in `split` may be grouped."""
    _check_layers(model)
    known = _known(model)
    order = execution_order(model, example, [name for name, form in known.items() if form.makes])
    if not order:
        raise CannotNarrow(f"model ({type(model).__name__}) has no layer that can be narrowed")
    counts = {
        name: form.outputs
        for prefix, network in built.items()
        for own, form in _known(network).items()
        if form.makes and (name := f"{prefix}.{own}".strip(".")) in known
    }
    if counts.get(order[-1], 0) != known[order[-1]].outputs:  # the user's own output layer
        counts.pop(order[-1], None)
    twins = _twins(model, known, order)
    watch, whole = _watched(model, example, known, order, factor, counts)
    cuts = {}
    for name, cut in watch.cuts.items():
        wanted = gamma if name in split - whole else 1
        cuts[name] = _grouped(name, model.get_submodule(name), cut, wanted, min_channels, watch.heads)
    along = _along(model, example, cuts, watch.heads, built)
    cuts |= {name: cuts[other] for name, other in twins.items()}
    narrowed = _cut(model, cuts, along)
    apply_sizes(
        narrowed, {path: s for path, s in watch.sizes.items() if not any(within(path[0], name) for name in built)}
    )
    follow_configs(narrowed, built, [name for name in order[-1:] if name not in counts])
    prove(model, narrowed, cuts, example, along, watch.heads.sources)
    return narrowed, cuts


def _watched(
    model: nn.Module, example: Input, known: dict[str, Form], order: list[str], factor: float, counts: dict[str, int]
) -> tuple[Watch, set[str]]:
    """Observe every layer's cut; also return the layers that are not grouped: first, frozen and output layers.

    `counts` holds the widths of layers by the configurations of Hugging Face models.
    """
    found, patterns = observe_attention(model, example, order)
    whole = {order[-1]} | {name for name in order if is_frozen(model.get_submodule(name))}
    with suppress(ValueError, RuntimeError):  # some code cannot run with gradients; `prove` finds other outputs
        outputs = final_layers(model, example)
        whole |= {name for name in order if any(within(each, name) for each in outputs)}
    seed = int(torch.randint(2**62, ()))

    def watched(whole: set[str]) -> Watch:
        generator = torch.Generator().manual_seed(seed)
        whole = whole - {name for name, count in counts.items() if count < known[name].outputs}
        watch = Watch(HeadChoice(found, factor, generator, counts, whole, patterns))
        watch.run(model, example, known)
        return watch

    with observing(model):
        watch = watched(whole)
        if frozen := _cut_frozen(model, watch.cuts):  # frozen layers must keep all inputs
            before = execution_order(model, example, known)
            whole |= set(before[: before.index(frozen[-1])])
            watch = watched(whole)
    return watch, whole | {order[0]}


def _twins(model: nn.Module, known: dict[str, Form], order: list[str]) -> dict[str, str]:
    """Map embeddings that do not run to the layer that runs with their weight; refuse other such layers."""
    owners = {id(p): name for name in order for p in model.get_submodule(name).parameters()}
    twins: dict[str, str] = {}
    for name in [name for name, form in known.items() if form.makes and name not in order]:
        layer = model.get_submodule(name)
        same = {owners.get(id(p)) for p in layer.parameters()}
        other = same.pop() if isinstance(layer, nn.Embedding) and len(same) == 1 else None
        if other is None:
            raise CannotNarrow(
                f"layer {name!r} does not run on the example in evaluation, so its channels cannot be observed: pass "
                "an example on which it runs, or remove it"
            )
        twins[name] = other
    return twins


def _known(model: nn.Module) -> dict[str, Form]:
    """Return the layers that make or follow channels, by name, except those inside attention."""
    inside = {f"{name}.out_proj" for name, module in model.named_modules() if is_attention(module)}
    forms = {name: form_of(module) for name, module in model.named_modules() if name not in inside}
    return {name: form for name, form in forms.items() if form.outputs}


def _selected(model: nn.Module, layers: Selector) -> set[str]:
    """Return the layers that may be split into groups."""
    known = {name: model.get_submodule(name) for name in _known(model)}
    able = {name: layer for name, layer in known.items() if kind_of(layer) in PRODUCTS}
    return set(select(model, layers, able)) if able or layers is not None else set()


def _grouped(name: str, layer: Any, cut: Cut, gamma: int, min_channels: int, heads: HeadChoice) -> Cut:
    """Return the cut with the largest gamma, up to the requested one, that the layer's widths allow."""
    inputs, outputs = len(cut.inputs), len(cut.outputs)
    if form_of(layer).follows:
        regrouped = isinstance(layer, nn.GroupNorm) and inputs % layer.num_groups
        return replaced(cut, note=f"{layer.num_groups} groups -> {norm_groups(layer, inputs)}" if regrouped else "")
    if is_depthwise(layer) or is_attention(layer) or isinstance(layer, (*TRANSPOSED, nn.Embedding)):
        gamma = 1
    own = getattr(layer, "groups", 1)
    while gamma > 1 and (inputs % (own * gamma) or outputs % (own * gamma) or inputs // (own * gamma) < min_channels):
        gamma -= 1
    exact = form_of(layer).outputs * heads.factor
    rounded = f", rounded up from {exact:g}" if form_of(layer).outputs != outputs > exact + 1e-9 else ""
    detail = f"{of_heads}, gamma {gamma}" if (of_heads := heads.note(name)) else f"gamma {gamma}{rounded}"
    return replaced(cut, gamma=gamma, note=f"{inputs} -> {outputs}, {detail}")


# -- free parameters ---------------------------------------------------------------------------------------


def _along(
    model: nn.Module, example: Input, cuts: Mapping[str, Cut], heads: HeadChoice, built: Mapping[str, nn.Module]
) -> Along:
    """Return the cuts of parameters outside of layers.

    In Hugging Face models they follow the shapes of the narrower model. Elsewhere, the last axis with the width of a
    cut layer, or its number of heads, is cut if a run shows that the next layers lose the same channels.
    """
    made = [(model.get_submodule(name), cut.outputs) for name, cut in cuts.items()]
    layers = [(form_of(m).outputs, kept) for m, kept in made if form_of(m).makes and not is_depthwise(m)]
    widths = {width: kept for width, kept in layers if len(kept) < width}
    exact = {(size, len(kept)): kept for size, kept in (*layers, *heads.entries.items())}
    fixed: dict[str, tuple[tuple[int, Tensor], ...]] = {}
    along: dict[str, tuple[tuple[int, Tensor], ...]] = {}
    for name in free_parameters(model):
        whole = model.get_parameter(name)
        if of := [prefix for prefix in built if within(name, prefix)]:
            small = built[of[0]].get_parameter(name.removeprefix(f"{of[0]}."))
            sizes = enumerate(zip(whole.shape, small.shape, strict=True))
            pairs = [(axis, pair) for axis, pair in sizes if pair[0] != pair[1]]
            if missing := [pair for _, pair in pairs if pair not in exact]:
                raise CannotNarrow(
                    f"parameter {name!r} would keep {missing[0][1]} of {missing[0][0]} entries, but no layer keeps as "
                    "many channels"
                )
            fixed[name] = tuple((axis, exact[pair]) for axis, pair in pairs)
            continue
        lost = widths if any(size in widths for size in whole.shape) else heads.entries
        fitting = [axis for axis, size in enumerate(whole.shape) if len(lost.get(size, range(size))) < size]
        if fitting and whole.requires_grad:
            along[name] = ((fitting[-1], lost[whole.shape[fitting[-1]]]),)
    if along and not loses_the_same(model, example, cuts, along):
        along = {name: kept for name, kept in along.items() if loses_the_same(model, example, cuts, {name: kept})}
    return fixed | along


# -- cutting -----------------------------------------------------------------------------------------------


def _cut(model: nn.Module, cuts: Mapping[str, Cut], along: Along) -> nn.Module:
    """Return the copy with smaller layers and parameters; shared weights stay shared if cut equally."""
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
    except ValueError as error:  # from shared weights
        raise CannotNarrow(str(error)) from error
    for name, kept in along.items():
        path, _, own = name.rpartition(".")
        whole: Any = model.get_parameter(name)
        values = whole.data
        for axis, index in kept:
            values = values.index_select(axis, index.to(values.device))
        narrowed.get_submodule(path).register_parameter(own, nn.Parameter(values.clone(), whole.requires_grad))
    return narrowed


# -- limits ------------------------------------------------------------------------------------------------


def _cut_frozen(model: nn.Module, cuts: dict[str, Cut]) -> list[str]:
    """Return the layers with frozen parameters that would lose inputs, in order of execution."""
    found = []
    for name, cut in cuts.items():
        layer: Any = model.get_submodule(name)
        widths = [form_of(layer).inputs, *((layer.kdim, layer.vdim) if is_attention(layer) else ())]
        if is_frozen(layer) and [len(kept) for kept in cut.indices[:-1]] != widths:
            found.append(name)
    return found


def _check_layers(model: nn.Module) -> None:
    for name, module in model.named_modules():
        kind = f"layer {name!r} is a {type(module).__name__}"
        if isinstance(module, Stochastic) and any(True for _ in module.parameters()):
            raise CannotNarrow(f"{kind} with random weights, which cannot be narrowed")
        if kind_of(module) in PRODUCTS and is_computed(module):
            raise CannotNarrow(
                f"{kind} with a computed weight (weight_norm, spectral_norm, pruning), which cannot be narrowed"
            )
        own = module._parameters and not form_of(module).outputs
        if own and type(module).__module__.startswith("torch.nn"):
            raise CannotNarrow(f"{kind}, which cannot be narrowed")


def warn_of_whole(model: nn.Module, narrowed: nn.Module, members: int = 1) -> None:
    """Warn if most parameters of a narrowed network are outside of layers and were not cut."""
    shapes = {name: parameter.shape for name, parameter in narrowed.named_parameters()}
    whole = [name for name in free_parameters(model) if model.get_parameter(name).shape == shapes.get(name)]
    size = sum(model.get_parameter(name).numel() for name in whole)
    total = sum(p.numel() for p in narrowed.parameters())
    if size > total / 2:
        shown = ", ".join(map(repr, whole[:5])) + (", ..." if len(whole) > 5 else "")
        before = sum(p.numel() for p in model.parameters())
        cost = f", so that {members} members have {members * total / before:.1f} times its parameters" * (members > 1)
        warnings.warn(
            f"model ({type(model).__name__}) is hardly narrowed: {shown} are in no layer and keep their width{cost}",
            stacklevel=3,
        )


def rescale_activations(narrowed: nn.Module, model: nn.Module, cuts: dict[str, Cut], example: Input) -> nn.Module:
    """Scale the narrowed network's weights, in place, so that activations are as large as the model's; return it."""
    if sum(p.numel() for p in narrowed.parameters()) == sum(p.numel() for p in model.parameters()):
        return narrowed
    layers = {name: model.get_submodule(name) for name in cuts}
    tables = {id(p) for m in layers.values() if isinstance(m, nn.Embedding) for p in m.parameters()}
    alone = {n: m for n, m in layers.items() if not any(id(p) in tables for p in m.parameters())}
    products = {name: cuts[name].outputs for name, layer in alone.items() if form_of(layer).makes}
    keep_scale(model, narrowed, example, example, products)
    return narrowed
