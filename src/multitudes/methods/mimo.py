"""MIMO: one network, M inputs and M outputs.

Havasi et al., *Training independent subnetworks for robust prediction*, 2021. The first layer takes M concatenated
inputs, the last gives M outputs, and all layers between are shared. In training each output learns the label of its
own input. In evaluation all M inputs are the same, and the outputs are an ensemble.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from multitudes.base.checks import check_count, check_number
from multitudes.ensemble.multitude import Multitude
from multitudes.methods.registry import Method, by
from multitudes.networks.calls import Input, call, input_errors
from multitudes.networks.copies import copied
from multitudes.networks.trace import observing
from multitudes.networks.verification import agree, moved_weights, rows_interact
from multitudes.surgery.affine import affine_layers, axis_of, is_computed, kind_of
from multitudes.surgery.initial_weights import Start
from multitudes.surgery.observe import example_for, execution_order, note_reach
from multitudes.surgery.select import CONVOLUTIONS, Factory, Selector, replace
from multitudes.tasks import Criterion


class Mimo(Multitude):
    """A network of M inputs, concatenated along axis `inputs`, and M outputs along axis `outputs`."""

    def __init__(self, network: nn.Module, members: int, first: str, last: str, inputs: int, outputs: int) -> None:
        super().__init__(network, members)
        self.first, self.last = first, last
        self.inputs, self.outputs = inputs, outputs
        self.repetition, self.batch_repetition = 0.0, 1

    def _predictions(self, x: Input) -> Tensor:
        return self._predict_each([_tensor(x)] * self.members)

    def _predict_each(self, inputs: list[Tensor]) -> Tensor:
        """Return member m's prediction for `inputs[m]`, each `[B, ...]`, as `[M, B, ...]`."""
        output = call(self.network, torch.cat(inputs, self.inputs))
        axis = self.outputs % output.dim()
        return output.unflatten(axis, (self.members, -1)).movedim(axis, 0)

    def _losses(
        self, x: Input, y: Tensor, criterion: Criterion | None, task: str | None, weight: Tensor | None
    ) -> list[Tensor]:
        """Return each member's loss on its own shuffled inputs."""
        x = _tensor(x)
        if len(y) != len(x):
            raise ValueError(f"y must have one target for each of the {len(x)} inputs, got {len(y)}")
        if weight is not None and len(weight) != len(x):
            raise ValueError(f"weight must have one number for each of the {len(x)} inputs, got {len(weight)}")
        orders = self._orders(len(x), x.device)
        with input_errors(x):
            predictions = self._predict_each([x[order] for order in orders])
        targets = [y[order] for order in orders]
        own_loss = self._criterion(criterion, task, predictions, targets[0]).loss
        weights = [None if weight is None else weight[order] for order in orders]
        return [own_loss(p, y, weight=w) for p, y, w in zip(predictions, targets, weights, strict=True)]

    def _orders(self, batch: int, device: torch.device) -> list[Tensor]:
        """Return each member's order of inputs: equal for a share `repetition`, shuffled independently for the rest."""
        order = torch.randperm(batch * self.batch_repetition, device=device) % batch
        split = round(len(order) * (1 - self.repetition))
        shuffled, same = order[:split], order[split:]
        return [torch.cat([shuffled[torch.randperm(split, device=device)], same]) for _ in range(self.members)]

    def _member(self, index: int) -> nn.Module:
        """Build a member. In evaluation all inputs are the same, so the first layer's weights for them add up."""
        first, last = self.network.get_submodule(self.first), self.network.get_submodule(self.last)
        folded = _resized(first, inputs=1 / self.members)
        shares = first.get_parameter("weight").data.unflatten(1, (self.members, -1)).unbind(1)
        folded.get_parameter("weight").data = sum(shares[1:], shares[0]).clone()
        wide = folded if first is last else last
        head = _resized(wide, outputs=1 / self.members)
        for name, parameter in wide.named_parameters():
            head.get_parameter(name).data = parameter.data.unflatten(0, (self.members, -1))[index].clone()
        return replace(self.network, {self.first: folded} | {self.last: head})


def mimo(
    model: nn.Module | Factory,
    members: int = 3,
    repetition: float = 0.0,
    batch_repetition: int = 1,
    *,
    example: Tensor | None = None,
    init: str | None = None,
    heads: Selector = None,
    task: str | None = None,
    seed: int | None = None,
) -> Mimo:
    """Convert a network to MIMO (Havasi et al., 2021): M inputs and M outputs in one forward.

    The first layer takes M inputs, stacked on channels, and the last layer gives M outputs. In `net.loss` the inputs
    are shuffled independently for each member; in evaluation all M inputs are the same.

    Args:
        model: The network, which is not changed, or a function that builds one for each input and output. A pretrained
            network keeps its function exactly in evaluation. A frozen first layer cannot learn to distinguish inputs.
        members: Number of members.
        repetition: Share of the inputs in a batch that are the same for all members (the paper's rho).
        batch_repetition: Number of times that each batch is repeated in `net.loss`.
        example: One batch of inputs; by default noise of the usual sizes is tried.
        init: Where the weights start: `"fresh"`, `"heads"` or `"pretrained"`, as in `deep_ensemble`.
        heads: Selects the output layers that `init="heads"` resets.
        task: Task of the predictions, if it cannot be inferred.
        seed: Seed of the random weights.

    Returns:
        A multitude with predictions `[M, B, ...]`.

    Example:
        >>> net = mimo(nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 2)), members=3)
        >>> net(torch.ones(5, 3)).shape
        torch.Size([3, 5, 2])
    """
    start = Start(model, members, init, heads, example=example, seed=seed)
    model = start.network
    check_number("repetition", repetition, 0, high=1)
    check_count("batch_repetition", batch_repetition)
    if repetition == 1 and members > 1 and start.mode == "pretrained":
        raise ValueError(start.same_network_error("init='heads' resets the output layers, or pass repetition below 1"))
    x = _tensor(example_for(model, example))
    first, last = _first_and_last(model, x)
    _check_trained(model, members, first, last)
    network = _widened(model, members, first, last)
    inputs, outputs = _verified_axes(model, network, members, first, last, x)
    with start.seeded():
        network = start.initialize(network)
        if start.fresh and not start.redraws:
            _fill(network, [start.next_network() for _ in range(members)], first, last)
    net = Mimo(network, members, first, last, inputs, outputs)
    net.repetition, net.batch_repetition = repetition, batch_repetition
    net.like(start.given, task)
    ends = {first: [f"takes {members} inputs"]}
    ends.setdefault(last, []).append(f"gives {members} outputs")
    net.notes = start.summary_notes({name: " and ".join(texts) for name, texts in ends.items()})
    note_reach(net, model, ends, x, warn=False)  # all layers between are shared
    return net


def _tensor(x: Input) -> Tensor:
    if not isinstance(x, Tensor):
        raise ValueError(f"MIMO concatenates inputs, so x must be one tensor, got {type(x).__name__}")
    return x


def _widened(model: nn.Module, members: int, first: str, last: str) -> nn.Module:
    """Widen the first and last layers so that M equal inputs give the model's output M times."""
    wide = _resized(model.get_submodule(first), inputs=members)
    weight = model.get_submodule(first).get_parameter("weight").data
    shares = [weight / members] * (members - 1)
    wide.get_parameter("weight").data = torch.cat([*shares, weight - sum(shares)], 1)  # they add up exactly
    old = wide if first == last else model.get_submodule(last)
    head = _resized(old, outputs=members)
    for name, parameter in old.named_parameters():
        head.get_parameter(name).data = torch.cat([parameter.data] * members, 0)
    return replace(model, {first: wide} | {last: head})


def _fill(network: nn.Module, models: list[nn.Module], first: str, last: str) -> None:
    """Give each input and output the weights of its own model, scaled to keep the size of activations."""
    wide = network.get_submodule(first).get_parameter("weight")
    if first == last:  # each output has weights for each input
        return
    if wide.requires_grad:
        weights = [model.get_submodule(first).get_parameter("weight").data for model in models]
        wide.data = torch.cat(weights, 1) / len(models) ** 0.5
    for name, parameter in network.get_submodule(last).named_parameters():
        if parameter.requires_grad:
            parameter.data = torch.cat([model.get_submodule(last).get_parameter(name).data for model in models], 0)


def _check_trained(model: nn.Module, members: int, first: str, last: str) -> None:
    """Check that members can become different, through the first and last layers."""
    if members > 1 and not any(p.requires_grad for p in model.get_submodule(last).parameters()):
        raise ValueError(
            f"MIMO cannot convert model ({type(model).__name__}): its output layer {last!r} is frozen, so all outputs "
            "would stay the same"
        )
    if members > 1 and not model.get_submodule(first).get_parameter("weight").requires_grad:
        warnings.warn(f"layer {first!r} is frozen, so it cannot learn to distinguish the inputs", stacklevel=3)


def _resized(layer: nn.Module, inputs: float = 1, outputs: float = 1) -> nn.Module:
    """Return a copy of a layer with other width attributes; the caller sets its weights."""
    layer = copied(layer)
    names = ("in_features", "out_features") if isinstance(layer, nn.Linear) else ("in_channels", "out_channels")
    for name, factor in zip(names, (inputs, outputs), strict=True):
        setattr(layer, name, round(getattr(layer, name) * factor))
    return layer


def _first_and_last(model: nn.Module, x: Tensor) -> tuple[str, str]:
    """Return the names of the first and last layers that run; these are widened."""
    order = execution_order(model, x, affine_layers(model))
    if not order:
        raise ValueError(f"model ({type(model).__name__}) has no convolution or linear layer to widen")
    for name in (order[0], order[-1]):
        layer = model.get_submodule(name)
        plain = kind_of(layer) in (*CONVOLUTIONS, nn.Linear) and not is_computed(layer)
        if not plain or getattr(layer, "groups", 1) != 1:
            raise ValueError(f"MIMO cannot widen layer {name!r} ({layer}): it must be a plain convolution or linear")
    return order[0], order[-1]


# -- verification ------------------------------------------------------------------------------------------


def _verified_axes(
    model: nn.Module, network: nn.Module, members: int, first: str, last: str, x: Tensor
) -> tuple[int, int]:
    """Return the axes along which inputs and outputs are concatenated, verified on the example.

    Inputs must reach the outputs through the first layer only, and outputs come from the last layer only.
    """
    outputs = axis_of(model.get_submodule(last))
    with observing(model, network):
        reason = rows_interact(model, lambda rows: call(model, rows)[None], x)
        reason = reason and f"{reason}, and MIMO shuffles rows"
        for inputs in range(1, x.dim()) if not reason else ():
            net = Mimo(copied(network), members, first, last, inputs, outputs)
            with moved_weights(net.network):  # weights of 0 would hide the layers before them
                mixed = _separation_error(net, x)
            if not mixed:
                return inputs, outputs
            reason = reason or mixed
    raise ValueError(
        f"MIMO cannot convert model ({type(model).__name__}): its input must be read by its first layer {first!r} only "
        f"and its output be that of its last layer {last!r}, but {reason}"
    )


def _separation_error(net: Mimo, x: Tensor) -> str:
    """Return how the widened network fails to separate its members, or "" if it does not fail.

    With the first layer's weights zeroed for all inputs but one, each member must predict for this input what it
    predicts alone, independently of the other inputs.
    """
    generator = torch.Generator().manual_seed(0)
    moved = [torch.rand(x.shape, generator=generator).to(x) for _ in range(net.members)]
    inputs = [x + each for each in moved] if x.is_floating_point() else [x.flip(0), *[x] * (net.members - 1)]
    first = net.network.get_submodule(net.first).get_parameter("weight")
    shares = first.data.unflatten(1, (net.members, -1))
    alone = [net._member(index) for index in range(net.members)]
    for number, own in enumerate(inputs):
        only = torch.zeros_like(shares)
        only[:, number] = shares.sum(1)
        first.data = only.flatten(1, 2)
        try:
            predictions = net._predict_each(inputs)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            return f"the widened network fails: {str(error).splitlines()[0]}"
        for index, (member, got) in enumerate(zip(alone, predictions, strict=True)):
            want = call(member, own)
            if got.shape != want.shape:
                return f"the widened network returns {list(got.shape)} instead of {list(want.shape)}"
            if not agree(got[None], want[None]):
                return f"output {index} for input {number} changes if other inputs are in the same forward"
    return ""


ROWS = (
    Method(
        "mimo", by(mimo), {"members": 3, "repetition": 0.5, "batch_repetition": 1},
        "One forward of one network for any number of members.",
        "Pick it if inference may cost no more than one network, and the network is wide for its task.",
        place=50,
    ),
)  # fmt: skip
