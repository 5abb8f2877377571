"""Narrowing: a network of the same kind with its hidden widths scaled down.

Which of a layer's inputs survive depends on what happened between layers: additions, `cat`, `flatten`, pooling.
Instead of analysing that, it is observed: each layer chooses the channels that it keeps, the others are set
to NaN, and NaN goes through everything that a network does to channels, so that at the next layer the
surviving inputs are those that are not NaN. One run on an example gives every layer's kept inputs and outputs
(`watch`), and one more proves what was made of them.
"""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.core.calling import Input, call, plain_attention
from multitudes.core.checks import check_count, check_number
from multitudes.core.draws.stochastic import Stochastic
from multitudes.core.multitude import Multitude
from multitudes.core.proof import alike, unmoved
from multitudes.surgery.activation_size import keep_scale
from multitudes.surgery.affine import is_computed, kind_of
from multitudes.surgery.applying import Plan, apply_cuts
from multitudes.surgery.attended import Attention, HeadChoice, attentions
from multitudes.surgery.cuts import Cut, follows, inputs_of, is_depthwise, makes, norm_groups, width_of
from multitudes.surgery.layers import PRODUCTS, TRANSPOSED, Factory, Selector, is_frozen, select
from multitudes.surgery.narrow_config import narrower_models, untrue_configs
from multitudes.surgery.narrow_proof import runs_like, standing_alone
from multitudes.surgery.observe import example_for, executed, hooked, observing
from multitudes.surgery.opened_attention import attention_layers, close_attention, open_attention
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

    Attention keeps whole heads of the size that they have, and the widths that follow from them. Hugging Face's models
    are narrowed by their own configurations, which stay true.

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
        narrowed, cuts = narrowed_copy(model, factor, gamma, min_channels, layers, example, start.redraws)
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
    redrawn: bool = False,
) -> tuple[nn.Module, dict[str, Cut]]:
    """The narrowed copy with the kept channels' weights, proven on the example, and every layer's cut, by name.

    Channels are chosen at random, from torch's random state; where that does not work out, in patterns. Where weights
    are `redrawn` after, a Hugging Face model whose channels cannot be followed is the one that its configuration gives.
    """
    opened = open_attention(model)
    built = narrower_models(opened, factor)
    observed = partial(
        _observed_copy, opened, grouped=_selected(model, layers), factor=factor, gamma=gamma, min_channels=min_channels,
        example=example,
    )  # fmt: skip
    try:
        narrowed, cuts = observed(built)
        closed: nn.Module | None = _closed(narrowed, model, example)
    except ValueError:
        if redrawn and gamma == 1 and "" in built and runs_like(built[""], model, example):
            return built[""], _widths(model, built[""])
        if not built:
            raise
        try:
            narrowed, cuts = observed({})
            closed = _closed(narrowed, model, example)
        except ValueError:
            closed = None
        if closed is None:
            raise
        built = {}
    assert closed is not None
    if factor < 1 and not built:
        _warn_of_configs(closed, model)
    return closed, cuts


def _widths(model: nn.Module, narrow: nn.Module) -> dict[str, Cut]:
    """The widths of a narrower network's layers, as cuts."""
    pairs = {name: (inputs_of(m), width_of(m)) for name, m in narrow.named_modules() if makes(m)}
    known = {name for name, m in model.named_modules() if makes(m)}
    return {
        name: Cut(torch.arange(inputs), torch.arange(width), 1, f"{inputs} -> {width}, gamma 1")
        for name, (inputs, width) in pairs.items()
        if name in known
    }


def _warn_of_configs(narrowed: nn.Module, model: nn.Module) -> None:
    if (wrong := untrue_configs(narrowed)) and not untrue_configs(model):
        warnings.warn(
            f"the configuration of {', '.join(wrong)} cannot tell the narrowed widths: members predict and are saved "
            "by mt.save, but save_pretrained gives what from_pretrained does not load",
            stacklevel=4,
        )


def _observed_copy(
    model: nn.Module,
    built: dict[str, nn.Module],
    *,
    grouped: set[str],
    factor: float,
    gamma: int,
    min_channels: int,
    example: Input,
) -> tuple[nn.Module, dict[str, Cut]]:
    """The narrowed copy by what is observed of the network, and every layer's cut."""
    _check_layers(model)
    known = {name: module for name, module in model.named_modules() if makes(module) or follows(module)}
    order = executed(model, example, [name for name, module in known.items() if makes(module)])
    if not order:
        raise ValueError(f"model ({type(model).__name__}) has no layer that can be narrowed")
    _check_reached(model, known, example)
    twins = _twins(known, order)
    counts = {n: width_of(m) for n, m in _layers_of(built).items() if n in known and makes(known[n])}
    if counts.get(order[-1], 0) != width_of(known[order[-1]]):  # an output layer of the user's own
        counts.pop(order[-1], None)
    found = attentions(model, example, {n: known[n] for n in order})
    seen = _Seen(model, example, known, order, found, factor, counts)
    seed, first = int(torch.randint(2**62, ())), ValueError()
    for pattern, heads_first in seen.ways():
        try:
            plan, whole = seen.plan(pattern, heads_first, seed)
            split = grouped - whole
            cuts = {
                name: _grouped(known[name], cut, factor, gamma if name in split else 1, min_channels, plan.heads, name)
                for name, cut in plan.cuts.items()
            }
            cuts |= {name: cuts[other] for name, other in twins.items()}
            own = [name for name in order[-1:] if name not in counts]
            plan = dataclasses.replace(plan, cuts=cuts, built=built, own=own)
            return apply_cuts(model, plan, example), cuts
        except ValueError as error:
            first = first if first.args else error
    raise first


def _twins(known: dict[str, nn.Module], order: list[str]) -> dict[str, str]:
    """Of tables that do not run themselves, the layer that runs with the same weight; any other is refused."""
    owners = {id(p): name for name in order for p in known[name].parameters()}
    twins: dict[str, str] = {}
    for name, layer in known.items():
        if not makes(layer) or name in order:
            continue
        same = {owners.get(id(p)) for p in layer.parameters()}
        other = same.pop() if isinstance(layer, nn.Embedding) and len(same) == 1 else None
        if other is None:
            raise ValueError(
                f"layer {name!r} does not run on the example in evaluation, so its widths cannot be seen: pass an "
                "example on which it runs, or take it out; deep_ensemble keeps it whole"
            )
        twins[name] = other
    return twins


def _layers_of(built: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """The layers of networks, by their names in the network that these are parts of."""
    return {
        f"{name}.{own}" if name and own else name or own: module
        for name, network in built.items()
        for own, module in network.named_modules()
    }


def _selected(model: nn.Module, layers: Selector) -> set[str]:
    """The layers that may be split into groups."""
    known = {name: m for name, m in model.named_modules() if kind_of(m) in PRODUCTS and makes(m)}
    inside = {f"{name}.out_proj" for name in attention_layers(model)}
    try:
        return set(select(model, layers, known)) - inside
    except ValueError:
        if layers is None:
            return set()
        raise


def _closed(narrowed: nn.Module, model: nn.Module, example: Input) -> nn.Module:
    """The narrowed network with torch's own attention again, which must give the same."""
    closed = close_attention(narrowed, model)
    if closed is not narrowed:
        with observing(closed, narrowed), plain_attention():
            if not alike(call(closed, example)[None], call(narrowed, example)[None]):
                raise ValueError(f"model ({type(model).__name__}) gives another output with narrower attention")
    return closed


@dataclass(frozen=True)
class _Seen:
    """What was observed of a network: its layers, the order in which they run, and its attentions."""

    model: nn.Module
    example: Input
    known: dict[str, nn.Module]
    order: list[str]
    attentions: list[Attention]
    factor: float
    counts: dict[str, int]
    """The widths that layers of Hugging Face models have by their configurations."""

    def ways(self) -> list[tuple[Pattern, bool]]:
        """The ways to choose channels, the likeliest first."""
        if not self.attentions:
            return [(pattern, False) for pattern in PATTERNS]
        return [(pattern, heads_first) for pattern in PATTERNS for heads_first in (False, True)]

    def plan(self, pattern: Pattern, heads_first: bool, seed: int) -> tuple[Plan, set[str]]:
        """Every layer's cut, and the layers that are not split into groups: the first, frozen ones, those that give the
        output."""

        def watched(whole: set[str]) -> tuple[Watch, Tensor]:
            generator = torch.Generator().manual_seed(seed)
            widths = {name: width_of(self.known[name]) for name in self.order}
            whole = whole - {name for name, count in self.counts.items() if count < width_of(self.known[name])}
            heads = HeadChoice(self.attentions, widths, self.factor, generator, self.counts, whole, heads_first)
            watch = Watch(self.factor, whole, generator, pattern, heads, self.counts)
            return watch, watch.run(self.model, self.example, self.known)

        with observing(self.model):
            whole = {self.order[-1]} | {name for name in self.order if is_frozen(self.known[name])}
            watch, output = watched(whole)
            if bool(output.isnan().any()):  # several layers give the output
                whole |= {n for n in self.order if gives_output(self.model, n, self.example, self.known)}
                watch, _ = watched(whole)
            if frozen := _cut_frozen(self.model, watch.cuts):  # what it reads must be whole as well
                before = executed(self.model, self.example, self.known)
                whole |= set(before[: before.index(frozen[-1])])
                watch, _ = watched(whole)
        assert watch.heads is not None
        return Plan(watch.cuts, watch.heads), whole | {self.order[0]}


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
    evaluated = set(executed(model, example, known))
    missing = [name for name in dict.fromkeys(reached) if name not in evaluated]
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


def told(cuts: dict[str, Cut], network: nn.Module) -> dict[str, str]:
    """What became of layers, by their names in the narrowed network: torch's attention has its queries' heads."""
    there = dict(network.named_modules())
    notes = {name.removesuffix(".q_proj"): cut.note for name, cut in cuts.items() if name not in there}
    return {n: text for n, text in notes.items() if n in there} | {n: c.note for n, c in cuts.items() if n in there}


def rescaled(narrowed: nn.Module, model: nn.Module, cuts: dict[str, Cut], example: Input) -> nn.Module:
    """The narrowed network with its weights scaled so that activations are as large as the model's."""
    if sum(p.numel() for p in narrowed.parameters()) == sum(p.numel() for p in model.parameters()):
        return narrowed
    opened, whole = open_attention(narrowed), open_attention(model)
    layers = {name: whole.get_submodule(name) for name in cuts}
    tables = {id(p) for m in layers.values() if isinstance(m, nn.Embedding) for p in m.parameters()}
    alone = {n: m for n, m in layers.items() if not any(id(p) in tables for p in m.parameters())}
    products = {name: cuts[name].outputs for name, layer in alone.items() if makes(layer)}
    keep_scale(whole, opened, example, example, products)
    return close_attention(opened, narrowed)


def _grouped(layer: Any, cut: Cut, factor: float, gamma: int, min_channels: int, heads: HeadChoice, name: str) -> Cut:
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
    bound = f", {told}" if (told := heads.note(name, width)) else ""
    note = f"{len(cut.inputs)} -> {len(cut.outputs)}{bound}, gamma {used}{'' if bound else rounded}"
    return Cut(cut.inputs, cut.outputs, used, note)
