"""Layers that differ between members of a network whose other weights are shared."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor
from torch.utils._pytree import tree_map, tree_map_only
from torch.utils.checkpoint import CheckpointFunction

from multitudes.networks.calls import InputError, evaluating, tensors_in
from multitudes.networks.stochastic import Draw, stochastic_layers
from multitudes.networks.trace import is_query
from multitudes.networks.views import RUNNING
from multitudes.networks.vmap import VmapLevel


class _Placeholder(Tensor):
    """A tensor without values, in place of one that differs between members."""

    reason: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("__get__", "type") or is_query(name):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        given = tensors_in((args, kwargs))
        raise InputError(next((t.reason for t in given if isinstance(t, _Placeholder)), "a tensor cannot be read"))


class MemberLayer(nn.Module):
    """A wrapper of a user's layer that computes something else for each member (see `SharedMembers`)."""

    wraps = "layer"
    """Name of the child that is the user's layer."""

    batched = False
    """True if one batched product runs all members, which is faster than M products while it fits the caches."""

    tiles = True
    """True if it takes the rows of all members as one batch, `[M*B, ...]`."""

    member: int | None = None
    """The member that runs, in the view of one member; else None."""

    in_view = False
    """True in a view of the network (see `views.py`)."""

    vmapped = False
    """True in a view that runs all members under vmap."""

    untiled = False
    """True in a view in which this layer tiles the rows: its input is `[B, ...]`, the same for all members."""

    def __init__(self, layer: nn.Module, members: int, axis: int = -1) -> None:
        """Wrap a layer whose channels are on `axis` of x, counted from the last."""
        super().__init__()
        self.layer = layer
        self.members = members
        self.axis = axis
        self.place = ""  # name in the network

    def __getattr__(self, name: str) -> Any:
        """Return the layer's settings (`stride`, `in_features`), but not its tensors."""
        special = name == "layer" or name.startswith("__")  # such as `__deepcopy__` of parametrized layers
        if not special and "layer" in self.__dict__.get("_modules", {}):
            setting = getattr(self.layer, name, None)
            if setting is not None and not isinstance(setting, Tensor):
                return setting
        return super().__getattr__(name)

    @property
    def weight(self) -> Tensor:
        """A placeholder with the weight's shape, dtype and device; computing with it is an error."""
        with evaluating(self.layer), torch.no_grad():  # in training, computing a weight may change buffers
            return self._placeholder("weight", self.layer.weight)

    @property
    def bias(self) -> Tensor | None:
        """A placeholder for the bias; None if the layer has none."""
        bias = self._bias()
        return self._placeholder("bias", bias) if isinstance(bias, Tensor) else bias

    def _bias(self) -> Any:
        return getattr(self.layer, "bias", None)

    def _placeholder(self, name: str, tensor: Any) -> Tensor:
        """Return a tensor of NaNs of the same shape, dtype and device that refuses to compute, except in graphs."""
        values = tensor.detach().new_full((), torch.nan).expand(tensor.shape)
        if torch.compiler.is_compiling():
            return values
        placeholder = values.as_subclass(_Placeholder)
        placeholder.reason = (
            f"the network computes with the {name} of {self._named()} instead of calling the layer, so all members "
            "would use the same values: exclude the layer by layers="
        )
        return placeholder

    def own_parameters(self) -> list[str]:
        """Return the names of the parameters that hold one tensor per member, `[M, ...]`."""
        return [name for name, parameter in self._parameters.items() if parameter is not None]

    def fold(self, index: int) -> nn.Module:
        """Return the plain layer of member `index`."""
        raise NotImplementedError

    def as_member(self, index: int) -> dict[str, Any]:
        """Return this layer's attributes in the view of one member."""
        return {"member": index, "in_view": True}

    def as_all(self) -> dict[str, Any]:
        """Return this layer's attributes in the view that runs all members under vmap."""
        return {"in_view": True, "vmapped": True}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            is_view, learns, lazy_vmap, late = RUNNING.get()
            if is_view and not self.in_view:
                raise InputError(
                    f"{self._named()} is called through an object that is not a module of the network, so the member "
                    "is unknown: exclude the layer by layers=, or make it a submodule of its caller"
                )
            if self.vmapped and lazy_vmap is None:
                raise InputError(
                    f"{self._named()} runs again outside of its network's forward, where members cannot be batched"
                )
            if late is not None:
                if self.untiled == bool(late):
                    raise InputError(f"{self._named()} runs in another order than before")
                late += [self] if self.untiled else []
            if learns and not torch.is_grad_enabled() and (given := checkpointed()) is not None:
                if lazy_vmap is not None:
                    raise InputError(f"{self._named()} runs inside torch.utils.checkpoint with use_reentrant=True")
                if not any(isinstance(value, Tensor) and value.requires_grad for value in given):
                    raise InputError(
                        f"{self._named()} would not learn: it runs in torch.utils.checkpoint with use_reentrant=True, "
                        "and no input of that requires a gradient; pass use_reentrant=False, or x.requires_grad_()"
                    )
        return super().__call__(*args, **kwargs)

    def _named(self) -> str:
        kind = type(self.layer).__name__
        return f"layer {self.place!r} ({kind})" if self.place else f"a {kind}"

    def _changes_weight(self, x: Tensor, weight: Tensor) -> bool:
        """Return whether to change the weight per member instead of x: on a CPU, if the weight is smaller.

        On a GPU one large product is faster than M products, and takes more memory (`benchmarks/README.md`). A layer
        with hooks runs once per member.
        """
        if self.layer._forward_hooks or self.layer._forward_pre_hooks:  # inline: this is a hot path
            return True
        if x.dim() == 2:  # one product of all rows is faster than one per member
            return False
        rows = 1 if self.vmapped or self.member is not None else self.members
        return not x.is_cuda and weight.numel() * rows < x.numel()

    @property
    def _hooked(self) -> bool:
        return bool(self.layer._forward_hooks or self.layer._forward_pre_hooks)

    # -- all members -------------------------------------------------------------------------------------

    def _all(self, function: Callable[..., Tensor], *tensors: Tensor, made: bool = False) -> Tensor:
        """Apply a function of all members' rows, `[M, B, ...] -> [M, B, ...]`, to tensors `[M*B, ...]` or `[B, ...]`.

        Tensors that this layer has `made` are always tiled.
        """
        if self.vmapped:
            members = self._at_once()
            whole = [members.whole(x) for x in tensors]
            with members.outside():
                return members.own(function(*whole))
        rows = []
        for x in tensors:
            tiled = made or not self.untiled
            if tiled and (x.dim() <= -self.axis or x.shape[0] % self.members):
                raise ValueError(
                    f"a {type(self.layer).__name__} of {self.members} members got an input of shape {list(x.shape)}, "
                    "whose first axis does not hold the rows of one member after the other"
                )
            rows.append(x.unflatten(0, (self.members, -1)) if tiled else x.expand(self.members, *x.shape))
        return function(*rows).flatten(0, 1)

    def _at_once(self) -> VmapLevel:
        """Return the members that run under vmap."""
        lazy_vmap = RUNNING.get().lazy_vmap
        assert lazy_vmap is not None
        return lazy_vmap.enter()

    def _each(self, x: Tensor, own: Callable[[int, Tensor], Tensor]) -> Tensor:
        """Apply `own`, a function of a member's number and rows, for each member."""
        if self.member is not None:
            return own(self.member, x)
        return self._all(lambda rows: torch.stack([own(index, each) for index, each in enumerate(rows)]), x)

    def _by_member(self, function: Callable[..., Tensor], x: Tensor, *values: Tensor, made: bool = False) -> Tensor:
        """Apply a function to x `[..., C, ...]` and the `values [M, C]` of each row's member, in x's dtype."""
        shape = [1] * x.dim()
        shape[self.axis] = -1
        if self.member is not None:
            return function(x, *(each[self.member].to(x.dtype).view(shape) for each in values))
        own = [each.to(x.dtype).view(self.members, *shape) for each in values]
        return self._all(lambda rows: function(rows, *own), x, made=made)

    def _separately(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a function of a member's number and arguments once per member, for any arguments and results."""
        if not self.vmapped:
            raise ValueError(f"{self._named()} cannot run the rows of all members as one batch")

        members = self._at_once()

        def part(index: int) -> Any:
            return tree_map_only(
                Tensor, lambda t: members.whole(t)[index] if is_batchedtensor(t) else t, (args, kwargs)
            )

        parts = [part(index) for index in range(self.members)]
        draw = next((layer.draw for layer in stochastic_layers(self) if isinstance(layer.draw, Draw)), Draw())
        numbers = members.whole(draw.index)  # the random source of each member
        answers = []
        with members.outside():
            for index, (own, named) in enumerate(parts):
                with draw.at(numbers[index]):
                    answers.append(run(index, *own, **named))
            return tree_map(partial(_joined, members), *answers)


def _joined(members: VmapLevel, *parts: Any) -> Any:
    return members.own(torch.stack(parts)) if isinstance(parts[0], Tensor) else parts[0]


def checkpointed() -> tuple[Any, ...] | None:
    """Return the arguments of the outermost running reentrant checkpoint; None outside.

    If no argument requires a gradient, nothing inside gets one, and torch only warns.
    """
    frame: Any = sys._getframe()
    given = None
    while frame is not None:
        given = frame.f_locals["args"] if frame.f_code is CheckpointFunction.forward.__code__ else given
        frame = frame.f_back
    return given


def member_layers(network: nn.Module) -> dict[str, MemberLayer]:
    """Return the layers of a network that differ between members, by name."""
    return {name: module for name, module in network.named_modules() if isinstance(module, MemberLayer)}
