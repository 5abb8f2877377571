"""Whole numbers that a network holds and passes to torch as sizes: which axes they are, and what is kept of these."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

__all__ = ["Size", "changed", "followed_sizes", "note_sizes"]


class Size(int):
    """A number that a network holds; it knows where, and how many entries are kept of axes of that size.

    Its hash is its own, so that no cache, as einops has one, answers with a number from another run.
    """

    path: tuple[Any, ...]
    """A module's name, the attributes that lead to the number, and its place in a list."""
    kept: set[int]

    __hash__ = object.__hash__

    @classmethod
    def at(cls, value: int, path: tuple[Any, ...]) -> Size:
        size = cls(value)
        size.path, size.kept = path, set()
        return size


@contextmanager
def followed_sizes(model: nn.Module, leave: Collection[str]) -> Iterator[list[Size]]:
    """Inside, the numbers that modules hold are `Size`s; those of modules named by `leave` stay what they are."""
    found: list[Size] = []
    before: list[tuple[dict[str, Any], str, Any]] = []
    seen: set[int] = set()

    def sized(value: Any, path: tuple[Any, ...]) -> Any:
        if type(value) is int and value > 1:
            found.append(Size.at(value, path))
            return found[-1]
        if type(value) in (list, tuple) and all(type(each) is int for each in value):
            return type(value)(sized(each, (*path, place)) for place, each in enumerate(value))
        return value

    def follow(held: dict[str, Any], path: tuple[Any, ...]) -> None:
        for key, value in list(held.items()):
            if key.startswith("_") or key == "training":
                continue
            if (new := sized(value, (*path, key))) is not value:
                before.append((held, key, value))
                held[key] = new
            elif _is_plain(value) and len(path) < 3 and id(value) not in seen:
                seen.add(id(value))
                follow(vars(value), (*path, key))

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
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, shares: Mapping[int, int]
) -> None:
    """Record how many entries along an axis are kept, not NaN throughout, where a function was given its size.

    `shares` says how many query heads that share keys and values are kept: these are repeated as often.
    """
    rest = [*args[1:], *kwargs.values()]
    flat = [each for arg in rest for each in (arg if isinstance(arg, (list, tuple)) else (arg,))]
    sizes = [each for each in flat if isinstance(each, Size)]
    if not sizes:
        return
    if name == "repeat_interleave":
        for size in sizes:
            size.kept |= {shares[int(size)]} if int(size) in shares else set()
    elif name in ("split", "narrow"):
        for part, size in zip(result if isinstance(result, tuple) else [result], sizes, strict=False):
            size.kept |= {_kept(part, axis) for axis, whole in enumerate(args[0].shape) if part.shape[axis] != whole}
    elif name in ("view", "reshape", "expand", "unflatten") and isinstance(result, Tensor):
        dim, *shape = flat if name == "unflatten" else [0, *flat]
        first = int(dim) if dim >= 0 else result.dim() + int(dim) - len(shape) + 1
        for axis, size in enumerate(shape, first):
            if isinstance(size, Size) and first + len(shape) <= result.dim():
                size.kept.add(_kept(result, axis))


def _kept(x: Tensor, axis: int) -> int:
    if not x.is_floating_point() or not x.numel():
        return x.shape[axis]
    return int((~x.isnan().movedim(axis, 0).flatten(1).all(1)).sum())


def changed(network: nn.Module, sizes: Collection[Size]) -> None:
    """Set the numbers of a narrowed network whose axes have all lost the same entries, in place."""
    for size in sizes:
        if len(size.kept) == 1 and (kept := min(size.kept)) != size:
            name, *owners, key = size.path
            held: Any = network.get_submodule(name)
            if isinstance(key, int):
                *owners, listed = owners
            for owner in owners:
                held = getattr(held, owner)
            if isinstance(key, int):
                numbers = vars(held)[listed]
                kept, key = type(numbers)([*numbers[:key], kept, *numbers[key + 1 :]]), listed
            vars(held)[key] = kept
