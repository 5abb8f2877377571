"""Layers that tell the members of a network apart whose other weights they share."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from multitudes.core.calling import InputError, evaluating
from multitudes.core.tiling import Run
from multitudes.core.unreadable import unreadable
from multitudes.core.views import RUNNING

__all__ = ["MemberLayer", "member_layers", "rows_missing"]


class MemberLayer(nn.Module):
    """A user's layer that treats the rows of each member in its own way (see `SharedMembers`)."""

    wraps = "layer"
    """The child that is the user's own layer, whose place it takes."""

    batched = False
    """True where all members run by one batched product, which is faster than M products while it fits the caches."""

    many_inputs = False
    """True where it takes whatever the layer takes, so that a run must show which arguments hold rows (`note_rows`)."""

    tiles = True
    """True where it takes rows `[B, ...]` that are not tiled, if `untiled` is set."""

    member: int | None = None
    """The member that it is, in a view that is one member; None where it takes the rows of all."""

    untiled = False
    """True where its input is `[B, ...]`, the same rows for all members, and not `[M*B, ...]`."""

    in_view = False
    """True for a layer of a view of the network (see `views.py`)."""

    def __init__(self, layer: nn.Module, members: int, axis: int = -1) -> None:
        """`axis` is that of channels in x, counted from the last."""
        super().__init__()
        self.layer = layer
        self.members = members
        self.axis = axis
        self.place = ""  # its name in the network

    def __getattr__(self, name: str) -> Any:
        """The layer's plain settings (`stride`, `in_features`), which networks may ask for; never its tensors."""
        special = name == "layer" or name.startswith("__")  # as `__deepcopy__` of parametrised layers
        if not special and "layer" in self.__dict__.get("_modules", {}):
            setting = getattr(self.layer, name, None)
            if setting is not None and not isinstance(setting, Tensor):
                return setting
        return super().__getattr__(name)

    @property
    def weight(self) -> Tensor:
        """The weight's shape, dtype and device, for networks that ask; to compute with it is an error."""
        with evaluating(self.layer), torch.no_grad():  # in training, what computes a weight may move its buffers
            return self._asked("weight", self.layer.weight)

    @property
    def bias(self) -> Tensor | None:
        """As `weight`; None where the layer has none."""
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

    def note_rows(self, seen: Run, more: Run) -> None:
        """Learn from two runs of the network which arguments hold rows."""

    def fold(self, index: int) -> nn.Module:
        """The plain layer that member `index` sees."""
        raise NotImplementedError

    def as_member(self, index: int) -> dict[str, Any]:
        """Return the attributes of this layer in the view that is one member."""
        return {"member": index, "in_view": True}

    def as_all(self) -> dict[str, Any]:
        """Return the attributes of this layer in a view in which members run side by side."""
        return {"in_view": True}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            in_view, learns = RUNNING.get()
            if in_view and not self.in_view:
                raise InputError(
                    f"{self._named()} is called by way of an object that is no module of the network, where its "
                    "members cannot be told apart: leave it out by layers=, or make it a submodule of what calls it"
                )
            if learns and not torch.is_grad_enabled() and checkpointed_without_gradient():
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
        return not x.is_cuda and weight.numel() * (self.members if self.member is None else 1) < x.numel()

    @property
    def _hooked(self) -> bool:
        return bool(self.layer._forward_hooks or self.layer._forward_pre_hooks)

    def _each(self, x: Tensor, own: Callable[[int, Tensor], Tensor]) -> Tensor:
        """Apply each member's `own` layer, a function of its number, to its rows."""
        if self.member is not None:
            return own(self.member, x)
        return torch.cat([own(index, rows) for index, rows in enumerate(self._rows(x))])

    def _by_member(
        self, function: Callable[..., Tensor], x: Tensor, *values: Tensor, untiled: bool | None = None
    ) -> Tensor:
        """`function` of the rows of x `[M*B, C, ...]` and their member's own of each `values [M, C]`, in x's dtype.

        `untiled` is that of the layer's input where it is not given.
        """
        shape = [1] * x.dim()
        shape[self.axis] = -1
        if self.member is not None:
            return function(x, *(each[self.member].to(x.dtype).view(shape) for each in values))
        return function(
            self._rows(x, untiled), *(each.to(x.dtype).view(self.members, *shape) for each in values)
        ).flatten(0, 1)

    def _rows(self, x: Tensor, untiled: bool | None = None) -> Tensor:
        """Return x `[M*B, ...]`, or rows `[B, ...]` that are not tiled, as `[M, B, ...]`."""
        if self.untiled if untiled is None else untiled:
            return x.expand(self.members, *x.shape)
        if x.dim() <= -self.axis or x.shape[0] % self.members:
            raise ValueError(rows_missing(self.layer, self.members, x))
        return x.unflatten(0, (self.members, -1))


def checkpointed_without_gradient() -> bool:
    """Return whether this runs inside torch's reentrant checkpointing of inputs that need no gradient.

    Then nothing inside gets a gradient, in a network of one member too, and torch shows no more than a warning.
    """
    function = torch.utils.checkpoint.CheckpointFunction.forward.__code__
    frame, given = sys._getframe(), None
    while frame is not None:
        given = frame.f_locals["args"] if frame.f_code is function else given  # of the outermost
        frame = frame.f_back  # type: ignore[assignment]
    return given is not None and not any(isinstance(value, Tensor) and value.requires_grad for value in given)


def member_layers(network: nn.Module) -> dict[str, MemberLayer]:
    """Return the layers of a network that differ between members, by name."""
    return {name: module for name, module in network.named_modules() if isinstance(module, MemberLayer)}


def rows_missing(layer: nn.Module, members: int, x: Tensor) -> str:
    """Return the error message for an input that cannot be the tiled batch."""
    return (
        f"a {type(layer).__name__} that tells {members} members apart got an input of shape {list(x.shape)}, whose "
        "first axis does not hold the rows of each member one after the other"
    )
