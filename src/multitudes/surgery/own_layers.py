"""Layers with separate weights for each member, in a network whose other weights the members share."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from multitudes.ensemble.member_layer import MemberLayer
from multitudes.networks.calls import evaluating
from multitudes.networks.copies import copied
from multitudes.networks.settings import FLAT_WEIGHTS
from multitudes.networks.views import view
from multitudes.surgery.affine import SEVERAL, AffineMap, kind_of, maps_of, plain_copy, weight_of
from multitudes.surgery.initialize import reinitialize
from multitudes.surgery.member_affine import AffineMemberLayer


class Own(AffineMemberLayer):
    """A layer of one map with one set of weights `[M, ...]` and biases `[M, O]` per member."""

    def __init__(self, layers: list[Any]) -> None:
        super().__init__(plain_copy(layers[0], weight_of(layers[0])), len(layers))
        first = next(iter(layers[0].parameters()))
        self.weights = nn.Parameter(_stacked([weight_of(layer) for layer in layers]), first.requires_grad)
        biases = [getattr(layer, "bias", None) for layer in layers]
        self.biases = nn.Parameter(_stacked(biases), biases[0].requires_grad) if biases[0] is not None else None
        for name in ("weight", "bias"):
            self.layer.register_parameter(name, None)

    @property
    def weight(self) -> Tensor:
        return self._placeholder("weight", self.weights[0])

    @property
    def batched(self) -> bool:  # type: ignore[override]
        return kind_of(self.layer) is nn.Linear

    def run_all(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not self.batched or self.member is not None or self._hooked:
            return self._each(x, lambda index, rows: self.run_member(index, rows, self.weights, *args, **kwargs))
        return self._all(self._product, x)

    def _product(self, rows: Tensor) -> Tensor:
        """Compute one batched product for all members, `[M, B, ..., I] -> [M, B, ..., O]`."""
        y = torch.bmm(rows.flatten(1, -2), self.weights.mT)
        y = y if self.biases is None else y + self.biases.unsqueeze(1)
        return y.view(*rows.shape[:-1], -1)

    def shared_weight(self, affine: AffineMap) -> Tensor:
        return self.weights

    def weight_of_member(self, index: int, affine: AffineMap, weight: Tensor) -> Tensor:
        return weight[index]

    def stack_of(self, name: str) -> Tensor:
        """Return one of the layer's tensors, by name, for all members, `[M, ...]`."""
        return self.get_parameter({"weight": "weights", "bias": "biases"}[name])

    def fold(self, index: int) -> nn.Module:
        plain = super().fold(index)
        plain.get_parameter("weight").requires_grad_(self.weights.requires_grad)
        return plain


class OwnBlock(MemberLayer):
    """A block of any layers with one set of parameters and buffers `[M, ...]` per member.

    It runs once per member with the member's tensors, so a batch norm in it has statistics for each member.
    """

    tiles = False
    batched = True  # no slower than one run per member

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__(copied(blocks[0]), len(blocks))
        self.places: dict[str, str] = {}  # name of a tensor in the block -> name of its stack here
        named: dict[int, str] = {}
        for path, first in self.layer.named_modules():
            modules = [block.get_submodule(path) for block in blocks]
            for registry in ("_parameters", "_buffers"):
                for name, tensor in getattr(first, registry).items():
                    if tensor is None:
                        continue
                    place = f"{path}.{name}" if path else name
                    if id(tensor) not in named:
                        named[id(tensor)] = own = self._free(place.replace(".", "_"))
                        self._stack(own, place, [getattr(each, registry)[name] for each in modules], first, name)
                    self.places[place] = named[id(tensor)]
        for place in self.places:
            path, _, name = place.rpartition(".")
            module = self.layer.get_submodule(path)
            (module._parameters if name in module._parameters else module._buffers)[name] = None

    def _free(self, name: str) -> str:
        while name in self._parameters or name in self._buffers or hasattr(type(self), name) or name in vars(self):
            name += "_"
        return name

    def _stack(self, own: str, place: str, tensors: list[Tensor], owner: nn.Module, name: str) -> None:
        if any(t.layout is not torch.strided or t.is_quantized or t.shape != tensors[0].shape for t in tensors):
            raise ValueError(
                f"layer {place!r} cannot be copied per member: it is not a dense tensor of one shape for all members"
            )
        if isinstance(tensors[0], nn.Parameter):
            self.register_parameter(own, nn.Parameter(_stacked(tensors), tensors[0].requires_grad))
        else:
            self.register_buffer(own, _stacked(tensors), name not in owner._non_persistent_buffers_set)

    def stack_of(self, name: str) -> Tensor:
        """Return one of the block's tensors, by name, for all members, `[M, ...]`."""
        return self._stacks()[self.places[name]]

    def _stacks(self) -> dict[str, Tensor]:
        tensors = [*self._parameters.items(), *self._buffers.items()]
        return {name: tensor for name, tensor in tensors if tensor is not None}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.member is not None:
            return self._run(self.member, args, kwargs)
        unbound = {own: tensor.unbind() for own, tensor in self._stacks().items()}
        return self._separately(lambda index, *own, **named: self._run(index, own, named, unbound), args, kwargs)

    def _run(self, index: int, args: Any, kwargs: Any, unbound: Mapping[str, Any] | None = None) -> Any:
        stacks: Mapping[str, Any] = self._stacks() if unbound is None else unbound
        tensors = {place: stacks[own][index] for place, own in self.places.items()}
        if torch.compiler.is_compiling():
            return functional_call(self.layer, tensors, args, kwargs, tie_weights=False)
        block, modules = _own_view(self.layer)
        for place, tensor in tensors.items():
            registry, name = _registry(modules, place)
            registry[name] = tensor
        given = {path: dict(vars(module)) for path, module in modules.items()}
        answer = block(*args, **kwargs)
        with torch.no_grad():
            for place, tensor in tensors.items():
                registry, name = _registry(modules, place)
                if registry[name] is not tensor:  # the block's code has assigned a buffer
                    self._stacks()[self.places[place]][index] = registry[name]
        for path, attributes in given.items():
            twin, module = vars(modules[path]), self.layer.get_submodule(path)
            changed = {key: value for key, value in twin.items() if value is not attributes.get(key)}
            module.__dict__.update({key: value for key, value in changed.items() if key not in FLAT_WEIGHTS})
        return answer

    def __getattr__(self, name: str) -> Any:
        """Return the block's settings, and placeholders for its stacked tensors."""
        places = self.__dict__.get("places", {})
        if name in places and "layer" in self.__dict__.get("_modules", {}):
            stacks = self._stacks()
            if places[name] in stacks and name not in stacks:
                return self._placeholder(name, stacks[places[name]][0])
        return super().__getattr__(name)

    def fold(self, index: int) -> nn.Module:
        plain = copied(self.layer)
        made: dict[str, Any] = {}
        for place, own in self.places.items():
            stack = self._stacks()[own]
            if own not in made:
                tensor = stack[index].detach().clone()
                made[own] = nn.Parameter(tensor, stack.requires_grad) if own in self._parameters else tensor
            path, _, name = place.rpartition(".")
            module = plain.get_submodule(path)
            (module._parameters if name in module._parameters else module._buffers)[name] = made[own]
        return plain


def _own_view(block: nn.Module) -> tuple[nn.Module, dict[str, nn.Module]]:
    """Return a view of a block with separate registries of parameters and buffers, and its modules by name."""
    names = ("_parameters", "_buffers")
    changes = {path: {name: dict(getattr(m, name)) for name in names} for path, m in block.named_modules()}
    own = view(block, changes)
    modules = dict(own.named_modules())
    for path, module in block.named_modules():  # share lists, so that the block keeps what code appends
        twin = modules[path].__dict__
        twin.update({key: held for key, held in vars(module).items() if type(held) is list and held == twin[key]})
    return own, modules


def _registry(modules: Mapping[str, nn.Module], place: str) -> tuple[dict[str, Any], str]:
    """Return the registry that holds a tensor of a block, and its key there."""
    path, _, name = place.rpartition(".")
    parameters, buffers = modules[path]._parameters, modules[path]._buffers
    return (parameters if name in parameters else buffers), name


def own_member_layers(network: nn.Module, names: Collection[str], members: int, drawn: bool) -> dict[str, MemberLayer]:
    """Return layers and blocks by name with one copy per member, reinitialized if `drawn`."""
    work = copied(network) if drawn else network
    copies: dict[str, list[nn.Module]] = {name: [] for name in names}
    for _ in range(members):
        if drawn:
            reinitialize(work, only=names)
        for name, own in copies.items():
            own.append(copied(work.get_submodule(name)))
    return {name: _own_copies(own) for name, own in copies.items()}


def _own_copies(copies: list[nn.Module]) -> Own | OwnBlock:
    """Combine the members' copies of a layer or block in one layer."""
    with evaluating(copies[0]):
        alone = kind_of(copies[0]) not in SEVERAL and len(maps_of(copies[0])) == 1
    return Own(copies) if alone else OwnBlock(copies)


def _stacked(tensors: list[Any]) -> Tensor:
    return torch.stack([tensor.detach() for tensor in tensors])
