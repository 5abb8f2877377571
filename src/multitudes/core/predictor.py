"""One interface for everything that predicts: multitudes, plain networks, calibrated networks, streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import nn

from multitudes.core.multitude import Multitude
from multitudes.core.tasks.predictive import Predictive


class Predictor(Protocol):
    """The interface that `predict`, `evaluate` and `temporal` need."""

    @property
    def predict(self) -> Callable[..., Predictive]:
        """`predict(x)`, or `predict(x, task=...)`, for one batch."""
        ...


class PredictorModule(nn.Module):
    """A module that predicts by a network, its `net`, and is no network to train or to convert."""

    net: Any


def predictor(net: Any) -> Predictor:
    """Return an object with `predict` as it is, and a plain network as a multitude of one member."""
    if callable(getattr(net, "predict", None)):
        return net
    return multitude_of(net)


def predicted(net: Predictor, x: Any, **options: Any) -> Predictive:
    """Predict a batch; raise an error where `net.predict` gives something else than a `Predictive`."""
    found = net.predict(x, **options)
    if not isinstance(found, Predictive):
        kind = type(found).__name__
        raise ValueError(f"net.predict must give a Predictive, got a {kind}: pass mt.Multitude(net)")
    return found


def multitude_of(net: Any) -> Multitude:
    """The multitude that is trained or calibrated: a plain network is one of one member."""
    if isinstance(net, PredictorModule):
        kind = type(net).__name__
        raise ValueError(f"net must be a multitude or a network, got a {kind}: pass its network, net.net")
    if not isinstance(net, nn.Module):
        raise ValueError(f"net must be a multitude or a network, got {type(net).__name__}")
    return net if isinstance(net, Multitude) else Multitude(net)
