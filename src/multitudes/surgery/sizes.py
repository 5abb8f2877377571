"""Whole numbers that a network holds and passes to torch as sizes: which axes they are, and what is kept of these."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

__all__ = ["Size", "changed", "followed_sizes", "note_sizes"]

Owner = tuple[str, ...]
"""A module's name, and the names of attributes that lead from it to a configuration."""


class Size(int):
    """A number that a network holds; it knows what holds it, and how many entries are kept of axes of that size.

    Its hash is its own, so that no cache, as einops has one, answers with a number from another run.
    """

    owner: Owner
    key: str
    position: int
    kept: set[int]

    __hash__ = object.__hash__

    @classmethod
    def of(cls, value: int, owner: Owner, key: str, position: int = 0) -> Size:
        size = cls(value)
        size.owner, size.key, size.position, size.kept = owner, key, position, set()
        return size


@contextmanager
def followed_sizes(model: nn.Module, leave: Collection[str]) -> Iterator[list[Size]]:
    """Inside, the numbers that modules hold are `Size`s; those of modules named by `leave` stay what they are."""
    found: list[Size] = []
    before: list[tuple[dict[str, Any], str, Any]] = []
    seen: set[int] = set()

    def follow(held: dict[str, Any], owner: Owner) -> None:
        for key, value in list(held.items()):
            if key.startswith("_") or key == "training":
                continue
            if type(value) is int and value > 1:
                new: Any = Size.of(value, owner, key)
                found.append(new)
            elif type(value) in (list, tuple) and value and all(type(each) is int for each in value):
                new = [Size.of(each, owner, key, place) for place, each in enumerate(value)]
                found.extend(new)
                new = type(value)(new)
            else:
                if _is_plain(value) and len(owner) < 3 and id(value) not in seen:
                    seen.add(id(value))
                    follow(vars(value), (*owner, key))
                continue
            before.append((held, key, value))
            held[key] = new

    try:
        for name, module in model.named_modules():
            if name not in leave:
                follow(vars(module), (name,))
        yield found
    finally:
        for held, key, value in before:
            held[key] = value


def _is_plain(value: Any) -> bool:
    """Whether a value is an object with attributes, as configurations are."""
    return hasattr(value, "__dict__") and not callable(value) and not isinstance(value, Tensor)


def note_sizes(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, groups: Mapping[int, int]
) -> None:
    """Record how many entries along an axis are kept, not NaN throughout, where a function was given its size.

    `groups` says how many query heads that share keys and values are kept: these are repeated as often.
    """
    rest = [*args[1:], *kwargs.values()]
    flat = [each for arg in rest for each in (arg if isinstance(arg, (list, tuple)) else (arg,))]
    if not any(isinstance(each, Size) for each in flat):
        return
    if name in ("view", "reshape", "expand") and isinstance(result, Tensor) and len(flat) == result.dim():
        axes = list(enumerate(flat))
    elif name == "unflatten" and isinstance(result, Tensor):
        first = int(flat[0]) if flat[0] >= 0 else result.dim() + int(flat[0]) - len(flat) + 2
        axes = list(enumerate(flat[1:], first))
    elif name in ("split", "narrow"):
        parts = result if isinstance(result, tuple) else [result]
        for part, size in zip(parts, (each for each in flat if isinstance(each, Size)), strict=False):
            for axis in (axis for axis, whole in enumerate(args[0].shape) if part.shape[axis] == size != whole):
                size.kept.add(_kept(part, axis))
        return
    else:
        for size in flat if name == "repeat_interleave" else ():
            if isinstance(size, Size) and int(size) in groups:
                size.kept.add(groups[int(size)])
        return
    for axis, size in axes:
        if isinstance(size, Size):
            size.kept.add(_kept(result, axis))


def _kept(x: Tensor, axis: int) -> int:
    if not x.is_floating_point() or not x.numel():
        return x.shape[axis]
    return int((~x.isnan().movedim(axis, 0).flatten(1).all(1)).sum())


def changed(network: nn.Module, sizes: Collection[Size]) -> None:
    """Set the numbers of a narrowed network whose axes have all lost the same entries, in place."""
    for size in sizes:
        if len(size.kept) == 1 and (kept := min(size.kept)) != size:
            held: Any = vars(network.get_submodule(size.owner[0]))
            for key in size.owner[1:]:
                held = vars(held[key])
            value = held[size.key]
            if type(value) is int:
                held[size.key] = kept
            else:
                held[size.key] = type(value)(
                    kept if place == size.position else each for place, each in enumerate(value)
                )
