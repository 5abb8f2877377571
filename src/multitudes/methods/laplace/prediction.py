"""Multitudes with a posterior over their output layer: prediction by draws or in closed form."""

from __future__ import annotations

import math
from statistics import NormalDist

import torch
from torch import Tensor, nn

from multitudes.base.checks import check_choice
from multitudes.ensemble.members import Members
from multitudes.ensemble.multitude import Multitude, plain
from multitudes.methods.laplace.layers import LaplaceLayer, WithoutDraws
from multitudes.networks.calls import Input, InputError
from multitudes.networks.copies import copied
from multitudes.networks.settings import override_attribute
from multitudes.networks.stochastic import expecting, stochastic_layers
from multitudes.tasks import Task


class Laplace(Multitude):
    """A network whose output layer has a Gaussian posterior.

    `approximation` is how it predicts: by `"draws"` of the output layer; by `"probit"` (MacKay) for classes, with one
    prediction per member; or `"exact"` for values, with as many points as draws. Their mean and variance are the
    posterior's, so epistemic variance and noise stay separate.
    """

    _approximation = "draws"

    @property
    def layer(self) -> LaplaceLayer:
        """The output layer."""
        return _layers(self.network)[0]

    @property
    def structure(self) -> str:
        """Structure of the posterior covariance: "full", "kron" or "diag"."""
        return self.layer.structure

    @property
    def prior(self) -> Tensor:
        """Precision of the prior over weights, `[]`, or per member, `[M]`."""
        return self._per_member([layer.prior for layer in _layers(self.network)])

    @property
    def log_marginal_likelihood(self) -> Tensor:
        """Log marginal likelihood of the training data, `[]`, or per member, `[M]`."""
        return self._per_member([layer.evidence for layer in _layers(self.network)])

    def _per_member(self, values: list[Tensor]) -> Tensor:
        return torch.stack(values) if isinstance(self, Members) else values[0]

    @property
    def approximation(self) -> str:
        """Current way to predict: "draws", "probit" or "exact"."""
        return self._approximation

    @approximation.setter
    def approximation(self, name: str) -> None:
        check_choice("approximation", name, approximations(self.reading))
        self._approximation = name

    def member(self, index: int) -> nn.Module:
        """Return member `index` as a `Laplace` of its own."""
        alone = Laplace(plain(super().member(index))).like(self)
        alone._approximation, alone.notes = self._approximation, dict(self.notes)
        return alone

    def _all_draws(
        self, x: Input, draws: int | None, seed: int | None = None, memory: str | float | None = None
    ) -> Tensor:
        if self._approximation == "draws" or self.training or draws == 0 or self._count(draws) is None:
            return super()._all_draws(x, draws, seed, memory)
        if draws is not None:
            raise InputError(f"draws={draws} needs approximation='draws', got {self._approximation!r}")
        with expecting(self.network):
            if self._approximation == "probit":
                return self._read("probit", x)
            middle, deviation = self._predictions(x), self._read("deviation", x)
        means, rest = middle.chunk(2, 2)  # rest: raw variances, the same for all points
        spread = deviation.chunk(2, 2)[0]
        points = [torch.cat([means + point * spread, rest], 2) for point in _points(max(2, self.draws))]
        return torch.stack(points, 1).flatten(0, 1)

    def without_draws(self, points: int) -> Members | None:
        """Return members that draw nothing and predict the same, `points` per member for values; None if it draws."""
        if self._approximation == "draws":
            return None
        members = [plain(self.member(index)) for index in range(self.members)]
        sides = [None] if self._approximation == "probit" else _points(max(2, points))
        networks = [_without_draws(network, side) for network in members for side in sides]
        return Members(networks, len(networks)).like(self)

    def _read(self, side: str, x: Input) -> Tensor:
        with override_attribute(_layers(self.network), "side", side):
            return self._predictions(x)

    def draw_numbers(self, x: Input, numbers: range, seed: int | None, memory: str | float | None) -> Tensor:
        if self._approximation != "draws":
            raise InputError(f"draws='auto' needs approximation='draws', got {self._approximation!r}")
        return super().draw_numbers(x, numbers, seed, memory)


class LaplaceMembers(Laplace, Members):
    """Independent members, each with a posterior over its own output layer: a mixture of Laplaces."""


def _layers(network: nn.Module) -> list[LaplaceLayer]:
    return [layer for layer in stochastic_layers(network) if isinstance(layer, LaplaceLayer)]


def approximations(task: Task) -> tuple[str, ...]:
    """Return the ways to predict for a task."""
    return ("draws", "probit") if task.classes else ("draws", "exact")


def _points(count: int) -> list[float]:
    """Return normal quantiles at evenly spaced probabilities, rescaled to variance 1."""
    points = [NormalDist().inv_cdf((index + 0.5) / count) for index in range(count)]
    scale = math.sqrt(sum(point**2 for point in points) / count)
    return [point / scale for point in points]


def _without_draws(network: nn.Module, point: float | None) -> nn.Module:
    layers = _layers(network)
    others = [type(layer).__name__ for layer in stochastic_layers(network) if not isinstance(layer, LaplaceLayer)]
    if others:
        raise ValueError(f"other layers of the network draw ({others[0]}), so approximation must be 'draws'")
    return copied(network, {id(layer): WithoutDraws(copied(layer), point) for layer in layers})
