"""Cuts, applied: the narrowed copy of a network, with what else of it counts channels or heads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.core.calling import Input
from multitudes.core.copying import copied
from multitudes.surgery.attended import HeadChoice
from multitudes.surgery.attributes import ADJUSTMENTS, Change, adjust
from multitudes.surgery.cuts import Cut, GroupedLinear, cut_layer, is_depthwise, makes, width_of
from multitudes.surgery.layers import is_frozen, replace
from multitudes.surgery.narrow_proof import Along, prove, standing_alone

__all__ = ["Plan", "apply_cuts"]

_ADJUSTMENTS = ("names", "none", "heads", "values")


@dataclass(frozen=True)
class Plan:
    """What is kept of a network: every layer's cut, by name, and the heads of its attentions.

    `built` are the narrower Hugging Face models in it, which their own configurations have given, by name.
    """

    cuts: dict[str, Cut]
    heads: HeadChoice
    built: Mapping[str, nn.Module] = field(default_factory=dict)
    own: Collection[str] = ()
    """Layers of those models that are not what the configurations say."""


def apply_cuts(model: nn.Module, plan: Plan, example: Input) -> nn.Module:
    """The narrowed copy, with the kept channels' weights; proven on the example.

    Parameters that stand alone are kept whole where that fits, and else cut where they are as wide as a cut layer, or
    have a number for each head. Attributes that count channels or heads are changed where that is needed.
    """
    first: ValueError | None = None
    layers = {name: model.get_submodule(name) for name in plan.cuts if not is_frozen(model.get_submodule(name))}
    for along in _along(model, plan):
        for adjusted in _ADJUSTMENTS if plan.heads.found else ADJUSTMENTS:
            narrowed = replace(model, _cut_layers(layers, plan.cuts))
            _cut_parameters(narrowed, along)
            narrowed = _filled(narrowed, plan.built, plan.own)
            changes = adjust(narrowed, plan.cuts, plan.heads, adjusted, model, plan.built)
            if not changes and adjusted != "none":
                continue
            proof = partial(prove, model, narrowed, plan.cuts, example, along, plan.heads.sources)
            try:
                proof()
            except ValueError as error:
                first = first or error
                continue
            if adjusted == "values":
                _undo_needless(changes, proof)
            return narrowed
    assert first is not None
    raise first


def _undo_needless(changes: Sequence[Change], proof: Callable[[], None]) -> None:
    """Set attributes that only look like widths to what they were: those without which the proof holds."""
    for key in dict.fromkeys(change.key for change in changes):
        those = [change for change in changes if change.key == key]
        for change in those:
            change.undo()
        try:
            proof()
        except ValueError:
            for change in those:
                change.redo()


def _cut_layers(layers: Mapping[str, nn.Module], cuts: Mapping[str, Cut]) -> dict[str, nn.Module]:
    """The smaller layers; those that shared a weight share it, where both keep the same of it."""
    small = {name: cut_layer(layer, cuts[name], name) for name, layer in layers.items()}
    first: dict[int, nn.Parameter] = {}
    for name, layer in layers.items():
        for own, parameter in layer._parameters.items():
            if parameter is not None:
                mine: Any = small[name]._parameters[own]
                shared = first.setdefault(id(parameter), mine)
                if shared is not mine and shared.shape == mine.shape and torch.equal(shared, mine):
                    small[name].register_parameter(own, shared)
    return small


def _along(model: nn.Module, plan: Plan) -> Iterator[Along]:
    """Ways to cut the parameters that stand alone: which of their axes keep which of their entries."""
    fixed = _along_built(model, plan)
    yield fixed
    widths = _cut_widths(model, plan.cuts)
    by_width: dict[str, tuple[tuple[int, Tensor], ...]] = {}
    by_heads: dict[str, tuple[tuple[int, Tensor], ...]] = {}
    for name in standing_alone(model):
        parameter = model.get_parameter(name)
        if not parameter.requires_grad or _of_built(name, plan.built) is not None:
            continue
        fitting = [axis for axis, size in enumerate(parameter.shape) if size in widths]
        if fitting:
            by_width[name] = ((fitting[-1], widths[parameter.shape[fitting[-1]]]),)
        heads = {h: kept for h, kept in plan.heads.inside(name.rpartition(".")[0]).items() if len(kept) < h}
        fitting = [axis for axis, size in enumerate(parameter.shape) if size in heads]
        if fitting:
            by_heads[name] = ((fitting[-1], heads[parameter.shape[fitting[-1]]]),)
    if by_width:
        yield fixed | by_width
    if by_heads:
        yield fixed | by_width | by_heads


def _of_built(name: str, built: Mapping[str, nn.Module]) -> nn.Parameter | None:
    """The parameter of a narrower Hugging Face model by its name in the network."""
    for prefix, network in built.items():
        if not prefix or name.startswith(f"{prefix}."):
            return network.get_parameter(name.removeprefix(f"{prefix}.") if prefix else name)
    return None


def _along_built(model: nn.Module, plan: Plan) -> dict[str, tuple[tuple[int, Tensor], ...]]:
    """How parameters that stand alone in Hugging Face models are cut to what they are in the narrower ones."""
    kept = {
        (width_of(layer), len(cut.outputs)): cut.outputs
        for layer, cut in ((model.get_submodule(name), cut) for name, cut in plan.cuts.items())
        if makes(layer)
    }
    along: dict[str, tuple[tuple[int, Tensor], ...]] = {}
    for name in standing_alone(model):
        small = _of_built(name, plan.built)
        if small is None:
            continue
        whole = model.get_parameter(name)
        heads = {(h, len(k)): k for place in ("", name.rpartition(".")[0]) for h, k in plan.heads.inside(place).items()}
        axes = [
            (axis, pair) for axis, pair in enumerate(zip(whole.shape, small.shape, strict=True)) if pair[0] != pair[1]
        ]
        for _, pair in axes:
            if pair not in heads and pair not in kept:
                raise ValueError(
                    f"parameter {name!r} would have {pair[1]} of {pair[0]} entries, and no layer keeps as many channels"
                )
        along[name] = tuple((axis, heads.get(pair, kept.get(pair))) for axis, pair in axes)  # type: ignore[misc]
    return {name: cuts for name, cuts in along.items() if cuts}


def _filled(narrowed: nn.Module, built: Mapping[str, nn.Module], own: Collection[str]) -> nn.Module:
    """The narrowed network in which Hugging Face models are those that were built, with its weights.

    Layers of `own` are not of the configuration's widths, and are those of the narrowed network.
    """
    for name, network in built.items():
        cut, fresh = narrowed.get_submodule(name), copied(network)
        for each, layer in cut.named_modules():
            if isinstance(layer, GroupedLinear) or (f"{name}.{each}" if name else each) in own:
                fresh.set_submodule(each, layer)
        for each, parameter in cut.named_parameters():
            other = fresh.get_parameter(each)
            if other.shape != parameter.shape:
                raise ValueError(
                    f"{each!r} is {list(other.shape)} in the narrower {type(cut).__name__} of its configuration, and "
                    f"{list(parameter.shape)} by what was observed"
                )
            other.data, other.requires_grad = parameter.data, parameter.requires_grad
        _take_settings(cut, fresh)
        if not name:
            return fresh
        narrowed.set_submodule(name, fresh)
        for module in narrowed.modules():  # which may hold the configuration as well
            held = [key for key, value in vars(module).items() if value is cut.config]
            for key in held:
                setattr(module, key, fresh.config)
    return narrowed


def _take_settings(cut: nn.Module, fresh: nn.Module) -> None:
    """Buffers, modes and what a user has added, of modules that were built anew."""
    others = dict(fresh.named_modules())
    for name, module in cut.named_modules():
        other = others[name]
        for key, buffer in module._buffers.items():
            mine = other._buffers.get(key)
            kept = key not in module._non_persistent_buffers_set  # others are computed of the configuration
            if kept and buffer is not None and mine is not None and buffer.shape == mine.shape:
                other._buffers[key] = buffer
        other.training = module.training
        for key, value in vars(module).items():
            if key not in vars(other) and not key.startswith("_"):
                setattr(other, key, value)


def _cut_widths(model: nn.Module, cuts: Mapping[str, Cut]) -> dict[int, Tensor]:
    """The channels that layers of each width keep."""
    made = {name: model.get_submodule(name) for name in cuts}
    return {
        width_of(layer): cuts[name].outputs
        for name, layer in made.items()
        if makes(layer) and not is_depthwise(layer) and len(cuts[name].outputs) < width_of(layer)
    }


def _cut_parameters(narrowed: nn.Module, along: Along) -> None:
    for name, cuts in along.items():
        path, _, own = name.rpartition(".")
        parameter: Any = narrowed.get_parameter(name)
        values = parameter.data
        for axis, kept in cuts:
            values = values.index_select(axis, kept.to(values.device))
        small = nn.Parameter(values.clone(), parameter.requires_grad)
        narrowed.get_submodule(path).register_parameter(own, small)
