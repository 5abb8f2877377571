"""Random functions of torch, with numbers from another source.

A network may draw without a layer for it: `F.dropout` in its `forward`, attention with `dropout_p`, a mask from
`torch.rand`. `RandomFrom` intercepts torch's random functions and takes their numbers from a source: a draw, to keep
dropout on in evaluation, or constants (`STILL`), to compare two ways to run a network.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from multitudes.networks.attention import AttentionArguments, attend_with_dropout, multihead_attention


class Source(Protocol):
    """A source of random numbers."""

    def uniform(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return numbers from [0, 1)."""
        ...

    def normal(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return standard normal numbers."""
        ...

    def kept(self, shape: Sequence[int], p: float, like: Tensor) -> Tensor:
        """Return dropout's mask: 0 with probability p, else 1 / (1 - p)."""
        ...


class _Still:
    """No noise: the middle of every distribution, and dropout that drops nothing."""

    def uniform(self, shape: Sequence[int], like: Tensor) -> Tensor:
        return torch.full(tuple(shape), 0.5, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)

    def normal(self, shape: Sequence[int], like: Tensor) -> Tensor:
        return torch.zeros(tuple(shape), dtype=like.dtype, device=like.device)

    def kept(self, shape: Sequence[int], p: float, like: Tensor) -> Tensor:
        return torch.ones((), dtype=like.dtype, device=like.device)


STILL: Source = _Still()


class RandomFrom(TorchFunctionMode):
    """Make torch's random functions return numbers of a source; `seen` is called with their names."""

    def __init__(self, source: Source, seen: Callable[[str], None] | None = None) -> None:
        super().__init__()
        self.source = source
        self.seen = seen

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rule = draws_by(function)
        if rule is None or kwargs.get("generator") is not None:
            return function(*args, **kwargs)
        result = rule(self.source, function, *args, **kwargs)
        if result is NotImplemented:  # these arguments draw nothing
            return function(*args, **kwargs)
        if self.seen is not None:
            self.seen(getattr(function, "__name__", str(function)))
        return result


Rule = Callable[..., Any]
"""`rule(source, function, *args, **kwargs)` computes the function with the source's numbers."""


def draws_by(function: Any) -> Rule | None:
    """Return the rule of a random function, or None."""
    return _RULES.get(function) or _METHODS.get(getattr(function, "__name__", "")) if callable(function) else None


# -- dropout -----------------------------------------------------------------------------------------------


def _dropout(
    source: Source, function: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Any:
    if not training or p == 0:
        return NotImplemented
    mask = source.kept(_dropped_shape(function, input), p, input).to(input.dtype)
    return input.mul_(mask) if inplace else input * mask


def _alpha_dropout(
    source: Source, function: Any, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
) -> Any:
    """Set dropped values to SELU's lowest value (Klambauer et al., *Self-normalizing neural networks*, 2017)."""
    if not training or p == 0:
        return NotImplemented
    lowest = -1.7580993408473766
    kept = source.kept(_dropped_shape(function, input), p, input) > 0
    scale = 1 / math.sqrt((1 - p) * (1 + p * lowest**2))
    result = torch.where(kept, input, lowest) * scale - scale * p * lowest
    return input.copy_(result) if inplace else result


def _dropped_shape(function: Any, input: Tensor) -> tuple[int, ...]:
    """Return the shape of dropout's mask; functions that drop channels have one number per channel."""
    if function not in _CHANNELS:
        return tuple(input.shape)
    kept = 1 if _CHANNELS[function] == input.dim() else 2
    return (*input.shape[:kept], *[1] * (input.dim() - kept))


def _attention(source: Source, function: Any, *args: Any, **kwargs: Any) -> Any:
    given = AttentionArguments(*args, **kwargs)
    return (
        attend_with_dropout(partial(_dropped, source, p=given.dropout_p), given) if given.dropout_p else NotImplemented
    )


def _dropped(source: Source, x: Tensor, p: float, batch: int = 0) -> Tensor:
    """Apply dropout to `x` with batch axis `batch`; a source's numbers have the batch axis first."""
    mask = source.kept(tuple(x.movedim(batch, 0).shape), p, x).to(x.dtype)
    return x * (mask.movedim(0, batch) if mask.dim() else mask)


def _multihead(source: Source, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the code of torch's multi-head attention, whose parts have rules."""
    given = _MULTIHEAD.bind(*args, **kwargs).arguments
    if not given.get("training", True) or given["dropout_p"] == 0:
        return NotImplemented
    with RandomFrom(source):
        return multihead_attention(*args, **kwargs)


def _recurrent(source: Source, function: Any, input: Any, *args: Any) -> Any:
    """Run the layers of an RNN one by one, with dropout between them."""
    if len(args) != 8:
        return NotImplemented
    hidden, weights, biases, layers, dropout, training, both_ways, batch_first = args
    if not training or dropout == 0 or layers == 1:
        return NotImplemented
    if not isinstance(batch_first, bool) or not isinstance(weights, (list, tuple)):  # packed sequence
        return NotImplemented
    directions, each = 2 if both_ways else 1, len(weights) // layers
    states = hidden if isinstance(hidden, (list, tuple)) else (hidden,)
    finals: list[tuple[Tensor, ...]] = []
    for layer in range(layers):
        own = tuple(s[layer * directions : (layer + 1) * directions] for s in states)
        given = own if isinstance(hidden, (list, tuple)) else own[0]
        part = weights[layer * each : (layer + 1) * each]
        input, *final = function(input, given, part, biases, 1, 0.0, training, both_ways, batch_first)
        finals.append(tuple(final))
        if layer < layers - 1:
            input = _dropped(source, input, dropout, batch=0 if batch_first else 1)
    return input, *(torch.cat(parts) for parts in zip(*finals, strict=True))


# -- numbers -----------------------------------------------------------------------------------------------


def _filled(kind: str, empty: Callable[..., Tensor]) -> Rule:
    """Return the rule of a function that makes random numbers; `empty` takes the same arguments."""

    def rule(source: Source, function: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("out") is not None:
            return NotImplemented
        like = empty(*args, **kwargs)
        numbers = getattr(source, kind)(tuple(like.shape), like).to(like.dtype)
        return numbers.requires_grad_() if like.requires_grad else numbers

    return rule


def _bernoulli(source: Source, function: Any, input: Tensor, p: Any = None, **kwargs: Any) -> Any:
    chance = input if p is None else p
    return (source.uniform(tuple(input.shape), _real(input)) < chance).to(input.dtype)


def _in_place(kind: str, made: Callable[..., Tensor]) -> Rule:
    """Return the rule of a tensor method whose new values are `made(numbers, *args, **kwargs)`."""

    def rule(source: Source, function: Any, input: Tensor, *args: Any, generator: Any = None, **kwargs: Any) -> Any:
        numbers = getattr(source, kind)(tuple(input.shape), _real(input))
        return input.copy_(made(numbers, *args, **kwargs))

    return rule


def _between(uniform: Tensor, a: float = 0, b: float = 1, **named: float) -> Tensor:
    low, high = named.get("from", a), named.get("to", b)
    return low + (high - low) * uniform


def _normal(source: Source, function: Any, mean: Any, std: Any = 1.0, size: Any = None, **kwargs: Any) -> Any:
    if kwargs.get("out") is not None:
        return NotImplemented
    if size is None:
        size = (mean if isinstance(mean, Tensor) else std).shape
    like = next((each for each in (mean, std) if isinstance(each, Tensor)), torch.empty(0))
    return mean + std * source.normal(tuple(size), like)


def _randint(source: Source, function: Any, *args: Any, **kwargs: Any) -> Any:
    low, high, size = (0, *args) if len(args) == 2 else args if len(args) == 3 else (0, 0, None)
    if not isinstance(size, (list, tuple)) or kwargs.get("out") is not None:
        return NotImplemented
    like = torch.empty(0, device=kwargs.get("device"))
    return (low + source.uniform(tuple(size), like) * (high - low)).floor().to(kwargs.get("dtype") or torch.int64)


def _randperm(source: Source, function: Any, n: int, **kwargs: Any) -> Any:
    like = torch.empty(0, device=kwargs.get("device"))
    return source.uniform((n,), like).argsort(stable=True).to(kwargs.get("dtype") or torch.int64)


def _rrelu(
    source: Source,
    function: Any,
    input: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    inplace: bool = False,
) -> Any:
    if not training:
        return NotImplemented
    slope = lower + (upper - lower) * source.uniform(tuple(input.shape), input).to(input.dtype)
    result = torch.where(input >= 0, input, input * slope)
    return input.copy_(result) if inplace else result


def _gumbel_softmax(
    source: Source, function: Any, logits: Tensor, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1
) -> Any:
    uniform = source.uniform(tuple(logits.shape), logits).clamp(min=1e-20)
    soft = ((logits - (-uniform.log()).log().to(logits.dtype)) / tau).softmax(dim)
    if not hard:
        return soft
    chosen = torch.zeros_like(soft).scatter(dim, soft.argmax(dim, keepdim=True), 1.0)
    return chosen - soft.detach() + soft


def _real(input: Tensor) -> Tensor:
    return input if input.is_floating_point() else torch.empty(0, device=input.device)


_MULTIHEAD = inspect.signature(F.multi_head_attention_forward)

_CHANNELS = {F.dropout1d: 2, F.dropout2d: 3, F.dropout3d: 4, torch.feature_dropout: 0, F.feature_alpha_dropout: 0}
"""Functions that drop channels, with the rank of an input without a batch axis."""

_RULES: dict[Any, Rule] = {
    **dict.fromkeys((F.dropout, torch.dropout, *_CHANNELS), _dropout),
    **dict.fromkeys((F.alpha_dropout, F.feature_alpha_dropout), _alpha_dropout),
    F.scaled_dot_product_attention: _attention,
    F.multi_head_attention_forward: _multihead,
    **dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), _recurrent),
    torch.rand: _filled("uniform", torch.empty),
    torch.randn: _filled("normal", torch.empty),
    torch.rand_like: _filled("uniform", torch.empty_like),
    torch.randn_like: _filled("normal", torch.empty_like),
    torch.bernoulli: _bernoulli,
    torch.normal: _normal,
    torch.randint: _randint,
    torch.randperm: _randperm,
    F.rrelu: _rrelu,
    F.gumbel_softmax: _gumbel_softmax,
}

_METHODS: dict[str, Rule] = {
    "bernoulli_": _in_place("uniform", lambda uniform, p=0.5: uniform < p),
    "uniform_": _in_place("uniform", _between),
    "normal_": _in_place("normal", lambda normal, mean=0, std=1: mean + std * normal),
    "exponential_": _in_place("uniform", lambda uniform, lambd=1: -torch.log1p(-uniform) / lambd),
}
