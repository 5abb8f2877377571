"""Runners of all members that share weights at once: side by side under vmap, or tiled in one batch."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from multitudes.ensemble.member_layer import member_layers
from multitudes.networks.calls import Input, InputError, map_tensors, tensors_in, tile
from multitudes.networks.stochastic import as_member, stochastic_layers
from multitudes.networks.trace import preserve_attributes, writing_modules
from multitudes.networks.versions import Versions
from multitudes.networks.views import Views, may_write, run, view
from multitudes.networks.vmap import LazyVmap


class Tiled:
    """Run all members' rows as one batch `[M*B, ...]`, member-major.

    With `first`, the name of a layer, everything before it runs once on `[B, ...]`, and the layer tiles its input.
    """

    def __init__(self, network: nn.Module, members: int, first: str = "", versions: Versions | None = None) -> None:
        self.network, self.members, self.first = network, members, first
        self.views = Views(network, partial(_tiling_view, first), versions) if first else None

    def __call__(self, x: Input) -> Tensor:
        if self.views is None:
            return self.run_own_rows(tile(x, self.members))
        (network,) = self.views.current()
        predictions = run(network, x, late=[])
        if self.views.may_write:
            self.views.show()
        return predictions.unflatten(0, (self.members, -1))

    def run_own_rows(self, x: Input) -> Tensor:
        """Run a batch `[M*B, ...]` of the members' own rows, `-> [M, B, ...]`."""
        return run(self.network, x, is_view=False).unflatten(0, (self.members, -1))


class SideBySide:
    """Run the network's own code for all members, under vmap from the first layer that differs between them on.

    Everything before that layer runs once. A network that writes attributes or assigns buffers is refused.
    """

    def __init__(self, network: nn.Module, members: int, versions: Versions | None = None) -> None:
        self.members = members
        self.views = Views(network, _vmapped_view, versions)

    def __call__(self, x: Input) -> Tensor:
        (network,) = self.views.current()
        with LazyVmap(self.members) as lazy_vmap:
            if stochastic_layers(network):  # each member draws its own numbers, before that layer too
                lazy_vmap.enter()
            return self._run(network, lazy_vmap, x)

    def run_own_rows(self, x: Input) -> Tensor:
        """Run a batch `[M*B, ...]` of the members' own rows, `-> [M, B, ...]`."""
        (network,), rows = self.views.current(), len(tensors_in(x)[0])
        with LazyVmap(self.members) as lazy_vmap:
            members = lazy_vmap.enter()

            def own(tensor: Tensor) -> Tensor:
                has_rows = tensor.shape[:1] == (rows,)
                return members.own(tensor.unflatten(0, (self.members, -1))) if has_rows else tensor

            return self._run(network, lazy_vmap, map_tensors(own, x))

    def _run(self, network: nn.Module, lazy_vmap: LazyVmap, x: Input) -> Tensor:
        writing = writing_modules(network)
        buffers = [(module, dict(module._buffers)) for _, module in writing]
        own_numbers: AbstractContextManager[None] = nullcontext()
        if lazy_vmap.members is not None:
            own_numbers = as_member(network, lazy_vmap.members.own(torch.arange(self.members)), self.members)
        try:
            with own_numbers, preserve_attributes(writing) as written:
                predictions = lazy_vmap.whole(run(network, x, lazy_vmap=lazy_vmap))
        finally:
            for module, own in buffers:
                if any(module._buffers[name] is not buffer for name, buffer in own.items()):
                    module._buffers.update(own)
                    raise InputError("its forward assigns buffers")
        if lazy_vmap.disturbed:
            raise InputError("a layer that differs between members runs inside a function mode")
        if written:
            path, name = min(written)
            raise InputError(f"the forward of module {path!r} writes its attribute {name!r}")
        return predictions


def _tiling_view(first: str, network: nn.Module) -> list[nn.Module]:
    layers = member_layers(network)
    return [view(network, {name: {"in_view": True, "untiled": name == first} for name in layers})]


def _vmapped_view(network: nn.Module) -> list[nn.Module]:
    return [view(network, {name: layer.as_all() for name, layer in member_layers(network).items()}, may_write)]
