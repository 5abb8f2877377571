"""Verify on an example that each member of a multitude computes and learns as it would alone."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from multitudes.base.checks import plural
from multitudes.ensemble.members import Members
from multitudes.ensemble.multitude import Multitude
from multitudes.ensemble.runners.independent import RUNNERS
from multitudes.ensemble.shared import SharedMembers
from multitudes.networks.calls import Input, call, map_tensors, plain_attention, tensors_in
from multitudes.networks.copies import copied
from multitudes.networks.random_functions import STILL, RandomFrom
from multitudes.networks.stochastic import expecting, stochastic_layers
from multitudes.networks.verification import running_statistics


@dataclass(frozen=True)
class Checked:
    """The comparisons made by `check`, one sentence each."""

    compared: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join(self.compared)


def check(net: Multitude, example: Input, tolerance: float = 1e-4) -> Checked:
    """Verify a multitude on an example; return the comparisons. `net` does not change.

    In evaluation and in training, the predictions, gradients and buffers of each member must equal those of
    `net.member(i)` alone, with every runner that can run the network. If members share no weight, no prediction may
    depend on another member's weights. If layers draw, draws must differ, and a seed must repeat them.

    Args:
        net: The multitude.
        example: A batch of inputs.
        tolerance: Largest relative difference.

    Raises:
        ValueError: At the first difference; it names the member and the tensor.

    Example:
        >>> from multitudes.methods.deep_ensemble import deep_ensemble
        >>> print(check(deep_ensemble(nn.Linear(3, 2), members=2), torch.randn(4, 3)))
        loop: predictions and gradients of 2 members agree with each member alone, in evaluation and in training
        loop: no prediction depends on another member's weights
        packed: predictions and gradients of 2 members agree with each member alone, in evaluation and in training
        packed: no prediction depends on another member's weights
        vmapped: predictions and gradients of 2 members agree with each member alone, in evaluation and in training
        vmapped: no prediction depends on another member's weights
    """
    if not isinstance(net, Multitude):
        raise ValueError(f"net must be a multitude, got {type(net).__name__}")
    compared: list[str] = []
    for runner in RUNNERS[1:] if isinstance(net, Members) else ("auto",):
        with warnings.catch_warnings(), suppress(_Refused):
            warnings.simplefilter("ignore")  # from fast runners that are not used
            compared += _Proof(net, example, tolerance, runner).run()
    if stochastic_layers(net.network):
        _check_draws(copied(net).eval(), example)
        compared.append("four draws differ, the same seed repeats them, and another seed does not")
    return Checked(compared)


Measured = dict[str, Tensor]
"""A member's predictions, gradients and buffers, by name."""


class _Refused(Exception):
    """Raised if the runner refuses the network and so is never used."""


@dataclass
class _Proof:
    net: Multitude
    example: Input
    tolerance: float
    runner: str

    def run(self) -> list[str]:
        """Compare the multitude with its members; return the comparisons, one sentence each."""
        self._together(training=False)  # raises if the runner refuses the network
        modes = (False, True) if isinstance(self.net, (Members, SharedMembers)) or self.net.members == 1 else (False,)
        for training in modes:
            self._compare(training)
        name = "" if self.runner == "auto" else f"{self.runner}: "
        where = "in evaluation and in training" if len(modes) > 1 else "in evaluation"
        members = plural(self.net.members, "member")
        compared = [f"{name}predictions and gradients of {members} agree with each member alone, {where}"]
        if self.net.independent:
            self._check_independent()
            compared.append(f"{name}no prediction depends on another member's weights")
        return compared

    def _together(self, training: bool, poisoned: int | None = None) -> list[Measured]:
        """Run the multitude; set the weights of the `poisoned` member alone to NaN."""
        one = copied(self.net).train(training)
        for tensor in [] if poisoned is None else _tensors_of_member(one, poisoned):
            if tensor.is_floating_point() or tensor.is_complex():
                tensor.fill_(torch.nan)
        networks: list[nn.Module] = [one] * one.members
        with self._quiet(one):
            try:
                if isinstance(one, Members):
                    one.runner, networks = self.runner, list(one.network)
                return self._measured(networks, lambda x: one(x, draws=0).unflatten(0, (one.members, -1)))
            except ValueError as refusal:
                if self.runner in ("packed", "vmapped"):
                    raise _Refused from refusal
                raise

    def _alone(self, index: int, training: bool) -> Measured:
        member = copied(self.net.member(index)).train(training)
        run = partial(member, draws=0) if isinstance(member, Multitude) else partial(call, member)
        with self._quiet(member):
            return self._measured([member], lambda x: run(x).unsqueeze(0))[0]

    def _measured(self, networks: list[nn.Module], run: Callable[[Input], Tensor]) -> list[Measured]:
        """Run, and return each member's predictions, gradients and buffers; `networks` hold the members' weights."""
        x = map_tensors(lambda t: t.detach().clone().requires_grad_(t.is_floating_point()), self.example)
        predictions = run(x)
        # The gradients are those of a random sum of a member's predictions, the same for all members.
        generator = torch.Generator().manual_seed(0)
        mixture = torch.randn(predictions.shape[1:], generator=generator, dtype=torch.float64).to(predictions)
        inputs = {f"x[{i}]": t for i, t in enumerate(tensors_in(x)) if t.requires_grad}
        found: list[Measured] = []
        for part, network in zip(predictions, networks, strict=True):
            measured = {"its predictions": part.detach()}
            wanted = {name: p for name, p in network.named_parameters() if p.requires_grad} | inputs
            if part.requires_grad and wanted:
                gradients = torch.autograd.grad(
                    (part * mixture).sum(), list(wanted.values()), retain_graph=True, materialize_grads=True
                )
                measured |= {f"the gradient of {name}": one for name, one in zip(wanted, gradients, strict=True)}
            if isinstance(self.net, Members):
                measured |= {f"buffer {name}": _number(buffer).clone() for name, buffer in network.named_buffers()}
            found.append(measured)
        return found

    @contextmanager
    def _quiet(self, network: nn.Module) -> Iterator[None]:
        """Turn noise off; make batch norms of shared members use their running statistics."""
        norms = nullcontext() if isinstance(self.net, Members) else running_statistics(network)
        with torch.enable_grad(), plain_attention(), expecting(network), RandomFrom(STILL), norms:
            yield

    def _compare(self, training: bool) -> None:
        mode = "training" if training else "evaluation"
        for index, mine in enumerate(self._together(training)):
            alone = self._alone(index, training)
            alone["its predictions"] = alone["its predictions"].reshape(mine["its predictions"].shape)
            both = [n for n in mine if n in alone and ("gradient" not in n or mine[n].shape == alone[n].shape)]
            steepest = max([1.0, *(_largest(alone[name]) for name in both if "gradient" in name)])
            for name in both:
                # Rounding errors add up in the backward pass: measure gradients relative to the largest.
                got, want = mine[name], alone[name]
                scale = 10 * steepest if "gradient" in name else max(1.0, _largest(want[want.isfinite()]))
                # Equal infinities, as in masks, do not differ.
                error = _largest(torch.where(got == want, 0, got - want)) if got.shape == want.shape else math.nan
                if not error <= self.tolerance * scale:
                    where = f"member {index} differs from net.member({index}) alone in {mode}"
                    raise ValueError(f"{where}: {name} by {error:.2e} (runner {self.runner!r})")

    def _check_independent(self) -> None:
        before = self._together(training=False)
        for poisoned in range(self.net.members):
            after = self._together(False, poisoned)
            for index, pair in enumerate(zip(before, after, strict=True)):
                was, now = (measured["its predictions"] for measured in pair)
                if index != poisoned and not torch.allclose(was, now, rtol=self.tolerance, atol=self.tolerance):
                    raise ValueError(
                        f"member {index} depends on the weights of member {poisoned} (runner {self.runner!r})"
                    )


def _tensors_of_member(net: Multitude, index: int) -> list[Tensor]:
    """Return the data of the parameters that belong to one member alone."""
    if isinstance(net, Members):
        shared = {id(parameter) for _, parameter in net._shared}
        return [parameter.data for parameter in net.network[index].parameters() if id(parameter) not in shared]
    own = net._own_names() if isinstance(net, SharedMembers) else {name for name, _ in net.named_parameters()}
    return [parameter.data[index] for name, parameter in net.named_parameters() if name in own]


def _largest(values: Tensor) -> float:
    return values.abs().max().item() if values.numel() else 0.0


def _number(buffer: Tensor) -> Tensor:
    return buffer if buffer.is_floating_point() or buffer.is_complex() else buffer.double()


@torch.no_grad()
def _check_draws(net: Multitude, example: Input) -> None:
    drawn = net(example, draws=4, seed=0)
    each = drawn.unflatten(0, (net.members, -1))
    if all(torch.equal(each[:, 0], each[:, number]) for number in range(1, each.shape[1])):
        raise ValueError("four draws are equal: no layer draws")
    if not torch.equal(drawn, net(example, draws=4, seed=0)):
        raise ValueError("the same seed gives different draws")
    if torch.equal(drawn, net(example, draws=4, seed=1)):
        raise ValueError("another seed gives the same draws")
