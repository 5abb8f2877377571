"""Narrowing: a network of the same kind with its hidden widths scaled down.

Which of a layer's inputs survive depends on what happened between layers: additions, `cat`, `flatten`, pooling.
Instead of analysing that, it is observed: each layer chooses the channels that it keeps, the others are set
to NaN, and NaN goes through everything that a network does to channels, so that at the next layer the
surviving inputs are those that are not NaN. One run on an example gives every layer's kept inputs and outputs.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from multitudes.core.calling import Input, call
from multitudes.core.checks import check_count, check_number
from multitudes.core.draws.stochastic import Stochastic
from multitudes.core.multitude import Multitude
from multitudes.surgery.activation_size import keep_scale
from multitudes.surgery.cuts import FOLLOWING, MAKING, Cut, cut_layer, inputs_of, is_depthwise, norm_groups, width_of
from multitudes.surgery.layers import PRODUCTS, TRANSPOSED, Factory, Selector, is_frozen, replace, select
from multitudes.surgery.observe import example_for, executed, hooked, observing
from multitudes.surgery.start import starting


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
        cuts = plan_cuts(model, factor, gamma, min_channels, layers, example)
        narrowed = apply_cuts(model, cuts, example)
        return start.begin(narrowed if start.redraws else rescaled(narrowed, model, cuts, example))


def plan_cuts(
    model: nn.Module,
    factor: float,
    gamma: int,
    min_channels: int,
    layers: Selector,
    example: Input,
) -> dict[str, Cut]:
    """Every layer's cut, by name. Channels are chosen at random, from torch's random state."""
    for name, module in model.named_modules():
        if type(module).__module__.startswith("torch.nn") and module._parameters and type(module) not in (
            *MAKING, *FOLLOWING
        ):  # fmt: skip
            raise ValueError(
                f"layer {name!r} is a {type(module).__name__}, which cannot be narrowed; deep_ensemble keeps it whole"
            )
        if isinstance(module, Stochastic) and any(True for _ in module.parameters()):
            raise ValueError(
                f"layer {name!r} is a {type(module).__name__}, whose random weights cannot be narrowed; "
                "deep_ensemble keeps it whole"
            )
    grouped = set(select(model, layers, PRODUCTS))
    order = executed(model, example, MAKING)
    if not order:
        raise ValueError(f"model ({type(model).__name__}) has no layer that can be narrowed")
    generator = torch.Generator().manual_seed(int(torch.randint(2**62, ())))  # what runs leaves no trace in torch's
    with observing(model):
        whole = {order[-1]} | {name for name in order if is_frozen(model.get_submodule(name))}
        watch = _Watch(factor, whole, generator)
        if bool(watch.run(model, example).isnan().any()):  # several layers give the output
            whole |= {name for name in order if _gives_output(model, name, example)}
            watch = _Watch(factor, whole, generator)
            watch.run(model, example)
        if frozen := _cut_frozen(model, watch.cuts):  # what it reads must be whole as well
            before = executed(model, example, (*MAKING, *FOLLOWING))
            whole |= set(before[: before.index(frozen[-1])])
            watch = _Watch(factor, whole, generator)
            watch.run(model, example)
    whole |= {order[0]}
    return {
        name: _grouped(model.get_submodule(name), cut, factor, gamma if name in grouped - whole else 1, min_channels)
        for name, cut in watch.cuts.items()
    }


def _cut_frozen(model: nn.Module, cuts: dict[str, Cut]) -> list[str]:
    """The layers with frozen parameters that would lose inputs, in the order in which they run."""
    frozen = {name: model.get_submodule(name) for name in cuts if is_frozen(model.get_submodule(name))}
    return [name for name, layer in frozen.items() if len(cuts[name].inputs) < inputs_of(layer)]


def apply_cuts(model: nn.Module, cuts: dict[str, Cut], example: Input) -> nn.Module:
    """The narrowed copy, with the kept channels' weights; checked on the example."""
    layers = {name: model.get_submodule(name) for name in cuts if not is_frozen(model.get_submodule(name))}
    narrowed = replace(model, {name: cut_layer(layer, cuts[name], name) for name, layer in layers.items()})
    with observing(model, narrowed):
        want = call(model, example).shape
        try:
            got = call(narrowed, example).shape
        except (RuntimeError, ValueError) as error:
            raise ValueError(_unfit(model, str(error))) from error
    if got != want:
        raise ValueError(_unfit(model, f"it gives {list(got)} instead of {list(want)}"))
    return narrowed


def rescaled(narrowed: nn.Module, model: nn.Module, cuts: dict[str, Cut], example: Input) -> nn.Module:
    """The narrowed network with its weights scaled so that activations are as large as the model's."""
    products = {name: cut.outputs for name, cut in cuts.items() if type(model.get_submodule(name)) in PRODUCTS}
    keep_scale(model, narrowed, example, example, products)
    return narrowed


def _unfit(model: nn.Module, reason: str) -> str:
    alone = [name for name, _ in model.named_parameters() if type(_owner(model, name)) not in (*MAKING, *FOLLOWING)]
    hint = f"; it has parameters of fixed width: {', '.join(alone)}" if alone else ""
    return f"model ({type(model).__name__}) cannot be narrowed, since its forward fixes a hidden width: {reason}{hint}"


def _owner(model: nn.Module, parameter: str) -> nn.Module:
    return model.get_submodule(parameter.rpartition(".")[0])


# -- observing which channels survive ----------------------------------------------------------------------


class _Watch(TorchFunctionMode):
    """One run in which each layer's dropped channels are NaN; layers in `last` keep all of theirs."""

    def __init__(self, factor: float, last: set[str], generator: torch.Generator) -> None:
        super().__init__()
        self.factor, self.last, self.generator = factor, last, generator
        self.cuts: dict[str, Cut] = {}
        self.chosen: dict[int, Tensor] = {}  # one choice a width, so that channels that are added agree

    def run(self, model: nn.Module, example: Input) -> Tensor:
        with (
            self,
            hooked(model, (*MAKING, *FOLLOWING), lambda name, m, args, y: self.see(name, m, args[0], y)),
        ):
            return call(model, example)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.scaled_dot_product_attention:
            raise ValueError(
                "attention ties its widths together, so it cannot be narrowed; deep_ensemble keeps it whole"
            )
        return function(*args, **(kwargs or {}))

    def see(self, name: str, layer: Any, x: Tensor, y: Tensor) -> Tensor:
        following = type(layer) in FOLLOWING
        embedding = isinstance(layer, nn.Embedding)
        inputs = torch.arange(layer.num_embeddings) if embedding else _kept(x, _axis(layer), name)
        if following:
            cut, out = Cut(inputs, inputs), torch.where(x.isnan(), torch.nan, 0.0).to(y)
        else:
            outputs = self._outputs(name, layer, inputs)
            cut, out = Cut(inputs, outputs), torch.full_like(y, torch.nan)
            axis = -1 if isinstance(layer, nn.Linear | nn.Embedding) else 1
            out.index_fill_(axis, outputs.to(y.device), 0.0)
        before = self.cuts.setdefault(name, cut)
        if not (torch.equal(before.inputs, cut.inputs) and torch.equal(before.outputs, cut.outputs)):
            raise ValueError(f"layer {name!r} is used in several places that see different channels")
        return out

    def _outputs(self, name: str, layer: Any, inputs: Tensor) -> Tensor:
        width = width_of(layer)
        if is_depthwise(layer):
            each = width // layer.in_channels
            return (inputs.unsqueeze(1) * each + torch.arange(each)).flatten()
        if name in self.last:
            return torch.arange(width)
        if width not in self.chosen:
            self.chosen[width] = choose(width, math.ceil(round(width * self.factor, 9)), self.generator)
        return self.chosen[width]


def _gives_output(model: nn.Module, name: str, example: Input) -> bool:
    """Whether a layer's output reaches the network's without another layer between: NaN gets through."""

    def mark(other: str, layer: nn.Module, args: Any, y: Tensor) -> Tensor:
        if type(layer) in FOLLOWING:
            return torch.where(args[0].isnan(), torch.nan, 0.0).to(y)
        return torch.full_like(y, torch.nan if other == name else 0.0)

    with hooked(model, (*MAKING, *FOLLOWING), mark):
        return bool(call(model, example).isnan().any())


def choose(width: int, count: int, generator: torch.Generator | None = None) -> Tensor:
    """`count` of `width` channels, one at random from each of `count` equal stretches, sorted.

    Stretches keep the choice even, so that each group of a grouped layer loses the same share.
    """
    edges = torch.arange(count + 1) * width // count
    return edges[:-1] + (torch.rand(count, generator=generator) * (edges[1:] - edges[:-1])).long()


def _axis(layer: nn.Module) -> int:
    if isinstance(layer, nn.Linear):
        return -1
    return -len(layer.normalized_shape) if isinstance(layer, nn.LayerNorm) else 1


def _kept(x: Tensor, axis: int, name: str) -> Tensor:
    nan = x.isnan().movedim(axis, 0).flatten(1)
    dropped = nan.all(1)
    if bool((nan.any(1) != dropped).any()) or bool(dropped.all()):
        raise ValueError(
            f"the channels that reach layer {name!r} are mixed on their way (by an attention, a softmax, a norm "
            "over channels), so the network cannot be narrowed; deep_ensemble keeps it whole"
        )
    return (~dropped).nonzero()[:, 0].cpu()


def _grouped(layer: Any, cut: Cut, factor: float, gamma: int, min_channels: int) -> Cut:
    """The cut with the largest gamma, up to the wanted one, that the layer's widths allow."""
    if type(layer) in FOLLOWING:
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
