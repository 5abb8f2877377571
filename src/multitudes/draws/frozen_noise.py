"""Frozen noise: stochastic layers with the same random numbers in each call.

The numbers are a 32-bit hash of a seed that the layer stores. They fit inputs of any size and are the same on every
device, under `torch.vmap`, compiled and exported. All rows of a batch share them. Two runs, with two and three rows,
show which axis is the batch axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.networks.calls import Input, select_rows
from multitudes.networks.copies import Sharing
from multitudes.networks.stochastic import Stochastic, drawing
from multitudes.networks.trace import preserve_state

Shape = tuple[int, ...]


class FrozenNoise(Sharing):
    """A stochastic layer with the same random numbers in each call, for all rows of a batch.

    It shares the layer's registries and settings. The buffer `frozen` is the seed of its numbers. If `kept` is an empty
    list, the next call stores its numbers there as constants. `_axes` maps ranks to batch axes other than the first;
    None stands for numbers without a batch axis.
    """

    shares = "layer"
    layer: Stochastic
    frozen: Tensor
    kept: list[Tensor] | None = None
    seen: list[Shape] | None = None  # shapes of the numbers, recorded while finding the batch axis
    _axes: dict[str, int | None] | None

    def __init__(self, layer: Stochastic, seed: Tensor) -> None:
        super().__init__(layer)
        self.register_buffer("frozen", seed)
        self._axes = None if layer.noise == "rows" else {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.layer.training = self.training
        numbers: Any = _Numbers(self)
        with drawing([self.layer], numbers):
            return self.layer(*args, **kwargs)

    def axis(self, shape: Shape) -> int | None:
        """Return the batch axis of numbers of this shape, or None."""
        if self.layer.noise != "rows":
            return None
        if self.seen is not None:
            self.seen.append(shape)
        elif self._axes is None and len(shape) == 3:
            raise ValueError(
                f"the batch axis of a frozen {type(self.layer).__name__} is unknown for numbers of shape "
                f"{list(shape)}: call the frozen multitude once before you take its members"
            )
        return (self._axes or {}).get(str(len(shape)), 0)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "layer" not in vars(self):
                raise
            return getattr(self.layer, name)

    def extra_repr(self) -> str:
        return f"{type(self.layer).__name__}({self.layer.extra_repr()})"


class _Numbers:
    """The random numbers of a frozen layer, used in place of a `Draw`."""

    def __init__(self, layer: FrozenNoise) -> None:
        self.layer = layer
        self.seed = layer.frozen
        self.requests = 0  # in this call
        self.stream = 0

    def numbers(self, kind: str, shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensor:
        axis, kept = self.layer.axis(shape), self.layer.kept
        one_row = shape if axis is None else (*shape[:axis], 1, *shape[axis + 1 :])
        self.requests += 1
        if kept is not None and self.requests <= len(kept):
            numbers = kept[self.requests - 1]
        else:
            numbers = self._new(kind, math.prod(one_row), device).to(dtype).reshape(one_row)
            if kept is not None:
                kept.append(numbers)
        if axis is None:
            return numbers.clone()
        return numbers.repeat(*[shape[axis] if dim == axis else 1 for dim in range(len(shape))])

    def _new(self, kind: str, count: int, device: torch.device) -> Tensor:
        if kind == "uniform":
            return self._uniform(count, device)
        radius = torch.sqrt(-2 * torch.log(1 - self._uniform(count, device)))  # Box-Muller
        return radius * torch.cos(2 * math.pi * self._uniform(count, device))

    def _uniform(self, count: int, device: torch.device) -> Tensor:
        """Return float32 numbers from [0, 1), `[count]`; each call returns others."""
        self.stream += 1
        seed = self.seed.to(device)
        index = torch.arange(count, device=device)
        bits = hash_numbers(hash_numbers(seed + index) ^ hash_numbers(hash_numbers(seed) ^ self.stream))
        return (bits >> 8).float() / 2**24


def hash_numbers(numbers: Tensor) -> Tensor:
    """Hash numbers below 2^32, as int64 (two rounds of Mueller's hash).

    >>> hash_numbers(torch.tensor([0, 1, 2]))
    tensor([         0,  824515495, 1722258072])
    """
    for _ in range(2):
        numbers = (numbers ^ (numbers >> 16)) * 0x45D9F3B % 2**32
    return numbers ^ (numbers >> 16)


# -- the batch axis ----------------------------------------------------------------------------------------


def rows_to_find(network: nn.Module) -> dict[str, FrozenNoise]:
    """Return the frozen layers whose batch axis is unknown, by name."""
    modules = network.named_modules()
    return {name: module for name, module in modules if isinstance(module, FrozenNoise) and module._axes is None}


@torch.no_grad()
def find_rows(network: nn.Module, x: Input, run: Callable[[Input], Any]) -> None:
    """Find the batch axes of frozen layers' numbers: the axes whose length depends on the number of rows."""
    layers = rows_to_find(network)
    if layers:
        with preserve_state(network, x):
            two, three = (_shapes(layers, x, count, run) for count in (2, 3))
        for name, layer in layers.items():
            layer._axes = _axes(name, layer, two[name], three[name])


def _shapes(
    layers: Mapping[str, FrozenNoise], x: Input, count: int, run: Callable[[Input], Any]
) -> dict[str, Sequence[Shape]]:
    """Return the shapes of layers' numbers in a run of `count` rows; empty if the network needs a fixed batch size."""
    for layer in layers.values():
        layer.seen = []
    try:
        run(select_rows(x, torch.zeros(count, dtype=torch.int64)))
        return {name: layer.seen or () for name, layer in layers.items()}
    except Exception:  # the user's code may need a fixed batch size
        run(x)  # raises the network's own error if x does not fit
        return dict.fromkeys(layers, ())
    finally:
        for layer in layers.values():
            del layer.seen


def _axes(name: str, layer: FrozenNoise, two: Sequence[Shape], three: Sequence[Shape]) -> dict[str, int | None]:
    """Return the batch axis for each rank, unless it is the first, from the shapes for two and three rows."""
    found: dict[str, int | None] = {}
    for one, other in zip(two, three, strict=False):
        longer = (axis for axis, (few, more) in enumerate(zip(one, other, strict=False)) if few != more)
        axis, rank = next(longer, None), str(len(one))
        if found.setdefault(rank, axis) != axis:
            raise ValueError(
                f"layer {name!r} ({type(layer.layer).__name__}) cannot be frozen, since it is called with batch axis "
                f"{found[rank]} and with batch axis {axis}: use a separate layer for each call"
            )
    return {rank: axis for rank, axis in found.items() if axis != 0}
