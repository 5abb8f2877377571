"""The torch engine, and the verification of other engines against it."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from multitudes.ensemble.multitude import Multitude
from multitudes.networks.calls import Input, map_tensors, tensors_in
from multitudes.networks.copies import copied
from multitudes.networks.devices import device_in
from multitudes.networks.stochastic import expecting

_ROUNDING = {torch.float64: 1e-7, torch.float32: 1e-4, torch.bfloat16: 0.03, torch.float16: 5e-3}
"""Minimum error bound of each precision, relative to the variation of predictions: the effect of a few roundings."""

MAX_ERROR = 10
"""Maximum error bound, as a multiple of the minimum bound."""

MAX_SHAPES = 4096
"""Maximum number of cached input shapes."""

ERROR_FACTOR = 3
"""Error bound as a multiple of the network's own error in the same precision."""


def rounding(dtype: torch.dtype, device: torch.device) -> float:
    """Return the minimum error bound of a dtype; on a GPU float32 is TensorFloat-32."""
    dtype = dtype.to_real()
    return _ROUNDING[torch.float16 if device.type == "cuda" and dtype == torch.float32 else dtype]


class Engine(Protocol):
    """Interface of engines, which compute the predictions of a multitude in evaluation mode."""

    def __call__(self, x: Input, **options: Any) -> Tensor:
        """Map `[B, ...] -> [S, B, ...]`, float32 or better, for batches of any size."""
        ...

    def summary_rows(self) -> list[tuple[str, str]]:
        """Return rows of the summary: name and description."""
        ...


class TorchEngine:
    """A copy of a multitude that torch runs; layers that draw keep drawing.

    With a dtype, the weights are cast if the network runs that way, otherwise torch's autocast is used. `with_options`
    runs calls with options about draws.
    """

    def __init__(
        self, net: Multitude, dtype: torch.dtype | None, example: Input, with_options: Multitude | None = None
    ) -> None:
        self.net, self.dtype, self.autocast, self.with_options = net, dtype, False, with_options
        if dtype is None and self.device.type != "cuda":
            return
        whole = dtype is not None and not any(t.is_complex() for t in (*net.parameters(), *net.buffers()))
        for self.autocast, laid_out in itertools.product((not whole, True), (True, False)):
            self.net = copied(net).to(dtype) if whole and not self.autocast else copied(net)
            self.net = _channels_last(self.net) if laid_out else self.net
            try:
                self(example)
                self._run_first_member(example)
                return
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, ValueError) as error:
                reason = str(error).splitlines()[0]
        raise ValueError(f"the network cannot run in {str(dtype).removeprefix('torch.')}: {reason}")

    @torch.no_grad()
    def __call__(self, x: Input, **options: Any) -> Tensor:
        if options and self.with_options is not None:
            found: Tensor = self.with_options(x, **options)
        else:
            with self.precision():
                found = self.net(self.cast(x), **options)
        return found if found.dtype == torch.float64 or found.is_complex() else found.float()

    @torch.no_grad()
    def _run_first_member(self, x: Input) -> None:
        """Run the first member alone, since `x.view` in its code may reject a layout that works for all members."""
        with self.precision(), expecting(self.net.network):
            self.net._of_first(self.cast(x))

    @property
    def device(self) -> torch.device:
        return device_in(self.net)

    def precision(self) -> AbstractContextManager[Any]:
        """Return the context for the engine's precision."""
        return torch.autocast(self.device.type, self.dtype) if self.autocast and self.dtype else nullcontext()

    def cast(self, x: Input) -> Input:
        """Cast an input to the dtype of the weights, unless autocast does."""
        if self.autocast or self.dtype is None:
            return x
        return map_tensors(lambda tensor: tensor.to(self.dtype) if tensor.is_floating_point() else tensor, x)

    def summary_rows(self) -> list[tuple[str, str]]:
        return [("engine", "torch" + (" with autocast" if self.autocast else ""))]


class Reference:
    """The original network, to compare fast predictions with; `plain` runs it in their precision.

    The error bound follows from the network's own error in that precision, unless `at_most` gives it.
    """

    def __init__(
        self, net: Multitude, plain: TorchEngine, options: Mapping[str, Any], at_most: float | None = None
    ) -> None:
        self.net, self.plain, self.options, self.at_most = net, plain, options, at_most

    @torch.no_grad()
    def compare(self, quick: Callable[..., Tensor], x: Input, **more: Any) -> tuple[float, float, float]:
        """Return the error of fast predictions, the network's own error in their precision, and the error bound."""
        options = {**self.options, **more}
        want = self.net(x, **options)
        own = distance(self.plain(x, **options), want)
        usual = rounding(self.plain.dtype or want.dtype, want.device)
        bound = min(max(ERROR_FACTOR * own, usual), MAX_ERROR * usual) if self.at_most is None else self.at_most
        return distance(quick(x, **options), want), own, bound


class VerifiedEngine:
    """Run an engine for the input shapes on which it agrees with the network, and `plain` for others.

    `note` is added to the summary.
    """

    def __init__(self, quick: Engine, plain: TorchEngine, reference: Reference, note: str = "") -> None:
        self.quick, self.plain, self.reference, self.note = quick, plain, reference, note
        self.agrees: dict[Any, bool] = {}

    def __call__(self, x: Input, **options: Any) -> Tensor:
        key = signature(x)
        undrawn = options and not self.reference.options  # options about draws, without layers that draw
        if self.quick is self.plain or key is None or undrawn:
            return self.plain(x, **options)
        if key not in self.agrees:
            if len(self.agrees) >= MAX_SHAPES:
                self.agrees.clear()
            self.agrees[key] = self._verify(x)
        return (self.quick if self.agrees[key] else self.plain)(x, **options)

    def _verify(self, x: Input) -> bool:
        x = map_tensors(lambda tensor: tensor.clone(), x)  # the network may write to its input
        self.plain(x, **self.reference.options)  # raises if the input does not fit
        try:
            off, _, bound = self.reference.compare(self.quick, x)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, TypeError, IndexError):
            return False
        if off > bound:
            shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors_in(x))
            warnings.warn(
                f"x of shape {shapes}: fast predictions differ from the network's by {off:.1e} of their variation; "
                "torch runs such inputs",
                stacklevel=2,
            )
        return off <= bound

    def summary_rows(self) -> list[tuple[str, str]]:
        return [*self.quick.summary_rows(), *([("", self.note)] if self.note else [])]


def _channels_last(net: Multitude) -> Multitude:
    """Convert a multitude with 2-d convolutions to channels-last on a GPU, where it is faster."""
    on_gpu = any(parameter.is_cuda for parameter in net.parameters())
    images = any(isinstance(module, nn.Conv2d) for module in net.network.modules())
    return net.to(memory_format=torch.channels_last) if on_gpu and images else net  # type: ignore[call-overload]


def distance(got: Tensor, want: Tensor) -> float:
    """Return the largest error of the S predictions `[S, B, ...]`, relative to their variation.

    Errors of a few huge numbers, as for masked classes, are relative to these numbers, and do not hide other errors.
    """
    if got.shape != want.shape or not torch.equal(got.isfinite(), want.isfinite()):
        return float("inf")
    if not want.numel():
        return 0.0
    wide = torch.complex128 if want.is_complex() else torch.float64
    got, want = (values.to(wide).nan_to_num(0, 0, 0).reshape(len(values), -1) for values in (got, want))
    middle = want.real.median(1, keepdim=True).values
    away = (want - middle).abs()
    spread, usual = away.square().mean(1, keepdim=True).sqrt(), away.median(1, keepdim=True).values
    spread = torch.where(usual > 0, spread.minimum(3 * usual), spread).maximum(1e-3 * middle.abs())
    off = (got - want).abs() / away.maximum(spread).clamp(min=1e-30)
    return float(off.square().mean(1).sqrt().max())


# -- inputs ------------------------------------------------------------------------------------------------

_PLAIN = (bool, int, float, str, type(None))


def signature(x: Any, shapes: bool = True) -> Any:
    """Return the shapes and dtypes of an input's tensors, and its plain values; None if it has other values.

    >>> signature({"x": torch.ones(2, 3), "flag": True})
    (<class 'dict'>, (('x', ((2, 3), torch.float32)), ('flag', (<class 'bool'>, 'True'))))
    """
    if isinstance(x, Tensor):
        return (tuple(x.shape) if shapes else x.dim()), x.dtype
    if type(x) is dict:
        entries = [(name, signature(value, shapes)) for name, value in x.items()]
        return None if any(own is None for _, own in entries) else (dict, tuple(entries))
    if type(x) in (tuple, list):
        own = [signature(value, shapes) for value in x]
        return None if any(each is None for each in own) else (type(x), tuple(own))
    return (type(x), repr(x)) if type(x) in _PLAIN else None


def rows_of(x: Input) -> int:
    """Return the batch size; 0 if the first tensor has no batch axis."""
    first = next(iter(tensors_in(x)), None)
    return 0 if first is None or not first.dim() else len(first)


def has_special_values(x: Input) -> bool:
    """Return whether runtimes may treat an input differently: it has negative ids, or a mask that hides a whole row."""
    tensors = tensors_in(x)
    for tensor in tensors:
        numbers = tensor.is_floating_point() or tensor.is_complex()
        if not tensor.numel() or (numbers and len(tensors) == 1):  # no mask
            continue
        if not numbers and tensor.dtype != torch.bool and int(tensor.min()) < 0:
            return True
        if tensor.dim() > 1 and not bool(tensor.flatten(1).bool().any(1).all()):
            return True
    return False
