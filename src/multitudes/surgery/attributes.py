"""What a network's modules hold of widths and of numbers of heads, changed along with them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor, nn

from multitudes.surgery.attended import HeadChoice
from multitudes.surgery.cuts import Cut, follows, makes, width_of

__all__ = ["ADJUSTMENTS", "adjust"]

ADJUSTMENTS = ("none", "names", "heads", "values")
"""Which attributes follow: none; those whose names tell heads from widths; those that count heads; all, by value."""

_SIZES = ("dim", "size", "width", "channel", "feature", "embd")
_GROUPS = ("group", "rep", "share")
_OTHERS = ("position", "vocab", "image", "patch", "label", "layer", "token", "length", "window", "stride", "kernel")


def adjust(
    narrowed: nn.Module, cuts: Mapping[str, Cut], heads: HeadChoice, by: str, model: nn.Module, built: Collection[str]
) -> bool:
    """Change a narrowed network's attributes that count channels or heads, in place; whether any was changed.

    Those of the modules named by `built`, and of what is in them, are right already.
    """
    if by == "none":
        return False
    widths = _followed(cuts, model)
    changed = False
    seen = {id(value) for name in built for value in vars(narrowed.get_submodule(name)).values()}
    for name, module in narrowed.named_modules():
        if any(not outer or name == outer or name.startswith(f"{outer}.") for outer in built):
            continue
        if name in cuts and (makes(model.get_submodule(name)) or follows(model.get_submodule(name))):
            continue
        counts = heads.counted(name)

        def new(key: str, value: int, counts: Mapping[str, Mapping[int, int]] = counts) -> int:
            return _new(key, value, widths, counts, by)

        changed |= _change(vars(module), new, seen)
    return changed


def _followed(cuts: Mapping[str, Cut], model: nn.Module) -> dict[int, int]:
    """What became of each width."""
    made = [(model.get_submodule(name), len(cut.outputs)) for name, cut in cuts.items()]
    return {width_of(layer): count for layer, count in made if makes(layer) and count < width_of(layer)}


def _new(key: str, value: int, widths: Mapping[int, int], counts: Mapping[str, Mapping[int, int]], by: str) -> int:
    """The value of an attribute, by its name, in the narrowed network."""
    key = key.lower()
    of_head, of_size = "head" in key, any(word in key for word in _SIZES)
    if by == "values":
        return counts["heads"].get(value, widths.get(value, value))
    if of_head and not of_size and any(word in key for word in _GROUPS):
        return counts["groups"].get(value, value)
    if of_head and not of_size:
        return counts["heads"].get(value, value)
    if any(word in key for word in _GROUPS) and value in counts["groups"]:
        return counts["groups"][value]
    if any(word in key for word in _OTHERS):
        return value
    if by == "heads" or (of_head and value in counts["sizes"]):
        return value
    return widths.get(value, value)


def _change(held: dict[str, Any], new: Callable[[str, int], int], seen: set[int], depth: int = 3) -> bool:
    """Change the whole numbers that an object holds, in tuples, lists and plain objects too; whether any was."""
    changed = False
    for key, value in held.items():
        if key in ("training", "_parameters", "_buffers", "_modules") or key.endswith("_hooks"):
            continue
        held[key], differs = _changed(key, value, new, seen, depth)
        changed |= differs
    return changed


def _changed(key: str, value: Any, new: Callable[[str, int], int], seen: set[int], depth: int) -> tuple[Any, bool]:
    if type(value) is int:
        return new(key, value), new(key, value) != value
    if depth and type(value) in (list, tuple):
        items = [_changed(key, each, new, seen, depth - 1) for each in value]
        differs = any(changed for _, changed in items)
        return (type(value)(each for each, _ in items), True) if differs else (value, False)
    if depth and type(value) is dict and all(isinstance(each, str) for each in value):
        return value, _change(value, new, seen, depth - 1)
    plain = hasattr(value, "__dict__") and not callable(value) and not isinstance(value, Tensor)
    if depth and plain and id(value) not in seen:  # a configuration, which several modules may hold
        seen.add(id(value))
        return value, _change(vars(value), new, seen, depth - 1)
    return value, False
