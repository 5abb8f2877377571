"""`check`: the proof, on an example, that each member of a multitude computes what it would alone."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from multitudes.core.calling import Input, call
from multitudes.core.members import Members
from multitudes.core.multitude import Multitude

__all__ = ["check"]


def check(net: Multitude, example: Input, tolerance: float = 1e-4) -> None:
    """Prove a multitude right on an example, or raise a ValueError that says where it is wrong.

    Each member's prediction must equal that of `net.member(i)` alone. Where members share no weight, no
    prediction may depend on another member's weights: with one member's weights set to NaN, the others' are
    the same. Every runner that can run the network is checked. Where layers draw, expectations are compared.
    """
    for runner in ("loop", "packed", "stacked") if isinstance(net, Members) else ("auto",):
        one = copy.deepcopy(net).eval()
        with torch.no_grad():
            try:
                if isinstance(one, Members):
                    one.runner = runner
                predictions = one(example, draws=0)
            except ValueError:
                if runner in ("packed", "stacked"):  # refused, so never used
                    continue
                raise
            _check_equal(one, example, predictions, tolerance, runner)
            if one.independent:
                _check_independent(one, example, predictions, tolerance, runner)


def _check_equal(net: Multitude, example: Input, together: Tensor, tolerance: float, runner: str) -> None:
    for index, prediction in enumerate(together.unflatten(0, (net.members, -1))):
        member = net.member(index).eval()
        alone = member(example, draws=0) if isinstance(member, Multitude) else call(member, example)
        alone = alone.view_as(prediction)
        error = (prediction - alone).abs().max().item()
        if not error <= tolerance * max(1.0, alone.abs().max().item()):
            raise ValueError(f"member {index} differs from itself alone by {error:.2e} (runner {runner!r})")


def _check_independent(net: Multitude, example: Input, before: Tensor, tolerance: float, runner: str) -> None:
    for poisoned in range(net.members):
        other = copy.deepcopy(net)
        for parameter in other.parameters():
            parameter[poisoned] = torch.nan
        groups = zip(
            before.unflatten(0, (net.members, -1)),
            other(example, draws=0).unflatten(0, (net.members, -1)),
            strict=True,
        )
        for index, (was, now) in enumerate(groups):
            if index != poisoned and not torch.allclose(was, now, rtol=tolerance, atol=tolerance):
                raise ValueError(f"member {index} depends on the weights of member {poisoned} (runner {runner!r})")
