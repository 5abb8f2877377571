"""Verification: compare a fast runner with the plain one before it is used.

`difference` runs both on one input. `Verdicts` caches the answer for each runner, mode and kind of input:

    reason = verdicts.reason("packed", network, x, lambda: difference(network, x, packed, loop, buffers=True))
    predictions = loop(x) if reason else packed(x)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.core.architecture import dense
from multitudes.core.calling import Input, use_of
from multitudes.core.compiling import uncompiled
from multitudes.core.proof import alike, is_half, silent_trial
from multitudes.core.trace import unmoved, unwritten

__all__ = ["FAILURES", "Runner", "Verdicts", "difference"]

Runner = Callable[[Any], Tensor]
"""A way to run a network: an input to predictions `[S, B, ...]`."""

FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError)
"""Errors of a fast runner that count as a difference; too little memory does not."""


def difference(
    network: nn.Module,
    x: Input,
    fast: Runner,
    plain: Runner,
    *,
    buffers: bool = False,
    gradients: bool = False,
    layer: Callable[[], str] | None = None,
) -> str:
    """Return how `fast` differs from `plain` on an input, in words; an empty string where they agree.

    Both run with moved weights, without gradients and without noise, and leave buffers, attributes and random states
    as they were. With `buffers=True` both must also leave the same buffers in `network`. `layer` returns the name of
    the first layer that differs; it is called where predictions differ. With `gradients=True`, where a member's
    parameters are trained, the gradients of both must agree as well.
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
        if not alike(got.pop(""), want.pop("")):
            place = layer() if layer is not None else ""
            return f"{place} gives other values" if place else "it gives other predictions"
        wrong = [name for name in want if name not in got or not alike(got[name][None], want[name][None])]
        if wrong:
            return f"buffer {wrong[0]!r} gets other values"
        return _difference_of_gradients(network, x, fast, plain) if gradients else ""


def _difference_of_gradients(network: nn.Module, x: Input, fast: Runner, plain: Runner) -> str:
    """Return which parameter's gradient differs; it is that of a random mixture of the predictions."""
    trained = {name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad}
    if not trained:
        return ""

    def of(runner: Runner) -> list[Tensor | None]:
        with unmoved(network, x), torch.enable_grad():
            predictions = runner(x)
            if not predictions.requires_grad:
                return [None] * len(trained)
            weights = torch.linspace(0.5, 1.5, predictions.numel(), device=predictions.device).view_as(predictions)
            real = torch.view_as_real(predictions).sum(-1) if predictions.is_complex() else predictions
            return list(torch.autograd.grad((real * weights).sum(), list(trained.values()), allow_unused=True))

    try:
        want, got = of(plain), of(fast)
    except torch.OutOfMemoryError:
        raise
    except FAILURES as error:
        return f"its gradients cannot be compared: {(str(error) or type(error).__name__).splitlines()[0]}"
    half = any(is_half(one) for one in want if one is not None)
    steepest = max((_largest(one) for one in want if one is not None), default=0.0)
    for name, one, other in zip(trained, got, want, strict=True):
        one, other = (torch.zeros_like(trained[name]) if each is None else each for each in (one, other))
        same = torch.equal(one.isfinite(), other.isfinite())
        if not same or _largest(one - other) > (0.1 if half else 1e-2) * steepest:
            return f"the gradient of {name!r} gets other values"
    return ""


def _largest(values: Tensor) -> float:
    """Return the largest absolute value among the finite ones."""
    return float(values.abs().nan_to_num(0, 0, 0).max()) if values.numel() else 0.0


def _outcome(network: nn.Module, x: Input, runner: Runner, buffers: bool) -> dict[str, Tensor]:
    """The predictions of a run, by "", and the buffers after it, by their names."""
    with unwritten(network):
        predictions = runner(x)
        kept = network.named_buffers() if buffers else ()
        return {"": predictions, **{name: dense(buffer).clone() for name, buffer in kept}}


class Verdicts:
    """A cache of how runners differ from the plain one, by runner and use (`use_of`).

    While a graph is compiled nothing can be compared: the last verdict in the same mode counts.
    """

    def __init__(self) -> None:
        self.reasons: dict[tuple[Hashable, tuple[bool, Hashable]], str] = {}
        self.in_mode: dict[tuple[Hashable, bool], str] = {}

    def reason(self, runner: Hashable, network: nn.Module, x: Input, find: Callable[[], str]) -> str:
        """Return the cached verdict, or that of `find`; an empty string says that the runner may be used."""
        mode = runner, network.training
        if torch.compiler.is_compiling():
            return self.in_mode[mode] if mode in self.in_mode else self._find(mode, network, x, find)
        key = runner, use_of(network, x)
        return self.reasons[key] if key in self.reasons else self._find(mode, network, x, find)

    def forget(self, runner: Hashable, training: bool) -> None:
        """Forget the verdicts of a runner in a mode."""
        self.reasons = {key: r for key, r in self.reasons.items() if key[0] != runner or key[1][0] != training}
        self.in_mode.pop((runner, training), None)

    @uncompiled
    def _find(self, mode: tuple[Hashable, bool], network: nn.Module, x: Input, find: Callable[[], str]) -> str:
        reason = self.reasons[mode[0], use_of(network, x)] = self.in_mode[mode] = find()
        return reason
