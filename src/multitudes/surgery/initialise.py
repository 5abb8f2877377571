"""Initialise a network anew: each layer, and each network, by its own rule."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["redraw"]


def redraw(model: nn.Module) -> nn.Module:
    """Initialise every layer anew, in place, from torch's random state.

    Each layer by its own `reset_parameters`, inner layers first, as constructors do it, so that a network may
    have the last word in a `reset_parameters` of its own; Hugging Face models by their own initialiser.
    Parameters that stand alone (class tokens, position embeddings) are drawn from the normal distribution
    with the mean and deviation that they have; constant ones stay.
    """
    for module in reversed(list(model.modules())):
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if callable(reset):
            reset()
            continue
        for parameter in module.parameters(recurse=False):
            _redraw_alone(parameter)
    for module in model.modules():
        initialise = getattr(module, "_init_weights", None)
        if callable(initialise):
            with _unmarked(module):
                module.apply(initialise)
            break
    return model


def _redraw_alone(parameter: nn.Parameter) -> None:
    values = parameter.data
    if parameter.requires_grad and values.is_floating_point() and values.numel() > 1 and values.std() > 0:
        values.normal_(values.mean().item(), values.std().item())


@contextmanager
def _unmarked(module: nn.Module) -> Iterator[None]:
    """Hugging Face skips what it has marked as initialised; take the marks off for a while."""
    mark = "_is_hf_initialized"
    marked = [t for t in [*module.modules(), *module.parameters(), *module.buffers()] if mark in vars(t)]
    before = [getattr(t, mark) for t in marked]
    for t in marked:
        delattr(t, mark)
    try:
        yield
    finally:
        for t, value in zip(marked, before, strict=True):
            setattr(t, mark, value)
