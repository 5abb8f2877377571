"""What a step of a packed network works on: a shared tensor, or one value for each member."""

from __future__ import annotations

from torch import Tensor

from multitudes.core.calling import InputError


class CannotPack(InputError):
    """Why the packed runner cannot run a network."""


class Many:
    """One value for each of `members` members."""

    def __init__(self, tensor: Tensor, members: int) -> None:
        self.tensor = tensor
        self.members = members

    def stacked(self) -> Tensor:
        """`[M, B, ...]`"""
        raise NotImplementedError

    def packed(self) -> Tensor:
        """`[B, M*C, ...]`"""
        raise NotImplementedError

    def rank(self) -> int:
        """The number of dimensions that a member sees."""
        raise NotImplementedError

    def like(self, tensor: Tensor) -> Many:
        return type(self)(tensor, self.members)


class Packed(Many):
    """`[B, M*C, ...]`: the members' channels side by side."""

    def stacked(self) -> Tensor:
        return self.tensor.unflatten(1, (self.members, -1)).movedim(1, 0)

    def packed(self) -> Tensor:
        return self.tensor

    def rank(self) -> int:
        return self.tensor.dim()


class Stacked(Many):
    """`[M, B, ...]`: one member after the other."""

    def stacked(self) -> Tensor:
        return self.tensor

    def packed(self) -> Tensor:
        if self.tensor.dim() < 3:
            raise CannotPack(f"a value of shape {list(self.tensor.shape[1:])} has no channels")
        return self.tensor.movedim(0, 1).flatten(1, 2)

    def rank(self) -> int:
        return self.tensor.dim() - 1


Value = Many | Tensor


def as_packed(value: Value, members: int) -> Tensor:
    """`[B, M*C, ...]`; a shared value is repeated."""
    if isinstance(value, Many):
        return value.packed()
    return value.repeat(1, members, *[1] * (value.dim() - 2))


def as_stacked(value: Value, members: int) -> Tensor:
    """`[M, B, ...]`; a shared value is expanded."""
    return value.stacked() if isinstance(value, Many) else value.expand(members, *value.shape)


def rank_of(value: Value) -> int:
    """The number of dimensions that a member sees."""
    return value.rank() if isinstance(value, Many) else value.dim()
