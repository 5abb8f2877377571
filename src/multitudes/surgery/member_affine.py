"""Layers of affine maps that differ between members, and their insertion into a network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from multitudes.ensemble.member_layer import MemberLayer
from multitudes.ensemble.shared import SharedMembers
from multitudes.networks.calls import evaluating
from multitudes.networks.copies import copied
from multitudes.surgery.affine import (
    RECURRENT,
    SEVERAL,
    AffineMap,
    axis_of,
    kind_of,
    maps_of,
    plain_copy,
    run_with,
    weight_of,
)
from multitudes.surgery.initial_weights import Start
from multitudes.surgery.select import replace

Net = TypeVar("Net", bound=SharedMembers)


class AffineMemberLayer(MemberLayer):
    """A layer of affine maps that differs between members.

    Subclasses implement `weight_of_member`, and `run_all` for a layer of one map. A layer of several maps (attention,
    recurrent) runs once per member with the member's tensors swapped in. A map's tensors are `[M, ...]`; their names
    start with the map's prefix: `r` for a single map, or `out_proj_weight_r`.
    """

    def __init__(self, layer: nn.Module, members: int) -> None:
        several = kind_of(layer) in SEVERAL
        super().__init__(layer, members, -1 if several else axis_of(layer))
        self.several, self.tiles = several, not several
        self.maps = [(m.weight, m.bias, m.inputs, m.outputs, m.groups) for m in maps_of(layer)]

        self.prefixes = {m.weight: f"{m.weight.replace('.', '_')}_" if several else "" for m in self.affine_maps()}

    def affine_maps(self) -> list[AffineMap]:
        return [AffineMap(*described) for described in self.maps]

    def own_biases(self, name: str | None) -> nn.Parameter | None:
        """Return the members' biases `[M, O]` that replace the layer's bias `name`, if there are any."""
        return self._parameters.get(self._biases_name(name))

    def _biases_name(self, name: str | None) -> str:
        return f"{(name or '').replace('.', '_')}_own" if self.several else "biases"

    def repeat_bias(self, affine: AffineMap) -> None:
        """Replace a map's bias, if it has one, by one per member."""
        owner, _, own = (affine.bias or "").rpartition(".")
        holder = self.layer.get_submodule(owner)
        bias = getattr(holder, own, None)
        biases = None
        if isinstance(bias, Tensor):
            biases = nn.Parameter(bias.detach().repeat(self.members, 1), bias.requires_grad)
        self.register_parameter(self._biases_name(affine.bias), biases)
        if own in holder._parameters:
            holder.register_parameter(own, None)

    def shared_weight(self, affine: AffineMap) -> Tensor:
        """Return the weight of a map that all members share."""
        return self.layer.get_parameter(affine.weight) if self.several else weight_of(self.layer)

    def weight_of_member(self, index: int, affine: AffineMap, weight: Tensor) -> Tensor:
        """Compute one member's weight of a map from the shared weight."""
        raise NotImplementedError

    # -- all members ---------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.several:
            return self.run_all(*args, **kwargs) if args else self.run_all(kwargs.pop("input"), **kwargs)
        if self.member is not None:
            return functional_call(self.layer, self.tensors(self.member), args, kwargs)

        if self.vmapped and kind_of(self.layer) not in RECURRENT:
            members = self._at_once()
            each = [self.tensors(index) for index in range(self.members)]
            own = {name: members.own(torch.stack([tensors[name] for tensors in each])) for name in each[0]}
            return functional_call(self.layer, own, args, kwargs)

        def run(index: int, *args: Any, **kwargs: Any) -> Any:  # vmap does not support recurrent layers
            return functional_call(self.layer, self.tensors(index), args, kwargs)

        return self._separately(run, args, kwargs)

    def run_all(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run a layer of one map for all members, or for one in the view of a member."""
        raise NotImplementedError

    def run(self, x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run a layer of one map with this weight and the shared bias."""
        bias = getattr(self.layer, "bias", None)
        return run_with(self.layer, AffineMap(*self.maps[0]), x, weight, bias, *args, **kwargs)

    # -- one member ----------------------------------------------------------------------------------------

    def run_member(self, index: int, rows: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run a member's rows through its own layer of one map."""
        affine, biases = AffineMap(*self.maps[0]), self._parameters.get("biases")
        own = self.weight_of_member(index, affine, weight)
        bias = getattr(self.layer, "bias", None) if biases is None else biases[index]
        return run_with(self.layer, affine, rows, own, bias, *args, **kwargs)

    def tensors(self, index: int) -> dict[str, Tensor]:
        tensors = {}
        for affine in self.affine_maps():
            tensors[affine.weight] = self.weight_of_member(index, affine, self.shared_weight(affine))
            if affine.bias is not None and (biases := self.own_biases(affine.bias)) is not None:
                tensors[affine.bias] = biases[index]
        return tensors

    def fold(self, index: int) -> nn.Module:
        with evaluating(self.layer):
            tensors = self.tensors(index)

        def parameter(name: str) -> nn.Parameter:
            biases = self.own_biases(name)
            trained = (self.layer.get_parameter(name) if biases is None else biases).requires_grad
            return nn.Parameter(tensors[name].detach().clone(), trained)

        if not self.several:
            return plain_copy(self.layer, tensors["weight"], parameter("bias") if "bias" in tensors else None)
        plain = copied(self.layer)
        for name in tensors:
            owner, _, own = name.rpartition(".")
            plain.get_submodule(owner).register_parameter(own, parameter(name))
        return plain

    def _bias(self) -> Any:
        biases = None if self.several else self.own_biases("bias")
        return super()._bias() if biases is None else biases[0]

    def __getattr__(self, name: str) -> Any:
        """Return own tensors, the layer's settings, and placeholders for the layer's tensors."""
        registries = [self.__dict__.get(each, {}) for each in ("_parameters", "_buffers", "_modules")]
        for registry in registries:
            if name in registry:
                return registry[name]
        if "layer" in registries[-1] and name in self.layer._parameters:
            tensor = self.layer._parameters[name]
            return None if tensor is None else self._placeholder(name, tensor)
        return super().__getattr__(name)


def make_shared_members(
    kind: type[Net],
    start: Start,
    network: nn.Module,
    layers: Mapping[str, MemberLayer],
    members: int,
    rows: str,
    task: str | None,
) -> Net:
    """Return the multitude of a copy of a network with these member layers, by name."""
    for name, layer in layers.items():
        layer.place = name
    net = kind(replace(network, layers), members).like(start.given, task)
    net.rows = rows
    return net
