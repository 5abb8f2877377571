"""Layers of affine maps that differ between members, and the conversion that puts member layers into a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from multitudes.core.calling import evaluating
from multitudes.core.copying import copied
from multitudes.core.member_layer import MemberLayer, rows_missing
from multitudes.core.shared import SharedMembers
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
from multitudes.surgery.layers import replace
from multitudes.surgery.start import Start

__all__ = ["AffineMemberLayer", "joined"]

Net = TypeVar("Net", bound=SharedMembers)

_ARGUMENTS = {
    nn.MultiheadAttention: (
        "query", "key", "value", "key_padding_mask", "need_weights", "attn_mask", "average_attn_weights", "is_causal",
    ),
    nn.Bilinear: ("input1", "input2"),
} | {kind: ("input", "hx") for kind in RECURRENT}  # fmt: skip


class AffineMemberLayer(MemberLayer):
    """A layer of affine maps that differs between members.

    A subclass says what each member's weight of a map is (`weight_of_member`). A layer of one map takes the tiled batch
    `[M*B, I, ...]` to `[M*B, O, ...]`, as the subclass runs it (`run_all`). One of several maps or several inputs
    (attention, recurrence) reads its weights as tensors, so that no map in it can be replaced alone: it runs once for
    each member, with the member's own tensors in their places. What belongs to a map is a tensor `[M, ...]`, whose name
    begins with the map's prefix: `r` of the one map there is, or `out_proj_weight_r`.
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
        """Return all members' biases in the place of the layer's of this name, if they have some of their own."""
        return self._parameters.get(self._biases_name(name))

    def _biases_name(self, name: str | None) -> str:
        return f"{(name or '').replace('.', '_')}_own" if self.several else "biases"

    def repeat_bias(self, affine: AffineMap) -> None:
        """Give each member a bias of its own in the place of a map's, if it has one."""
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
        """Return the weight of a map that all members' own are made of."""
        return self.layer.get_parameter(affine.weight) if self.several else weight_of(self.layer)

    def weight_of_member(self, index: int, affine: AffineMap, weight: Tensor) -> Tensor:
        """Return member `index`'s weight of a map, made of the layer's."""
        raise NotImplementedError

    # -- all members ---------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.several:
            return self.run_all(*args, **kwargs)
        if self.member is not None:
            return functional_call(self.layer, self.tensors(self.member), args, kwargs)
        kind = kind_of(self.layer)
        assert kind is not None
        given = dict(zip(_ARGUMENTS[kind], args, strict=False)) | kwargs
        parts = _split(self.layer, given, self.members)
        answers = [functional_call(self.layer, self.tensors(index), (), own) for index, own in enumerate(parts)]
        return _joined(answers, _output_axes(self.layer))

    def run_all(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run a layer of one map for all members, or for the one that this is in a view."""
        raise NotImplementedError

    def run(self, x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run a layer of one map with this weight and the shared bias, if there is one."""
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
        """Its own tensors, the layer's settings, and of the layer's tensors the shapes: no member has their values."""
        registries = [self.__dict__.get(each, {}) for each in ("_parameters", "_buffers", "_modules")]
        for registry in registries:
            if name in registry:
                return registry[name]
        if "layer" in registries[-1] and name in self.layer._parameters:
            tensor = self.layer._parameters[name]
            return None if tensor is None else self._asked(name, tensor)
        return super().__getattr__(name)


def joined(
    kind: type[Net],
    start: Start,
    network: nn.Module,
    layers: Mapping[str, MemberLayer],
    members: int,
    rows: str,
    task: str | None,
) -> Net:
    """Return the members of a network in which these layers, by name, differ between them."""
    for name, layer in layers.items():
        layer.place = name
    net = kind(replace(network, layers), members).like(start.given, task)
    net.rows = rows
    return net


# -- the rows of layers of several maps -------------------------------------------------------------------


def _input_axes(layer: Any, given: Mapping[str, Any]) -> dict[str, int]:
    """The axis of the batch in each argument that has one."""
    kind = kind_of(layer)
    if kind is nn.Bilinear:
        return {"input1": 0, "input2": 0}
    batch = 0 if layer.batch_first else 1
    if kind in RECURRENT:
        return {"input": batch, "hx": 1}
    mask = given.get("attn_mask")
    own = {"attn_mask": 0} if isinstance(mask, Tensor) and mask.dim() == 3 else {}
    return {"query": batch, "key": batch, "value": batch, "key_padding_mask": 0} | own


def _output_axes(layer: Any) -> Sequence[int]:
    if kind_of(layer) is nn.Bilinear:
        return (0,)
    return (0 if layer.batch_first else 1), (1 if kind_of(layer) in RECURRENT else 0)


def _split(layer: Any, given: Mapping[str, Any], members: int) -> list[dict[str, Any]]:
    """Each member's arguments, of those that hold the rows of all members one after the other."""
    axes = _input_axes(layer, given)
    dims = {"input1": 2, "input2": 2}
    parts: list[dict[str, Any]] = [dict(given) for _ in range(members)]
    for name, axis in axes.items():
        if given.get(name) is None:
            continue
        rows = _parts(given[name], axis, members, dims.get(name, 2 if name == "key_padding_mask" else 3), layer)
        for own, part in zip(parts, rows, strict=True):
            own[name] = part
    return parts


def _parts(value: Any, axis: int, members: int, dims: int, layer: nn.Module) -> list[Any]:
    if type(value) is tuple:  # an LSTM's two states
        return list(zip(*(_parts(each, axis, members, dims, layer) for each in value), strict=True))
    if not isinstance(value, Tensor):
        raise ValueError(f"a {type(layer).__name__} cannot tell the members' rows apart in a {type(value).__name__}")
    if value.dim() < dims or value.shape[axis] % members:
        raise ValueError(rows_missing(layer, members, value))
    return list(value.chunk(members, axis))


def _joined(answers: Sequence[Any], axes: Sequence[int]) -> Any:
    first = answers[0]
    if isinstance(first, Tensor):
        return torch.cat(list(answers), axes[0])
    if first is None:
        return None
    each = axes if len(axes) == len(first) and len(axes) > 1 else [axes[0]] * len(first)
    return tuple(_joined(parts, (axis,)) for parts, axis in zip(zip(*answers, strict=True), each, strict=True))
