"""The runner of members that share weights one after the other, each as a view of the network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.ensemble.member_layer import MemberLayer, member_layers
from multitudes.networks.calls import Input
from multitudes.networks.stochastic import Draw, stochastic_layers
from multitudes.networks.versions import Versions
from multitudes.networks.views import Views, may_write, run, view


class OneByOne:
    """Run each member alone on the batch, `x -> [M, B, ...]`.

    All start from the same buffers. A shared buffer becomes the mean of the members' results, or the last integer.
    """

    def __init__(self, network: nn.Module, members: int, versions: Versions | None = None) -> None:
        self.network = network
        self.members = members
        self.views = Views(network, partial(_members, members), versions)

    def __call__(self, x: Input) -> Tensor:
        views = self.views.current()
        if torch.compiler.is_compiling():
            return torch.stack([run(each, x) for each in views])
        draw = next((layer.draw for layer in stochastic_layers(self.network) if isinstance(layer.draw, Draw)), None)
        runs: list[Callable[[], Tensor]] = [partial(run, each, x) for each in views]
        if draw is not None:
            runs = [partial(_run_with_draw, draw, index, self.members, one) for index, one in enumerate(runs)]
        predictions = run_from_same_buffers(self.network, runs)
        if self.views.may_write:
            self.views.show()
        return torch.stack(predictions)

    def current(self) -> list[nn.Module]:
        """Return the members, as views of the current network."""
        self.views.versions.look()
        return self.views.current()


def _run_with_draw(draw: Draw, index: int, members: int, one: Callable[[], Tensor]) -> Tensor:
    with draw.of_member(index, members):
        return one()


def member_view(network: nn.Module, index: int) -> nn.Module:
    """Return one member as a view of the network."""
    return view(network, {name: layer.as_member(index) for name, layer in member_layers(network).items()}, may_write)


def _members(members: int, network: nn.Module) -> list[nn.Module]:
    return [member_view(network, index) for index in range(members)]


def run_from_same_buffers(network: nn.Module, runs: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run each function from the same state of the network's shared buffers; set these to the mean of the results."""
    shared = [m for m in network.modules() if m._buffers and not isinstance(m, MemberLayer)]
    if not shared:
        return [one() for one in runs]
    before = [(m, name, b, b.clone(), b._version) for m in shared for name, b in m._buffers.items() if b is not None]
    empty = [(m, name) for m in shared for name, b in m._buffers.items() if b is None]
    made: list[list[Any]] = [[] for _ in before]
    new: list[list[Any]] = [[] for _ in empty]
    results = []
    for one in runs:
        results.append(one())
        for own, (module, name, buffer, value, version) in zip(made, before, strict=True):
            now = module._buffers[name]
            assert now is not None
            if now is not buffer or buffer._version != version:
                own.append(now.detach().clone())
                module._buffers[name] = buffer
                buffer.data.copy_(value)
        for own, (module, name) in zip(new, empty, strict=True):
            own.append(module._buffers[name])
            module._buffers[name] = None
    for own, (module, name, buffer, *_) in zip(made, before, strict=True):
        if own:
            _keep(module, name, buffer, own)
    for own, (module, name) in zip(new, empty, strict=True):
        if all(value is not None for value in own):
            _keep(module, name, None, [value.detach() for value in own])
    return results


@torch.no_grad()
def _keep(module: nn.Module, name: str, old: Tensor | None, made: list[Tensor]) -> None:
    whole = not (made[0].is_floating_point() or made[0].is_complex()) or len({value.shape for value in made}) > 1
    value = made[-1] if whole else torch.stack(made).mean(0)
    if old is not None and old.shape == value.shape and old.dtype == value.dtype:
        old.data.copy_(value)
    else:
        module._buffers[name] = value
