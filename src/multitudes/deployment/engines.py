"""Engines: what runs a deployed network."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from multitudes.core.calling import Input, mapped, tensors_in
from multitudes.core.copying import copied
from multitudes.core.multitude import Multitude
from multitudes.core.proof import kind_of

__all__ = ["Engine", "Plain", "Proven", "Reference", "distance", "rounding"]

_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.03, torch.float16: 5e-3}
"""How far predictions may be from the network's own in each precision, relative to how much they vary, at least: what a
few roundings make. Where the network itself is further off in that precision, `FURTHER` times that is the bound."""

FURTHER = 3
"""How much further off than the network itself in the same precision predictions may be: roundings differ by chance."""


def rounding(dtype: torch.dtype, device: torch.device) -> float:
    """How far predictions may be off by rounding, at least; on a GPU float32 is TensorFloat-32."""
    return _ROUNDING[torch.float16 if device.type == "cuda" and dtype == torch.float32 else dtype]


class Engine(Protocol):
    """What answers with the raw predictions of a multitude in evaluation."""

    def __call__(self, x: Input, **options: Any) -> Tensor:
        """`[B, ...] -> [S, B, ...]`, float32 or better, for batches of any size."""
        ...

    def told(self) -> list[tuple[str, str]]:
        """Rows of the summary: what, and how."""
        ...


class Plain:
    """A copy of a multitude, run by torch as it is, in a precision; layers that draw go on drawing.

    Its weights have the precision where the network runs like that, and otherwise torch's autocast is on.
    """

    def __init__(self, net: Multitude, dtype: torch.dtype, example: Input) -> None:
        self.net, self.dtype, self.autocast = net, dtype, False
        if self._is_as_it_is(net):
            return
        for self.autocast, laid_out in itertools.product((False, True), (True, False)):
            self.net = copied(net) if self.autocast else copied(net).to(dtype)
            self.net = _laid_out(self.net) if laid_out else self.net
            try:
                self(example)
                return
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, ValueError) as error:
                reason = str(error).splitlines()[0]
        raise ValueError(f"the network cannot run in {str(dtype).removeprefix('torch.')}: {reason}")

    def _is_as_it_is(self, net: Multitude) -> bool:
        tensors = [*net.parameters(), *net.buffers()]
        return not any(
            tensor.is_cuda or (tensor.is_floating_point() and tensor.dtype != self.dtype) for tensor in tensors
        )

    @torch.no_grad()
    def __call__(self, x: Input, **options: Any) -> Tensor:
        with self.precision():
            found: Tensor = self.net(self.prepared(x), **options)
        return found if found.dtype == torch.float64 else found.float()

    @property
    def device(self) -> torch.device:
        return next((tensor.device for tensor in self.net.parameters()), torch.device("cpu"))

    def precision(self) -> AbstractContextManager[Any]:
        """Inside, the network computes in its precision."""
        return torch.autocast(self.device.type, self.dtype) if self.autocast else nullcontext()

    def prepared(self, x: Input) -> Input:
        """An input in the dtype of the weights."""
        dtype = torch.float32 if self.autocast else self.dtype
        return mapped(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, x)

    def told(self) -> list[tuple[str, str]]:
        return [("run by", "torch, as it is" + (", with autocast" if self.autocast else ""))]


class Reference:
    """The network as it was, which quick predictions are compared with; `plain` runs it in the precision of these."""

    def __init__(self, net: Multitude, plain: Plain, options: Mapping[str, Any]) -> None:
        self.net, self.plain, self.options = net, plain, options

    @torch.no_grad()
    def off(self, quick: Callable[..., Tensor], x: Input) -> tuple[float, float, float]:
        """How far quick predictions are from the network's, how far it is itself in that precision, and the bound."""
        dtype = next((p.dtype for p in self.net.parameters() if p.is_floating_point()), torch.float32)
        same = mapped(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, x)
        want = self.net(same, **self.options)
        own = distance(self.plain(x, **self.options), want)
        bound = max(FURTHER * own, rounding(self.plain.dtype, want.device))
        return distance(quick(x, **self.options), want), own, bound


class Proven:
    """An engine for inputs of a shape, whatever their number, once it has agreed with the network as it was.

    Without a reference it need not agree, but run. `note` is for the summary.
    """

    def __init__(self, quick: Engine, plain: Plain, reference: Reference | None, draws: bool, note: str = "") -> None:
        self.quick, self.plain, self.reference, self.draws, self.note = quick, plain, reference, draws, note
        self.agrees: dict[Any, bool] = {}

    def __call__(self, x: Input, **options: Any) -> Tensor:
        if options and not self.draws:  # about draws that the network does not make
            return self.plain(x, **options)
        key = kind_of(x), *(tuple(t.shape[1:]) for t in tensors_in(x)), min(2, len(tensors_in(x)[0]))
        if key not in self.agrees:
            self.agrees[key] = self._tried(x)
        return (self.quick if self.agrees[key] else self.plain)(x, **options)

    def _tried(self, x: Input) -> bool:
        if not self.draws:
            self.plain(x)  # what is wrong with an input is said by the network itself
        try:
            if self.reference is None:
                self.quick(x)
                return True
            off, _, bound = self.reference.off(self.quick, x)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, TypeError, IndexError):
            return False
        if off > bound:
            shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors_in(x))
            warnings.warn(
                f"x of shape {shapes}: the quick predictions differ from the network's by {off:.1e}, so the network "
                "runs as it was",
                stacklevel=2,
            )
        return off <= bound

    def told(self) -> list[tuple[str, str]]:
        return [*self.quick.told(), *([("", self.note)] if self.note else [])]


def _laid_out(net: Multitude) -> Multitude:
    """A multitude's images and kernels channels-last, where it is on a GPU, whose convolutions are faster so."""
    on_gpu = any(parameter.is_cuda for parameter in net.parameters())
    images = any(isinstance(module, nn.Conv2d) for module in net.network.modules())
    return net.to(memory_format=torch.channels_last) if on_gpu and images else net  # type: ignore[call-overload]


def distance(got: Tensor, want: Tensor) -> float:
    """How far predictions `[S, B, ...]` are from others, relative to how much these vary; the largest of the S."""
    if got.shape != want.shape or not torch.equal(got.isfinite(), want.isfinite()):
        return float("inf")
    got, want = (values.double().nan_to_num(0, 0, 0).reshape(len(values), -1) for values in (got, want))
    if not want.numel():
        return 0.0
    spread = (want - want.mean(1, keepdim=True)).norm(dim=1).maximum(1e-3 * want.norm(dim=1))
    return float(((got - want).norm(dim=1) / spread.clamp(min=1e-30)).max())
