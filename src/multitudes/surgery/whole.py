"""Layers of several affine maps, or of several inputs, that tell members apart as a whole: attention, recurrence.

Such a layer's code reads its weights as tensors, so no map in it can be replaced alone. It runs once for each member,
with the member's own tensors in their places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from multitudes.core.copying import copied
from multitudes.core.member_layer import MemberLayer, rows_missing
from multitudes.surgery.affine import RECURRENT, AffineMap, kind_of, maps_of

_ARGUMENTS = {
    nn.MultiheadAttention: (
        "query", "key", "value", "key_padding_mask", "need_weights", "attn_mask", "average_attn_weights", "is_causal",
    ),
    nn.Bilinear: ("input1", "input2"),
} | {kind: ("input", "hx") for kind in RECURRENT}  # fmt: skip


class WholeMemberLayer(MemberLayer):
    """A layer of several maps; a subclass says which tensors each member has in the place of the layer's own."""

    tiles = False

    def __init__(self, layer: nn.Module, members: int) -> None:
        super().__init__(layer, members)
        self.maps = [(m.weight, m.bias, m.inputs, m.outputs, m.groups) for m in maps_of(layer)]

    def affine_maps(self) -> list[AffineMap]:
        return [AffineMap(*described) for described in self.maps]

    def tensors(self, index: int) -> dict[str, Tensor]:
        """Member `index`'s own tensors, by their names in the layer."""
        raise NotImplementedError

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.member is not None:
            return functional_call(self.layer, self.tensors(self.member), args, kwargs)
        given = dict(zip(_ARGUMENTS[_kind(self.layer)], args, strict=False)) | kwargs
        answers = [
            functional_call(self.layer, self.tensors(index), (), own)
            for index, own in enumerate(_split(self.layer, given, self.members))
        ]
        return _joined(answers, _output_axes(self.layer))

    def trained(self, name: str) -> bool:
        """Return whether the tensor of this name is trained in a member alone."""
        return self.layer.get_parameter(name).requires_grad

    def fold(self, index: int) -> nn.Module:
        plain = copied(self.layer)
        for name, tensor in self.tensors(index).items():
            owner, _, own = name.rpartition(".")
            parameter = nn.Parameter(tensor.detach().clone(), self.trained(name))
            plain.get_submodule(owner).register_parameter(own, parameter)
        return plain

    def __getattr__(self, name: str) -> Any:
        """The layer's settings; of its tensors the shapes, for no member has their values."""
        if name != "layer" and "layer" in self.__dict__.get("_modules", {}) and name in self.layer._parameters:
            tensor = self.layer._parameters[name]
            return None if tensor is None else self._asked(name, tensor)
        return super().__getattr__(name)


def _kind(layer: nn.Module) -> type[nn.Module]:
    kind = kind_of(layer)
    assert kind is not None
    return kind


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
