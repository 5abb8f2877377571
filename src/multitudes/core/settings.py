"""Settings: what a module holds beside its tensors, compared within one object and between two."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

__all__ = ["computing_hooks", "described", "fingerprint"]

_DEPTH = 4
"""How deep settings are read: `self.config.layers[0].gain`."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def computing_hooks(module: nn.Module) -> dict[str, Any]:
    """The hooks of torch's that compute a weight before each forward, by the name of that weight.

    They are those of `nn.utils.weight_norm` and `spectral_norm` as they were before parametrisations, and of pruning.
    """
    kinds = (BasePruningMethod, SpectralNorm, WeightNorm)
    hooks = [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, kinds)]
    return {hook._tensor_name if isinstance(hook, BasePruningMethod) else hook.name: hook for hook in hooks}


def fingerprint(value: Any, depth: int = _DEPTH) -> Any:
    """Plain values as they are, what holds others by what it holds, and everything else by its identity."""
    if isinstance(value, _PLAIN):
        return type(value), repr(value)
    if depth and isinstance(value, Mapping):
        return type(value), [(str(key), fingerprint(held, depth - 1)) for key, held in value.items()]
    if depth and isinstance(value, (list, tuple, set, frozenset)):
        return type(value), [fingerprint(held, depth - 1) for held in value]
    if depth and not callable(value) and not isinstance(value, Tensor):  # classes and modules are callable
        held = getattr(value, "__dict__", {})
        return id(value), [(key, fingerprint(inner, depth - 1)) for key, inner in held.items()]
    return id(value)


def described(value: Any, depth: int = _DEPTH) -> str:
    """A setting in words that are the same for two objects that hold the same.

    Functions go by their names, objects by their class and what they hold under public names. Of tensors and modules,
    and of what lies deeper, the class alone is told.

    >>> described([1, {"gain": 2.0}]), described(len)
    ("[1, {'gain': 2.0}]", 'builtins.len')
    """
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, partial):
        return f"partial({described(value.func)}, {described(value.args)}, {described(value.keywords)})"
    if name := getattr(value, "__qualname__", None):
        return f"{getattr(value, '__module__', '')}.{name}"
    kind = type(value).__name__
    if not depth or isinstance(value, (Tensor, nn.Module)):
        return kind
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {described(held, depth - 1)}" for key, held in value.items()) + "}"
    if isinstance(value, (list, tuple, set, frozenset)):
        held = [described(each, depth - 1) for each in value]
        held = held if isinstance(value, (list, tuple)) else sorted(held)
        return f"({', '.join(held)})" if isinstance(value, tuple) else f"[{', '.join(held)}]"
    public = {key: held for key, held in getattr(value, "__dict__", {}).items() if not key.startswith("_")}
    return f"{kind}({', '.join(f'{key}={described(held, depth - 1)}' for key, held in public.items())})"
