"""The common interface of everything that predicts: multitudes, plain and calibrated networks, streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import nn

from multitudes.ensemble.multitude import Multitude
from multitudes.tasks.predictive import Predictive


class Predictor(Protocol):
    """The interface that `predict`, `evaluate` and `temporal` require."""

    @property
    def predict(self) -> Callable[..., Predictive]:
        """`predict(x)`, or `predict(x, task=...)`, of one batch."""
        ...


class PredictorModule(nn.Module):
    """A module that predicts with the network `net`, and cannot be trained or converted itself."""

    net: Any


def predictor(net: Any) -> Predictor:
    """Return an object with `predict` unchanged; wrap a plain network as a multitude of one member."""
    return net if callable(getattr(net, "predict", None)) else multitude_of(net)


def predicted(net: Predictor, x: Any, **options: Any) -> Predictive:
    """Predict a batch; raise an error if `net.predict` does not return a `Predictive`."""
    result = net.predict(x, **options)
    if not isinstance(result, Predictive):
        kind = type(result).__name__
        raise ValueError(f"net.predict must give a Predictive, got a {kind}: pass mt.Multitude(net)")
    return result


def multitude_of(net: Any) -> Multitude:
    """Return the multitude to train or calibrate; wrap a plain network as one of one member."""
    if isinstance(net, PredictorModule):
        kind = type(net).__name__
        raise ValueError(f"net must be a multitude or a network, got a {kind}: pass its network, net.net")
    if not isinstance(net, nn.Module):
        raise ValueError(f"net must be a multitude or a network, got {type(net).__name__}")
    return net if isinstance(net, Multitude) else Multitude(net)
