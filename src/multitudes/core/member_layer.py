"""Layers that tell the members of a network apart whose other weights they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.core.locking import evaluating
from multitudes.core.tiling import Run
from multitudes.core.unreadable import unreadable

__all__ = ["MemberLayer", "rows_missing"]


class MemberLayer(nn.Module):
    """A user's layer that treats the rows of each member in its own way (see `SharedMembers`)."""

    wraps = "layer"
    """The child that is the user's own layer, whose place it takes."""

    widens = False
    """Whether it can give all members' channels side by side, `[B, ..., M*O]`, of rows that are not tiled (`wide`)."""

    wide = False

    batched = False
    """Whether all members run by one batched product, which is faster than one for each while it fits the caches."""

    many_inputs = False
    """Whether it takes whatever the layer takes, so that a run must show which arguments hold rows (`note_rows`)."""

    def __init__(self, layer: nn.Module, members: int, axis: int = -1) -> None:
        """`axis` is that of channels in x, counted from the last."""
        super().__init__()
        self.layer = layer
        self.members = members
        self.member: int | None = None
        self.batch: int | None = None  # where it may be the one to tile: the rows of one member
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
        kind = type(self.layer).__name__
        place = f"layer {self.place!r} ({kind})" if self.place else f"a {kind}"
        return unreadable(
            tensor,
            f"the network computes with the {name} of {place} instead of calling the layer, so that its members could "
            "not be told apart: leave it out by layers=",
        )

    def own_parameters(self) -> list[str]:
        """The names of the parameters that hold one tensor for each member, `[M, ...]`."""
        return [name for name, parameter in self._parameters.items() if parameter is not None]

    def note_rows(self, seen: Run, more: Run) -> None:
        """Learn from two runs of the network which arguments hold rows."""

    def fold(self, index: int) -> nn.Module:
        """The plain layer that member `index` sees."""
        raise NotImplementedError

    @property
    def folds(self) -> bool:
        """Whether `folded` can tell all members' tensors."""
        return False

    def folded(self) -> dict[str, Tensor]:
        """The tensors of all members' plain layers, `[M, ...]`, by their names in the layer; others are shared."""
        raise NotImplementedError

    def _changes_weight(self, x: Tensor, weight: Tensor) -> bool:
        """Whether it is faster to change the weight for each member than to change x: on a CPU, if it is smaller.

        On a GPU one large product is faster than one for each member, and takes more memory (`benchmarks/README.md`).
        Where the layer has hooks, they see what each member's own layer sees.
        """
        if self._hooked:
            return True
        if x.dim() == 2:  # one product of all rows is faster than one for each member, however many rows there are
            return False
        return not x.is_cuda and weight.numel() * (self.members if self.member is None else 1) < x.numel()

    @property
    def _hooked(self) -> bool:
        return bool(self.layer._forward_hooks or self.layer._forward_pre_hooks)

    def _each(self, x: Tensor, own: Callable[[int, Tensor], Tensor]) -> Tensor:
        """What each member's `own` layer, a function of its number, makes of its rows."""
        if self.member is not None:
            return own(self.member, x)
        return torch.cat([own(index, rows) for index, rows in enumerate(self._rows(x))])

    def _by_member(self, function: Callable[..., Tensor], x: Tensor, *values: Tensor) -> Tensor:
        """`function` of the rows of x `[M*B, C, ...]` and their member's own of each `values [M, C]`, in x's dtype."""
        shape = [1] * x.dim()
        shape[self.axis] = -1
        if self.member is not None:
            return function(x, *(each[self.member].to(x.dtype).view(shape) for each in values))
        return function(self._rows(x), *(each.to(x.dtype).view(self.members, *shape) for each in values)).flatten(0, 1)

    def _rows(self, x: Tensor) -> Tensor:
        """x `[M*B, ...]` as `[M, B, ...]`, and rows `[B, ...]` of all members alike, where it may be the one to tile.

        An error where its first axis cannot be that of the members' rows.
        """
        if self.batch is not None and x.dim() > -self.axis and len(x) == self.batch:
            return x.expand(self.members, *x.shape)
        if x.dim() <= -self.axis or x.shape[0] % self.members:
            raise ValueError(rows_missing(self.layer, self.members, x))
        return x.unflatten(0, (self.members, -1))


def rows_missing(layer: nn.Module, members: int, x: Tensor) -> str:
    """What is said where an input cannot be the tiled batch."""
    return (
        f"a {type(layer).__name__} that tells {members} members apart got an input of shape {list(x.shape)}, whose "
        "first axis does not hold the rows of each member one after the other"
    )
