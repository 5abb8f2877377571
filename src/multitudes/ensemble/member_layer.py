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

from multitudes.ensemble.unreadable import unreadable
from multitudes.networks.calls import InputError, evaluating
from multitudes.networks.stochastic import Draw, stochastic_layers
from multitudes.networks.views import RUNNING
from multitudes.networks.vmap import AtOnce


class MemberLayer(nn.Module):
    """A user's layer that treats the rows of each member in its own way (see `SharedMembers`)."""

    wraps = "layer"
    """The child that is the user's own layer, which this layer replaces."""

    batched = False
    """True where all members run by one batched product, which is faster than M products while it fits the caches."""

    tiles = True
    """True where it takes the rows of all members as one batch, `[M*B, ...]`."""

    member: int | None = None
    """The member that runs, in a view that is one member; None for all members."""

    in_view = False
    """True for a layer of a view of the network (see `views.py`)."""

    vmapped = False
    """True in a view in which all members run under vmap."""

    untiled = False
    """True in a view whose rows are tiled by this layer: its input is `[B, ...]`, the same for all members."""

    def __init__(self, layer: nn.Module, members: int, axis: int = -1) -> None:
        """Wrap a layer whose channels are on `axis` of x, counted from the last."""
        super().__init__()
        self.layer = layer
        self.members = members
        self.axis = axis
        self.place = ""  # its name in the network

    def __getattr__(self, name: str) -> Any:
        """Return the layer's plain settings (`stride`, `in_features`), which networks may read; never its tensors."""
        special = name == "layer" or name.startswith("__")  # such as `__deepcopy__` of parametrized layers
        if not special and "layer" in self.__dict__.get("_modules", {}):
            setting = getattr(self.layer, name, None)
            if setting is not None and not isinstance(setting, Tensor):
                return setting
        return super().__getattr__(name)

    @property
    def weight(self) -> Tensor:
        """The weight's shape, dtype and device, for networks that read them; computing with it is an error."""
        with evaluating(self.layer), torch.no_grad():  # in training, what computes a weight may move its buffers
            return self._asked("weight", self.layer.weight)

    @property
    def bias(self) -> Tensor | None:
        """The same for the bias; None if the layer has none."""
        bias = self._bias()
        return self._asked("bias", bias) if isinstance(bias, Tensor) else bias

    def _bias(self) -> Any:
        return getattr(self.layer, "bias", None)

    def _asked(self, name: str, tensor: Any) -> Tensor:
        return unreadable(
            tensor,
            f"the network computes with the {name} of {self._named()} instead of calling the layer, so that its "
            "members could not be told apart: leave it out by layers=",
        )

    def own_parameters(self) -> list[str]:
        """The names of the parameters that hold one tensor for each member, `[M, ...]`."""
        return [name for name, parameter in self._parameters.items() if parameter is not None]

    def fold(self, index: int) -> nn.Module:
        """Return the plain layer of member `index`."""
        raise NotImplementedError

    def as_member(self, index: int) -> dict[str, Any]:
        """Return the attributes of this layer in the view that is one member."""
        return {"member": index, "in_view": True}

    def as_all(self) -> dict[str, Any]:
        """Return the attributes of this layer in the view in which all members run under vmap."""
        return {"in_view": True, "vmapped": True}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            is_view, learns, vmap, late = RUNNING.get()
            if is_view and not self.in_view:
                raise InputError(
                    f"{self._named()} is called by way of an object that is no module of the network, where its "
                    "members cannot be told apart: leave it out by layers=, or make it a submodule of what calls it"
                )
            if self.vmapped and vmap is None:
                raise InputError(
                    f"{self._named()} runs again outside of its network's forward, which members cannot share"
                )
            if late is not None:
                if self.untiled == bool(late):
                    raise InputError(f"{self._named()} runs in another order than before")
                late += [self] if self.untiled else []
            if learns and not torch.is_grad_enabled() and (given := checkpointed()) is not None:
                if vmap is not None:
                    raise InputError(f"{self._named()} runs inside torch.utils.checkpoint with use_reentrant=True")
                if not any(isinstance(value, Tensor) and value.requires_grad for value in given):
                    raise InputError(
                        f"{self._named()} would not learn: no input of the part that torch.utils.checkpoint runs with "
                        "use_reentrant=True needs a gradient; pass use_reentrant=False, or x.requires_grad_()"
                    )
        return super().__call__(*args, **kwargs)

    def _named(self) -> str:
        kind = type(self.layer).__name__
        return f"layer {self.place!r} ({kind})" if self.place else f"a {kind}"

    def _changes_weight(self, x: Tensor, weight: Tensor) -> bool:
        """Return whether it is faster to change the weight for each member than x: on a CPU, if it is smaller.

        On a GPU one large product is faster than one for each member, and takes more memory (`benchmarks/README.md`).
        Where the layer has hooks, they see what each member's own layer sees.
        """
        if self.layer._forward_hooks or self.layer._forward_pre_hooks:
            return True
        if x.dim() == 2:  # one product of all rows is faster than one for each member, however many rows there are
            return False
        rows = 1 if self.vmapped or self.member is not None else self.members
        return not x.is_cuda and weight.numel() * rows < x.numel()

    @property
    def _hooked(self) -> bool:
        return bool(self.layer._forward_hooks or self.layer._forward_pre_hooks)

    # -- all members -------------------------------------------------------------------------------------

    def _all(self, function: Callable[..., Tensor], *tensors: Tensor, made: bool = False) -> Tensor:
        """Apply a function of all members' rows, `[M, B, ...] -> [M, B, ...]`, to this layer's tensors.

        They are `[M*B, ...]`, or untiled `[B, ...]`. Tensors that this layer has `made` are always tiled.
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
                    f"a {type(self.layer).__name__} that tells {self.members} members apart got an input of shape "
                    f"{list(x.shape)}, whose first axis does not hold the rows of each member one after the other"
                )
            rows.append(x.unflatten(0, (self.members, -1)) if tiled else x.expand(self.members, *x.shape))
        return function(*rows).flatten(0, 1)

    def _at_once(self) -> AtOnce:
        """Return the members that run under vmap."""
        vmap = RUNNING.get().vmap
        assert vmap is not None
        return vmap.enter()

    def _each(self, x: Tensor, own: Callable[[int, Tensor], Tensor]) -> Tensor:
        """Apply each member's `own` layer, a function of its number, to its rows."""
        if self.member is not None:
            return own(self.member, x)
        return self._all(lambda rows: torch.stack([own(index, each) for index, each in enumerate(rows)]), x)

    def _by_member(self, function: Callable[..., Tensor], x: Tensor, *values: Tensor, made: bool = False) -> Tensor:
        """Apply a function to the rows of x `[..., C, ...]` and their member's own of `values [M, C]`, in x's dtype."""
        shape = [1] * x.dim()
        shape[self.axis] = -1
        if self.member is not None:
            return function(x, *(each[self.member].to(x.dtype).view(shape) for each in values))
        own = [each.to(x.dtype).view(self.members, *shape) for each in values]
        return self._all(lambda rows: function(rows, *own), x, made=made)

    def _separately(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a function of a member's number and its own arguments for each member, whatever it takes and gives."""
        if not self.vmapped:
            raise ValueError(f"{self._named()} cannot tell its members' rows apart in one batch")

        members = self._at_once()

        def part(index: int) -> Any:
            return tree_map_only(
                Tensor, lambda t: members.whole(t)[index] if is_batchedtensor(t) else t, (args, kwargs)
            )

        parts = [part(index) for index in range(self.members)]
        draw = next((layer.draw for layer in stochastic_layers(self) if isinstance(layer.draw, Draw)), Draw())
        numbers = members.whole(draw.index)  # of the random source of each member
        answers = []
        with members.outside():
            for index, (own, named) in enumerate(parts):
                with draw.at(numbers[index]):
                    answers.append(run(index, *own, **named))
            return tree_map(partial(_joined, members), *answers)


def _joined(members: AtOnce, *parts: Any) -> Any:
    return members.own(torch.stack(parts)) if isinstance(parts[0], Tensor) else parts[0]


def checkpointed() -> tuple[Any, ...] | None:
    """Return the arguments of torch's outermost reentrant checkpoint that is running; None outside of all.

    Where no argument needs a gradient, nothing inside gets one, and torch shows no more than a warning.
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
