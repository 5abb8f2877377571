"""Verify a fast runner against the plain one before its first use.

Members side by side in one batch, draws under `torch.vmap` and packed layers are right for most networks, and silently
wrong for some. So the first input of each kind runs both ways, in the mode in which it is used. The comparison runs
without noise, and with moved weights, since a gate at zero hides what follows it. It restores buffers, attributes and
random states. `Verdicts` caches the result for each runner, mode and kind of input:

    reason = verdicts.reason("packed", network, x, lambda: difference(network, x, packed, loop, buffers=True))
    predictions = loop(x) if reason else packed(x)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from multitudes.networks.architecture import dense
from multitudes.networks.calls import Input, map_tensors, plain_attention, select_rows, tensors_in, verdict_key
from multitudes.networks.dispatch import uncompiled
from multitudes.networks.random_functions import STILL, RandomFrom
from multitudes.networks.settings import override_attribute
from multitudes.networks.stochastic import expecting
from multitudes.networks.trace import Call, preserve_state, preserve_writes, recording

Runner = Callable[[Any], Tensor]
"""A function from an input to predictions `[S, B, ...]`."""

FAILURES = (
    RuntimeError, ValueError, TypeError, AttributeError, LookupError, AssertionError, ArithmeticError, StopIteration,
)  # fmt: skip
"""Errors of a fast runner that count as a difference. `torch.OutOfMemoryError` is raised instead."""


# -- trials without side effects ---------------------------------------------------------------------------


@contextmanager
def silent_trial(network: nn.Module, x: Input) -> Iterator[Callable[[], str]]:
    """Move the weights of a network and turn off noise and gradients inside `with`; restore its state.

    Yield a function to call after a run. It returns why the run proves nothing (random numbers from an unknown
    function, or control flow that depends on values), or "".
    """
    with (
        preserve_state(network, x) as drew,
        torch.no_grad(),
        moved_weights(network),
        expecting(network),
        RandomFrom(STILL),
        recording(network, (), inspected=network.parameters()) as trace,
    ):

        def doubt() -> str:
            if drew():
                return "it draws random numbers by an unknown function, so runs cannot be compared"
            return "its code inspects values, so one row may affect another" if trace.inspections else ""

        yield doubt


@contextmanager
def moved_weights(network: nn.Module) -> Iterator[None]:
    """Replace each weight inside `with` by one of about the same size that is not nearly zero.

    Clear autocast's cache of cast weights before and after.
    """
    torch.clear_autocast_cache()
    before = [(parameter, parameter.data) for parameter in network.parameters()]
    try:  # memory may run out
        for number, (parameter, data) in enumerate(before):
            if data.is_floating_point() and data.layout is torch.strided and data.numel():
                generator = torch.Generator(data.device).manual_seed(number)
                noise = torch.randn(data.shape, generator=generator, dtype=data.dtype, device=data.device)
                size = data.float().square().mean().sqrt()
                fan_in = max(1, data.numel() // max(1, data.shape[0])) if data.dim() > 1 else 1
                usual = 0.3 * fan_in**-0.5  # a much smaller weight, such as a gate of 1e-6, hides its effect
                by = torch.where(size > 0.1 * usual, 0.1 * size, usual)
                parameter.data = data + (noise * by).to(data.dtype)
        yield
    finally:
        for parameter, data in before:
            parameter.data = data
        torch.clear_autocast_cache()


def running_statistics(*networks: nn.Module) -> AbstractContextManager[None]:
    """Make batch norms and spectral norms use their running statistics, even in training."""
    modules = (module for network in networks for module in network.modules())
    return override_attribute(filter(_keeps_statistics, modules), "training", False)


def _keeps_statistics(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return bool(module.track_running_stats)
    hooks = module._forward_pre_hooks.values()
    return isinstance(module, _SpectralNorm) or any(isinstance(hook, SpectralNorm) for hook in hooks)


# -- comparing ---------------------------------------------------------------------------------------------


def agree(got: Tensor, want: Tensor) -> bool:
    """Return whether each of S predictions, `[S, ...]`, is equal to the other up to rounding."""
    if got.shape != want.shape or (got.dtype != want.dtype and not _is_half(want)):
        return False
    with torch._C.DisableTorchFunction():  # hide the comparison from outer modes
        if not want.numel():
            return True
        half, tolerance = _is_half(want), _tolerance(want)
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


def _real(values: Tensor) -> Tensor:
    values = values.detach()
    values = torch.view_as_real(values) if values.is_complex() else values
    return (values if values.dtype == torch.float64 else values.float()).reshape(len(values), -1)


def _is_half(values: Tensor) -> bool:
    """Return whether values are computed in half precision, by dtype or autocast."""
    return torch.is_autocast_enabled(values.device.type) or values.dtype in (torch.bfloat16, torch.float16)


def _tolerance(values: Tensor) -> float:
    if values.is_cuda:  # TensorFloat-32
        return 0.02
    return 1e-6 if values.dtype in (torch.float64, torch.complex128) else 2e-4


# -- runners ---------------------------------------------------------------------------------------------


FEW_ROWS = 8
"""The maximum number of rows whose gradients are compared, which takes the memory of a training step."""


def difference(
    network: nn.Module,
    x: Input,
    fast: Runner,
    plain: Runner,
    *,
    buffers: bool = False,
    gradients: bool = False,
    copies: Sequence[nn.Module] = (),
    layer: Callable[[], str] | None = None,
) -> str:
    """Describe how `fast` differs from `plain` on an input; return "" if they agree.

    Both run as in `silent_trial`.

    Args:
        network: the network that both run.
        x: the input.
        fast: the runner to verify.
        plain: the runner to compare it with.
        buffers: compare the buffers after the runs too.
        gradients: compare the gradients of trained parameters too. Batch norms then use their running statistics, in
            `network` and in the `copies`.
        copies: copies of the network that `fast` runs.
        layer: returns the name of the first layer that differs; called if predictions differ.
    """
    with silent_trial(network, x) as doubt:
        want = _outcome(network, x, plain, buffers)
        if trouble := doubt():
            return trouble
        try:
            got = _outcome(network, x, fast, buffers)
        except torch.OutOfMemoryError:
            raise
        except FAILURES as error:
            return f"it fails: {(str(error) or type(error).__name__).splitlines()[0]}"
        if trouble := doubt():
            return trouble
        if not agree(got.pop(""), want.pop("")):
            try:
                place = layer() if layer is not None else ""
            except FAILURES:  # layers that get transformed tensors cannot be compared
                place = ""
            return f"{place} gives other values" if place else "it gives other predictions"
        wrong = [name for name in want if name not in got or not agree(got[name][None], want[name][None])]
        if wrong:
            return f"buffer {wrong[0]!r} gets other values"
        return _difference_of_gradients(network, x, fast, plain, copies) if gradients else ""


def _difference_of_gradients(
    network: nn.Module, x: Input, fast: Runner, plain: Runner, copies: Sequence[nn.Module]
) -> str:
    """Return the first parameter whose gradient differs, for a weighted sum of the predictions of a few rows."""
    trained = {name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad}
    if not trained:
        return ""

    def of(runner: Runner, x: Input) -> list[Tensor | None]:
        # Gradients through the batch statistics of a few rows are ill-conditioned.
        with preserve_state(network, x), torch.enable_grad(), running_statistics(network, *copies):
            predictions = runner(x)
            if not predictions.requires_grad:
                return [None] * len(trained)
            weights = torch.linspace(0.5, 1.5, predictions.numel(), device=predictions.device).view_as(predictions)
            real = torch.view_as_real(predictions).sum(-1) if predictions.is_complex() else predictions
            return list(torch.autograd.grad((real * weights).sum(), list(trained.values()), allow_unused=True))

    first = tensors_in(x)[0]
    many = first.dim() > 0 and len(first) > FEW_ROWS
    some = select_rows(x, torch.arange(FEW_ROWS, device=first.device)) if many else x
    try:
        try:
            want, got = of(plain, some), of(fast, some)
        except FAILURES:  # the network may need a fixed batch size
            want, got = of(plain, x), of(fast, x)
        half = any(_is_half(one) for one in want if one is not None)
        wrong = _steepest_difference(trained, got, want, 0.1 if half else 1e-2)
    except torch.OutOfMemoryError:
        raise
    except FAILURES as error:
        return f"its gradients cannot be compared: {(str(error) or type(error).__name__).splitlines()[0]}"
    return f"the gradient of {wrong!r} gets other values" if wrong else ""


def _steepest_difference(
    trained: dict[str, nn.Parameter], got: list[Tensor | None], want: list[Tensor | None], tolerance: float
) -> str:
    """Return the first parameter whose gradients differ by more than a share of the largest gradient of all."""
    steepest = max((_largest(one) for one in want if one is not None), default=0.0)
    for name, *both in zip(trained, want, got, strict=True):
        one, other = (torch.zeros_like(trained[name]) if each is None else each for each in both)
        if not torch.equal(one.isfinite(), other.isfinite()) or _largest(one - other) > tolerance * steepest:
            return name
    return ""


def _largest(values: Tensor) -> float:
    """Return the largest absolute value among the finite ones."""
    return float(values.abs().nan_to_num(0, 0, 0).max()) if values.numel() else 0.0


def _outcome(network: nn.Module, x: Input, runner: Runner, buffers: bool) -> dict[str, Tensor]:
    """Return the predictions of a run (key "") and the buffers after it (by name)."""
    with preserve_writes(network):
        predictions = runner(x)
        kept = network.named_buffers() if buffers else ()
        return {"": predictions, **{name: dense(buffer).clone() for name, buffer in kept}}


def first_difference(
    network: nn.Module,
    quick: Callable[[], Any],
    plain: Callable[[], Any],
    part: Callable[[Tensor], Tensor | None],
) -> str:
    """Return the first layer whose output differs between two runs, by comparing `part` of the quick one."""
    wrappers = [module for module in network.modules() if hasattr(type(module), "wraps")]
    inside = {id(module) for wrapper in wrappers for module in wrapper.modules() if module is not wrapper}
    names = [name for name, module in network.named_modules() if name and id(module) not in inside]

    def outputs(run: Callable[[], Any]) -> list[Call]:
        with recording(network, names) as trace:
            run()
        return [call for call in trace.ended if isinstance(call.output, Tensor)]

    for quickly, plainly in zip(outputs(quick), outputs(plain), strict=False):
        own, want = part(quickly.output.detach()), plainly.output.detach()
        if own is None or own.shape != want.shape or not agree(own[None], want[None]):
            return f"layer {quickly.name!r} ({type(quickly.module).__name__})"
    return ""


class Verdicts:
    """A cache of the differences between runners and the plain one, by runner and `verdict_key`.

    Nothing can be compared in compiled graphs, so they use the last verdict in the same mode.
    """

    def __init__(self) -> None:
        self.reasons: dict[tuple[Hashable, tuple[bool, Hashable]], str] = {}
        self.in_mode: dict[tuple[Hashable, bool], str] = {}

    def reason(self, runner: Hashable, network: nn.Module, x: Input, find: Callable[[], str]) -> str:
        """Return the verdict, cached or from `find`; "" if the runner may be used."""
        mode = runner, network.training
        if torch.compiler.is_compiling():
            return self.in_mode[mode] if mode in self.in_mode else self._find(mode, network, x, find)
        key = runner, verdict_key(network, x)
        return self.reasons[key] if key in self.reasons else self._find(mode, network, x, find)

    def forget(self, runner: Hashable, training: bool) -> None:
        """Remove the verdicts of a runner in a mode."""
        self.reasons = {key: r for key, r in self.reasons.items() if key[0] != runner or key[1][0] != training}
        self.in_mode.pop((runner, training), None)

    @uncompiled
    def _find(self, mode: tuple[Hashable, bool], network: nn.Module, x: Input, find: Callable[[], str]) -> str:
        reason = self.reasons[mode[0], verdict_key(network, x)] = self.in_mode[mode] = find()
        return reason


# -- rows ------------------------------------------------------------------------------------------------


def rows_interact(network: nn.Module, predict: Callable[[Input], Tensor], x: Input) -> str:
    """Describe how the prediction for one row depends on the rest of the batch; return "" if it does not.

    `predict` returns predictions `[S, B, ...]`. The last half of the batch runs alone, in reverse order, as in
    `silent_trial`. A second row is added to a single one.
    """
    if len(tensors_in(x)[0]) == 1:
        x = map_tensors(_with_another, x)
    batch = len(tensors_in(x)[0])
    order = torch.arange(batch - 1, (batch - 1) // 2, -1, device=tensors_in(x)[0].device)
    with plain_attention(), silent_trial(network, x) as doubt:
        every = predict(x)
        try:
            some = predict(select_rows(x, order))
        except torch.OutOfMemoryError:
            raise
        except FAILURES as error:
            return f"the network fails for fewer rows ({str(error).splitlines()[0]})"
        if reason := doubt():
            return reason
        if every.dim() > 1 and every.shape[1] == batch and agree(some, every[:, order]):
            return ""
    return "the first axis of x is not the batch, or rows affect each other"


def _with_another(x: Tensor) -> Tensor:
    """Append a row to a tensor of one row: random numbers, or the same ids."""
    if x.shape[:1] != (1,):
        return x
    other = torch.rand(x.shape, generator=torch.Generator().manual_seed(0)).to(x) if x.is_floating_point() else x
    return torch.cat([x, other])
