"""Observe a network at work: an input that fits it, its layers in the order in which they run, and their outputs."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import nn

from multitudes.core.attention import math_attention
from multitudes.core.calling import Input, call, plain_attention
from multitudes.core.seeding import seeded
from multitudes.core.trace import observing, record
from multitudes.surgery.layers import PRODUCTS

__all__ = ["call_order", "cheap_example", "example_for", "executed", "followed_attention"]

_SIDES = (32, 28, 224, 64, 16, 8, 96, 128, 48, 256, 299, 384, 512, 12, 20, 24, 40, 56, 80, 100, 112, 160, 192)
_LENGTHS = (128, 64, 32, 256, 512, 1000, 1024, 16, 8, 100, 96, 48, 2048, 4096, 16000)


def example_for(model: nn.Module, example: Input | None = None) -> Input:
    """The given example, or noise of a shape that fits the network, found by trying the usual sizes."""
    if example is not None:
        return example
    with seeded(0):  # so that neither torch's random state nor what is drawn after depends on whether one is given
        return _found_example(model)


def cheap_example(model: nn.Module) -> Input | None:
    """Noise of the most usual size, where that fits the network, and one image or row is soon computed."""
    with seeded(0):
        try:
            return _found_example(model, tries=1)
        except ValueError:
            return None


def _found_example(model: nn.Module, tries: int | None = None) -> Input:
    for x in islice(_usual_inputs(model), tries):
        try:
            with observing(model):
                call(model, x)
        except (RuntimeError, ValueError, IndexError, TypeError, AssertionError):
            continue
        return x
    raise ValueError(f"no input was found that fits the model ({type(model).__name__}): pass one batch as example=")


def _usual_inputs(model: nn.Module) -> Iterator[Input]:
    """Batches of two: tokens for a Hugging Face model of texts, else noise of what the network says, or usual sizes."""
    where = next(iter([*model.parameters(), *model.buffers()]), torch.zeros(0))
    tokens = getattr(getattr(model, "config", None), "vocab_size", None)
    if getattr(model, "main_input_name", None) == "input_ids" and isinstance(tokens, int):
        yield {"input_ids": torch.randint(tokens, (2, 8), device=where.device)}
    first = next((m for m in model.modules() if type(m) in PRODUCTS), None)
    own = getattr(model, "inputs", None)  # where a network says how many numbers it takes
    said = [(own,)] if isinstance(own, int) and not isinstance(own, bool) and own > 0 else []
    for shape in [*said, *_shapes(first)]:
        yield torch.randn(2, *shape, device=where.device, dtype=where.dtype if where.is_floating_point() else None)


def _shapes(first: Any) -> list[tuple[int, ...]]:
    if isinstance(first, nn.Linear):
        return [(first.in_features,), (8, first.in_features)]
    if first is None:
        return []
    channels, spatial = first.in_channels, len(first.kernel_size)
    sides = _LENGTHS if spatial == 1 else _SIDES if spatial == 2 else _SIDES[:6]
    return [(channels, *[side] * spatial) for side in sides]


@contextmanager
def followed_attention() -> Iterator[None]:
    """Let attention compute step by step: NaN in, NaN out, which fused kernels do not promise."""
    with plain_attention(), math_attention():
        yield


def executed(model: nn.Module, example: Input, kinds: Collection[type[nn.Module] | str]) -> list[str]:
    """The names of the layers of these kinds or names, in the order in which a forward reaches them."""
    return list(dict.fromkeys(call.name for call in record(model, example, kinds, tensors=False).ended))


def call_order(model: nn.Module, example: Input) -> list[str]:
    """The names of all modules that a forward calls, each time, in the order in which it enters them."""
    return [call.name for call in record(model, example, tensors=False).calls if call.name]
