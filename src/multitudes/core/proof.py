"""Proofs: a quick way to run a network is compared with the plain one before it is used.

Members may lie side by side in one batch, draws run under `torch.vmap`, layers be packed: all of that is right for most
networks, and silently wrong for some. So the first input of each kind goes both ways, in the mode in which it is used.
The comparison is made without noise and with moved weights, since a gate that starts at zero hides what is behind it;
it leaves no trace in buffers, attributes or random states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from multitudes.core.calling import Input, mapped, plain_attention, rows, tensors_in
from multitudes.core.dispatching import NumbersDrawn
from multitudes.core.draws.stochastic import expecting
from multitudes.core.noise import STILL, Redrawn
from multitudes.core.settings import holding
from multitudes.core.trace import Call, python_states, recording, unmoved

__all__ = [
    "alike",
    "first_difference",
    "is_half",
    "moved_weights",
    "rows_interact",
    "running_statistics",
    "silent_trial",
]


# -- nothing is left of a trial ----------------------------------------------------------------------------


@contextmanager
def silent_trial(network: nn.Module, x: Input) -> Iterator[Callable[[], str]]:
    """Run a network with moved weights, without noise and gradients, and leave it as it was.

    Yield a function that returns, once the network has run, why that proves nothing: random numbers that are drawn in
    an unknown way, or control flow on values.
    """
    with (
        unmoved(network, x),
        torch.no_grad(),
        moved_weights(network),
        expecting(network),
        Redrawn(STILL),
        recording(network, (), looks=network.parameters()) as trace,
        NumbersDrawn() as drawn,
    ):
        before = python_states()

        def doubt() -> str:
            if drawn.seen or any(get() != state for get, _, state in before):
                return "it draws random numbers in a way that cannot be compared"
            return "its code inspects values, so that one row may decide for another" if trace.looks else ""

        yield doubt


@contextmanager
def moved_weights(network: nn.Module) -> Iterator[None]:
    """Replace every weight by another of about the same size, none of them nearly zero."""
    before = [(parameter, parameter.data) for parameter in network.parameters()]
    for number, (parameter, data) in enumerate(before):
        if data.is_floating_point() and data.layout is torch.strided and data.numel():
            generator = torch.Generator(data.device).manual_seed(number)
            noise = torch.randn(data.shape, generator=generator, dtype=data.dtype, device=data.device)
            size = data.float().square().mean().sqrt()
            fan_in = max(1, data.numel() // max(1, data.shape[0])) if data.dim() > 1 else 1
            usual = 0.3 * fan_in**-0.5  # of what is much smaller than that, a gate of 1e-6 say, the effect is hidden
            by = torch.where(size > 0.1 * usual, 0.1 * size, usual)
            parameter.data = data + (noise * by).to(data.dtype)
    try:
        yield
    finally:
        for parameter, data in before:
            parameter.data = data


def running_statistics(network: nn.Module) -> AbstractContextManager[None]:
    """Let batch norms and spectral norms compute with the statistics that they keep, in training too."""
    return holding(filter(_keeps_statistics, network.modules()), "training", False)


def _keeps_statistics(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return bool(module.track_running_stats)
    hooks = module._forward_pre_hooks.values()
    return isinstance(module, _SpectralNorm) or any(isinstance(hook, SpectralNorm) for hook in hooks)


# -- comparing ---------------------------------------------------------------------------------------------


def alike(got: Tensor, want: Tensor) -> bool:
    """Return whether two computations of the same values `[S, ...]` agree, each of the S to float rounding."""
    with torch._C.DisableTorchFunction():  # what watches the computations does not watch this
        return _alike(got, want)


def _alike(got: Tensor, want: Tensor) -> bool:
    if got.shape != want.shape or (got.dtype != want.dtype and not is_half(want)):
        return False
    if not want.numel():
        return True
    half, tolerance = is_half(want), _tolerance(want)
    got, want = (_real(values).flatten(1) for values in (got, want))
    if not torch.equal(got.isfinite(), want.isfinite()):
        return False
    if half:
        error, size = ((values.nan_to_num(0, 0, 0)).norm(dim=1) for values in (got - want, want))
        return bool((error <= 0.1 * size.clamp(min=1e-12)).all())
    error = (got - want).nan_to_num(0, 0, 0).abs().amax(1)
    values = want.nan_to_num(0, 0, 0)
    spread = (values - values.mean(1, keepdim=True)).abs().amax(1).maximum(1e-3 * values.abs().amax(1))
    return bool((error <= tolerance * spread.clamp(min=1e-12)).all())


def first_difference(
    network: nn.Module,
    quick: Callable[[], Any],
    plain: Callable[[], Any],
    part: Callable[[Tensor], Tensor | None],
) -> str:
    """The first layer whose output, or the `part` of it that counts, differs between two ways to run a network."""
    wrappers = [module for module in network.modules() if hasattr(type(module), "wraps")]
    inside = {id(module) for wrapper in wrappers for module in wrapper.modules() if module is not wrapper}
    names = [name for name, module in network.named_modules() if name and id(module) not in inside]

    def outputs(run: Callable[[], Any]) -> list[Call]:
        with recording(network, names) as trace:
            run()
        return [call for call in trace.ended if isinstance(call.output, Tensor)]

    for quickly, plainly in zip(outputs(quick), outputs(plain), strict=False):
        own, want = part(quickly.output.detach()), plainly.output.detach()
        if own is None or own.shape != want.shape or not alike(own[None], want[None]):
            return f"layer {quickly.name!r} ({type(quickly.module).__name__})"
    return ""


def rows_interact(network: nn.Module, predict: Callable[[Input], Tensor], x: Input) -> str:
    """Return how the prediction for one input depends on the other inputs of a batch; nothing where it does not.

    `predict` gives predictions `[S, B, ...]`. The last half of the batch runs alone, in reverse order, with moved
    weights and without noise. One input alone runs beside another one.
    """
    if len(tensors_in(x)[0]) == 1:
        x = mapped(_with_another, x)
    batch = len(tensors_in(x)[0])
    order = torch.arange(batch - 1, (batch - 1) // 2, -1, device=tensors_in(x)[0].device)
    with plain_attention(), silent_trial(network, x) as doubt:
        every = predict(x)
        try:
            some = predict(rows(x, order))
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            return f"the network fails for fewer rows ({str(error).splitlines()[0]})"
        if reason := doubt():
            return reason
        if every.dim() > 1 and every.shape[1] == batch and alike(some, every[:, order]):
            return ""
    return "the first axis of x is not the batch, or rows affect each other"


def _with_another(x: Tensor) -> Tensor:
    """A tensor of one row and another row: of other numbers, or of the same ids."""
    if x.shape[:1] != (1,):
        return x
    other = torch.rand(x.shape, generator=torch.Generator().manual_seed(0)).to(x) if x.is_floating_point() else x
    return torch.cat([x, other])


def _real(values: Tensor) -> Tensor:
    values = values.detach()
    values = torch.view_as_real(values) if values.is_complex() else values
    return (values if values.dtype == torch.float64 else values.float()).reshape(len(values), -1)


def is_half(values: Tensor) -> bool:
    """Return whether values are computed with half the bits, by dtype or autocast."""
    return torch.is_autocast_enabled(values.device.type) or values.dtype in (torch.bfloat16, torch.float16)


def _tolerance(values: Tensor) -> float:
    if values.is_cuda:  # TensorFloat-32
        return 0.02
    return 1e-6 if values.dtype in (torch.float64, torch.complex128) else 2e-3
