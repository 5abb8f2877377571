"""Layers whose weights are computed from other parameters, as by `weight_norm`, `spectral_norm` or pruning."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from multitudes.core.settings import computing_hooks

__all__ = ["plain_weights"]

_POWER_ITERATIONS = 100
"""After which the spectral norm of a new weight is known well enough to evaluate with."""


@contextmanager
def plain_weights(layer: nn.Module) -> Iterator[None]:
    """Inside, a layer has plain weights, for its own code to draw; after, what they are computed from is set by them.

    Layers that compute none of their weights are left alone.
    """
    with ExitStack() as stack:
        if parametrize.is_parametrized(layer):
            stack.enter_context(_unparametrized(layer))
        for name, hook in computing_hooks(layer).items():
            stack.enter_context(_unhooked(layer, name, hook))
        yield


@contextmanager
def _unparametrized(layer: Any) -> Iterator[None]:
    own = type(layer)
    values = {name: getattr(layer, name).detach().clone() for name in layer.parametrizations}
    layer.__class__ = own.__bases__[0]  # in which the weights are parameters, not properties
    layer._parameters.update({name: nn.Parameter(value) for name, value in values.items()})
    try:
        yield
    finally:
        values = {name: layer._parameters.pop(name).detach() for name in values}
        layer.__class__ = own
    for name, value in values.items():
        _set_parametrized(layer, name, value)


@torch.no_grad()
def _set_parametrized(layer: Any, name: str, value: Tensor) -> None:
    parametrizations = layer.parametrizations[name]
    try:
        setattr(layer, name, value)
    except (NotImplementedError, RuntimeError):  # without an inverse, what is computed from starts as the plain weight
        original = getattr(parametrizations, "original", None)
        if original is not None and original.shape == value.shape:
            original.copy_(value)
    spectral = [each for each in parametrizations if hasattr(each, "n_power_iterations")]
    modes = [each.training for each in spectral]
    for each in spectral:
        each.train()
    for _ in range(_POWER_ITERATIONS if spectral else 0):
        getattr(layer, name)
    for each, mode in zip(spectral, modes, strict=True):
        each.train(mode)


@contextmanager
def _unhooked(layer: nn.Module, name: str, hook: Any) -> Iterator[None]:
    """As `_unparametrized`, for the hooks that torch used before it had parametrisations."""
    of = layer.get_parameter(f"{name}_v" if isinstance(hook, WeightNorm) else f"{name}_orig")
    vars(layer).pop(name, None)
    layer._parameters[name] = nn.Parameter(of.detach().clone())
    try:
        yield
    finally:
        value = layer._parameters.pop(name)
        assert value is not None
        with torch.no_grad():
            of.copy_(value)
            if isinstance(hook, WeightNorm):
                layer.get_parameter(f"{name}_g").copy_(torch.norm_except_dim(value, 2, hook.dim))
            _recompute(layer, hook)


def _recompute(layer: nn.Module, hook: Any) -> None:
    mode = layer.training
    layer.training = True  # in which a spectral norm makes power iterations
    for _ in range(_POWER_ITERATIONS if isinstance(hook, SpectralNorm) else 1):
        hook(layer, ())
    layer.training = mode
