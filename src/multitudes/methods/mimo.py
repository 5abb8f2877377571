"""MIMO: one network, M inputs and M outputs.

Havasi et al., *Training independent subnetworks for robust prediction*, 2021. The first layer takes M inputs
side by side, the last gives M outputs, and everything between is shared. In training each output learns the
label of its own input; in evaluation all M inputs are the same, and the outputs are an ensemble.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from multitudes.core.calling import Input, call, input_errors
from multitudes.core.checks import check_count, check_number
from multitudes.core.multitude import Criterion, Multitude
from multitudes.methods.registry import Method, by
from multitudes.surgery.layers import CONVOLUTIONS, PRODUCTS, Factory, Selector, replace
from multitudes.surgery.observe import example_for, executed, hooked, observing
from multitudes.surgery.start import starting


class Mimo(Multitude):
    """A network of M inputs, side by side along axis `inputs`, and M outputs along axis `outputs`."""

    def __init__(self, network: nn.Module, members: int, first: str, last: str, inputs: int, outputs: int) -> None:
        super().__init__(network, members)
        self.first, self.last = first, last
        self.inputs, self.outputs = inputs, outputs
        self.repetition, self.batch_repetition = 0.0, 1

    def _predictions(self, x: Input) -> Tensor:
        return self._answers([_tensor(x)] * self.members)

    def _answers(self, inputs: list[Tensor]) -> Tensor:
        """Member m's prediction for `inputs[m]`, each `[B, ...]`: `[M, B, ...]`."""
        output = call(self.network, torch.cat(inputs, self.inputs))
        axis = self.outputs % output.dim()
        return output.unflatten(axis, (self.members, -1)).movedim(axis, 0)

    def loss(
        self,
        x: Input,
        y: Tensor,
        criterion: Criterion | None = None,
        *,
        task: str | None = None,
        dataset_size: int | None = None,
    ) -> Tensor:
        """The mean over members of each one's loss on its own, shuffled, inputs."""
        x = _tensor(x)
        if len(y) != len(x):
            raise ValueError(f"y must have one target for each of the {len(x)} inputs, got {len(y)}")
        orders = self._orders(len(x), x.device)
        with input_errors(x):
            predictions = self._answers([x[order] for order in orders])
        targets = [y[order] for order in orders]
        criterion = self._criterion(criterion, task, predictions, targets[0])
        losses = [criterion(p, target) for p, target in zip(predictions, targets, strict=True)]
        return self._combine(losses) + self._divergence_of_one(dataset_size)

    def _orders(self, batch: int, device: torch.device) -> list[Tensor]:
        """Which inputs each member sees: a share `repetition` is the same for all, the rest shuffled apart."""
        order = torch.randperm(batch * self.batch_repetition, device=device) % batch
        split = round(len(order) * (1 - self.repetition))
        apart, same = order[:split], order[split:]
        return [torch.cat([apart[torch.randperm(split, device=device)], same]) for _ in range(self.members)]

    def _member(self, index: int) -> nn.Module:
        """In evaluation the inputs are one input, so the first layer's weights for them add up."""
        first, last = self.network.get_submodule(self.first), self.network.get_submodule(self.last)
        folded = _resized(first, inputs=1 / self.members)
        folded.get_parameter("weight").data = first.get_parameter("weight").data.unflatten(1, (self.members, -1)).sum(1)
        mine = _resized(folded if first is last else last, outputs=1 / self.members)
        for name, parameter in (folded if first is last else last).named_parameters():
            mine.get_parameter(name).data = parameter.data.unflatten(0, (self.members, -1))[index].clone()
        return replace(self.network, {self.first: folded} | {self.last: mine})


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
    """A MIMO network: `members` inputs stacked on channels, `members` outputs.

    In `loss` the inputs are shuffled independently for each member; the share `repetition` of them is the same
    for all members (the paper's rho), and each batch is used `batch_repetition` times. From a pretrained
    network, the evaluated function is kept exactly. `example` is one batch of inputs; where it is left out,
    the usual sizes are tried.

    >>> net = mimo(nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 2)), members=3)
    >>> net(torch.ones(5, 3)).shape
    torch.Size([3, 5, 2])
    """
    start = starting(model, members, init, heads, seed=seed)
    model = start.network
    check_number("repetition", repetition, 0, high=1)
    check_count("batch_repetition", batch_repetition)
    x = _tensor(example_for(model, example))
    order = executed(model, x, PRODUCTS)
    if not order:
        raise ValueError(f"model ({type(model).__name__}) has no convolution or linear layer to take its input")
    first, last = order[0], order[-1]
    for name in (first, last):
        layer = model.get_submodule(name)
        if not isinstance(layer, (*CONVOLUTIONS, nn.Linear)) or getattr(layer, "groups", 1) != 1:
            raise ValueError(f"MIMO cannot widen layer {name!r} ({layer}): it must be a plain convolution or linear")
    with start.seeded():
        network = start.begin(_widened(model, members, first, last))
    inputs, outputs = _axes(model, x, first, last)
    net = Mimo(network, members, first, last, inputs, outputs)
    net.repetition, net.batch_repetition = repetition, batch_repetition
    net.like(start.given, task)
    _check_outputs(net, model, x)
    return net


def _tensor(x: Input) -> Tensor:
    if not isinstance(x, Tensor):
        raise ValueError(f"MIMO puts inputs side by side, so x must be one tensor, got {type(x).__name__}")
    return x


def _widened(model: nn.Module, members: int, first: str, last: str) -> nn.Module:
    """Wider first and last layers that compute, for M equal inputs, the model's own output M times."""
    wide = _resized(model.get_submodule(first), inputs=members)
    weight = model.get_submodule(first).get_parameter("weight").data
    wide.get_parameter("weight").data = torch.cat([weight] * members, 1) / members
    old = wide if first == last else model.get_submodule(last)
    head = _resized(old, outputs=members)
    for name, parameter in old.named_parameters():
        head.get_parameter(name).data = torch.cat([parameter.data] * members, 0)
    return replace(model, {first: wide} | {last: head})


def _resized(layer: nn.Module, inputs: float = 1, outputs: float = 1) -> nn.Module:
    """A copy of a layer that says it has other widths; its weights are for the caller to set."""
    layer = copy.deepcopy(layer)
    names = ("in_features", "out_features") if isinstance(layer, nn.Linear) else ("in_channels", "out_channels")
    for name, factor in zip(names, (inputs, outputs), strict=True):
        setattr(layer, name, round(getattr(layer, name) * factor))
    return layer


def _axes(model: nn.Module, x: Tensor, first: str, last: str) -> tuple[int, int]:
    """Where inputs and outputs lie side by side: on channels, or on the features of a `[B, T, H]` sequence."""
    layer = model.get_submodule(first)
    seen: list[torch.Size] = []

    def see(name: str, _: nn.Module, args: tuple[Tensor, ...], __: Tensor) -> None:
        if name == first:
            seen.append(args[0].shape)

    with hooked(model, (type(layer),), see), observing(model):
        call(model, x)
    sequence = isinstance(layer, nn.Linear) and seen[0] == x.shape
    return (-1 if sequence else 1), (-1 if isinstance(model.get_submodule(last), nn.Linear) else 1)


def _check_outputs(net: Mimo, model: nn.Module, x: Tensor) -> None:
    with observing(net, model):
        want = [net.members, *call(model, x).shape]
        try:
            got = list(net(x).shape)
            reason = f"it gives {got} instead of {want}"
        except ValueError as error:
            got, reason = None, str(error)
    if got != want:
        raise ValueError(
            f"MIMO cannot convert model ({type(model).__name__}): its input must go straight into its first layer, "
            f"{net.first!r}, and its output come straight from its last layer, {net.last!r}; widened, {reason}"
        )


ROWS = (
    Method(
        "mimo", by(mimo), {"members": 3, "repetition": 0.5, "batch_repetition": 1},
        "A forward of one network, whatever the number of members.",
        "Pick it when a forward must cost no more than now, and the network is wide for its task.",
        place=50,
    ),
)  # fmt: skip
