"""Noise on activations with the same random numbers each time: what frozen networks have for layers that draw.

The numbers are computed from one that the layer keeps, by a hash of 32-bit integers, so that they need no storage, fit
inputs of any size, and are the same on every device, under `torch.vmap`, compiled and exported. All rows of a batch
share them. Along which axis the rows lie is seen in two runs, of two rows and of three.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.core.calling import Input, rows
from multitudes.core.copying import share_registries
from multitudes.core.draws.stochastic import Stochastic, drawing
from multitudes.core.proof import unmoved

__all__ = ["Frozen", "find_rows", "rows_to_find", "scrambled"]

Shape = tuple[int, ...]


class Frozen(nn.Module):
    """A layer that drew, with the same random numbers each time; where they were each row's own, all rows share them.

    It shares the layer's registries and answers for its settings. `frozen`, a buffer, is what its numbers come from.
    Where it is told to keep them, by an empty list, those of its next call become constants. `_axes` has the axis of
    the rows for each rank, where it is not the first; None is for numbers that are no row's own.
    """

    shares = "layer"
    layer: Stochastic
    frozen: Tensor
    kept: list[Tensor] | None = None
    seen: list[Shape] | None = None  # the shapes that are asked for, while the rows are looked for
    _axes: dict[str, int | None] | None = {}  # noqa: RUF012 (of files from before it was looked for)

    def __init__(self, layer: Stochastic, seed: Tensor) -> None:
        super().__init__()
        share_registries(self, layer)
        object.__setattr__(self, "layer", layer)  # not registered: the network has no layer that draws any more
        self.training = layer.training
        self.register_buffer("frozen", seed)
        self._axes = None if layer.noise == "rows" else {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.layer.training = self.training
        numbers: Any = _Numbers(self)
        with drawing([self.layer], numbers):
            return self.layer(*args, **kwargs)

    def axis(self, shape: Shape) -> int | None:
        """Along which axis of what is asked for the rows lie; None where they have nothing of their own there."""
        if self.layer.noise != "rows":
            return None
        if self.seen is not None:
            self.seen.append(shape)
        elif self._axes is None and len(shape) == 3:
            raise ValueError(
                f"a frozen {type(self.layer).__name__} got an input of shape {list(shape)} and does not know yet which "
                "axis is the batch's: call the frozen multitude once, and take its members then"
            )
        return (self._axes or {}).get(str(len(shape)), 0)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "layer" not in vars(self):
                raise
            return getattr(self.layer, name)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Frozen:
        self.layer._apply(fn, recurse)
        return self

    def extra_repr(self) -> str:
        return f"{type(self.layer).__name__}({self.layer.extra_repr()})"


class _Numbers:
    """Where a frozen layer's numbers come from: a `Draw` whose numbers are the same each time, and all rows'."""

    def __init__(self, layer: Frozen) -> None:
        self.layer = layer
        self.seed = layer.frozen
        self.asked = 0  # how often, in this call
        self.stream = 0

    def numbers(self, kind: str, shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensor:
        axis, kept = self.layer.axis(shape), self.layer.kept
        own = shape if axis is None else (*shape[:axis], 1, *shape[axis + 1 :])
        self.asked += 1
        if kept is not None and self.asked <= len(kept):
            numbers = kept[self.asked - 1]
        else:
            numbers = self._new(kind, math.prod(own), device).to(dtype).reshape(own)
            if kept is not None:
                kept.append(numbers)
        if axis is None:
            return numbers.clone()
        return numbers.repeat(*[shape[axis] if dim == axis else 1 for dim in range(len(shape))])

    def _new(self, kind: str, count: int, device: torch.device) -> Tensor:
        if kind == "uniform":
            return self._uniform(count, device)
        radius = torch.sqrt(-2 * torch.log(1 - self._uniform(count, device)))  # Box and Muller's
        return radius * torch.cos(2 * math.pi * self._uniform(count, device))

    def _uniform(self, count: int, device: torch.device) -> Tensor:
        """Float32 numbers from [0, 1), `[count]`, others each time."""
        self.stream += 1
        seed = self.seed.to(device)
        index = torch.arange(count, device=device)
        bits = scrambled(scrambled(seed + index) ^ scrambled(scrambled(seed) ^ self.stream))
        return (bits >> 8).float() / 2**24


def scrambled(numbers: Tensor) -> Tensor:
    """A hash of numbers below 2^32, in int64: neighbours become unlike (Mueller's, of two rounds).

    >>> scrambled(torch.tensor([0, 1, 2]))
    tensor([         0,  824515495, 1722258072])
    """
    for _ in range(2):
        numbers = (numbers ^ (numbers >> 16)) * 0x45D9F3B % 2**32
    return numbers ^ (numbers >> 16)


# -- where the rows of a batch lie -------------------------------------------------------------------------


def rows_to_find(network: nn.Module) -> bool:
    """Whether it is to be found out along which axes rows lie."""
    return any(True for _ in _unknown(network))


@torch.no_grad()
def find_rows(network: nn.Module, x: Input, run: Callable[[Input], Any]) -> None:
    """Find out along which axes of what frozen layers ask for the rows lie: those that are longer for more rows."""
    layers = dict(_unknown(network))
    if layers:
        with unmoved(network, x):
            two, three = (_shapes(layers, x, count, run) for count in (2, 3))
        axes = {name: _axes(name, layer, two[name], three[name]) for name, layer in layers.items()}
        for name, layer in layers.items():
            layer._axes = axes[name]


def _shapes(
    layers: Mapping[str, Frozen], x: Input, count: int, run: Callable[[Input], Any]
) -> dict[str, Sequence[Shape]]:
    """The shapes that layers ask for in a run of so many rows; none where the network takes batches of one size."""
    for layer in layers.values():
        layer.seen = []
    try:
        run(rows(x, torch.zeros(count, dtype=torch.int64)))
        return {name: layer.seen or () for name, layer in layers.items()}
    except Exception:  # of the user's own code, which may take batches of one size
        run(x)  # where x does not fit, the network says so
        return dict.fromkeys(layers, ())
    finally:
        for layer in layers.values():
            del layer.seen


def _unknown(network: nn.Module) -> Iterator[tuple[str, Frozen]]:
    for name, module in network.named_modules():
        if isinstance(module, Frozen) and module._axes is None:
            yield name, module


def _axes(name: str, layer: Frozen, two: Sequence[Shape], three: Sequence[Shape]) -> dict[str, int | None]:
    """The axis of the rows for each rank, where it is not the first, of the shapes for two rows and for three."""
    found: dict[str, int | None] = {}
    for one, other in zip(two, three, strict=False):
        longer = (axis for axis, (few, more) in enumerate(zip(one, other, strict=False)) if few != more)
        axis, rank = next(longer, None), str(len(one))
        if found.setdefault(rank, axis) != axis:
            raise ValueError(
                f"layer {name!r} ({type(layer.layer).__name__}) gets the rows of a batch along axis {found[rank]} and "
                f"along axis {axis}, so that it cannot be frozen: give each place a layer of its own"
            )
    return {rank: axis for rank, axis in found.items() if axis != 0}
