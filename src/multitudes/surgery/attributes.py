"""What a network's modules hold of widths and of numbers of heads, changed along with them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from multitudes.surgery.attended import HeadChoice
from multitudes.surgery.cuts import Cut, makes, width_of

__all__ = ["ADJUSTMENTS", "Change", "adjust"]

ADJUSTMENTS = ("none", "names", "heads", "values")
"""Which attributes follow: none; those whose names tell heads from widths; those that count heads; all, by value."""

_WIDTHS = ("dim", "width", "channel", "feature", "emb", "hidden", "model", "inner", "ffn", "intermediate", "all_head")
_SIZES = (*_WIDTHS, "size")
_GROUPS = ("group", "rep", "share")
_OTHERS = (
    "position", "vocab", "image", "patch", "label", "class", "layer", "token", "len", "window", "stride", "kernel",
    "num_emb", "max", "context", "block",
)  # fmt: skip


@dataclass(frozen=True)
class Change:
    """One attribute, or entry, that was changed; what holds it, what it was, and what it is."""

    held: dict[str, Any]
    key: str
    before: Any
    after: Any

    def undo(self) -> None:
        """Set it to what it was."""
        self.held[self.key] = self.before

    def redo(self) -> None:
        """Set it to what it was changed to."""
        self.held[self.key] = self.after


def adjust(
    narrowed: nn.Module, cuts: Mapping[str, Cut], heads: HeadChoice, by: str, model: nn.Module, built: Collection[str]
) -> list[Change]:
    """Change a narrowed network's attributes that count channels or heads, in place; returns what was changed.

    Those of the modules named by `built`, and of what is in them, are right already.
    """
    if by == "none":
        return []
    widths = _followed(cuts, model)
    changes: list[Change] = []
    seen = {id(value) for name in built for value in vars(narrowed.get_submodule(name)).values()}
    for name, module in narrowed.named_modules():
        if name in cuts or any(not outer or name == outer or name.startswith(f"{outer}.") for outer in built):
            continue
        if by != "values" and type(module).__module__.startswith("torch.nn"):
            continue
        counts = heads.counted(name)

        def new(key: str, value: int, counts: Mapping[str, Mapping[int, int]] = counts) -> int:
            return _new(key.lower(), value, widths, counts, by)

        _change(vars(module), new, seen, changes)
    return changes


def _followed(cuts: Mapping[str, Cut], model: nn.Module) -> dict[int, int]:
    """What became of each width."""
    made = [(model.get_submodule(name), len(cut.outputs)) for name, cut in cuts.items()]
    return {width_of(layer): count for layer, count in made if makes(layer) and count < width_of(layer)}


def _new(key: str, value: int, widths: Mapping[int, int], counts: Mapping[str, Mapping[int, int]], by: str) -> int:
    """The value of an attribute, by its name, in the narrowed network."""
    of_head, of_size = "head" in key, any(word in key for word in _SIZES)
    if by == "values":
        return counts["heads"].get(value, widths.get(value, value))
    if any(word in key for word in _GROUPS) and not of_size and value in counts["groups"]:
        return counts["groups"][value]
    if of_head and not of_size:
        return counts["heads"].get(value, value)
    if by == "heads" or (of_head and value in counts["sizes"]) or any(word in key for word in _OTHERS):
        return value
    return widths.get(value, value) if any(word in key for word in _WIDTHS) else value


def _change(
    held: dict[str, Any], new: Callable[[str, int], int], seen: set[int], changes: list[Change], depth: int = 3
) -> None:
    """Change the whole numbers that an object holds, in tuples, lists and plain objects too."""
    for key, value in list(held.items()):
        if key in ("training", "_parameters", "_buffers", "_modules") or key.endswith("_hooks"):
            continue
        after = _changed(key, value, new)
        if after is not value:
            changes.append(Change(held, key, value, after))
            held[key] = after
        elif depth and type(value) is dict and all(isinstance(each, str) for each in value):
            _change(value, new, seen, changes, depth - 1)
        elif depth and id(value) not in seen and _is_plain(value):  # a configuration, which several modules may hold
            seen.add(id(value))
            _change(vars(value), new, seen, changes, depth - 1)


def _is_plain(value: Any) -> bool:
    return hasattr(value, "__dict__") and not callable(value) and not isinstance(value, Tensor)


def _changed(key: str, value: Any, new: Callable[[str, int], int]) -> Any:
    """A whole number, or a list or tuple of such, as it is in the narrowed network; the same object where it stays."""
    if type(value) is int:
        after = new(key, value)
        return value if after == value else after
    if type(value) in (list, tuple):
        items = [_changed(key, each, new) for each in value]
        return value if all(a is b for a, b in zip(items, value, strict=True)) else type(value)(items)
    return value
