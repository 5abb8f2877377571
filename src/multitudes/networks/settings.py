"""Settings of modules: attributes other than tensors, described in text that can be compared."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from functools import partial
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

DEPTH = 4
"""The depth to which settings are read: `self.config.layers[0].gain`."""

HF_CACHES = ("_output_capturing_hooks_installed", "_is_hf_initialized", "_weight_conversions")
"""Caches of Hugging Face's models."""

FLAT_WEIGHTS = ("_flat_weights", "_flat_weight_refs")
"""A recurrent layer's lists of its parameters, which it rebuilds itself."""

PLAIN = (bool, int, float, complex, str, bytes, type(None))


@contextmanager
def override_attribute(objects: Iterable[Any], name: str, value: Any) -> Iterator[None]:
    """Set an attribute of all these objects inside `with`; restore it afterwards."""
    before = [(each, getattr(each, name)) for each in objects]
    for each, _ in before:
        setattr(each, name, value)
    try:
        yield
    finally:
        for each, own in before:
            setattr(each, name, own)


def computing_hooks(module: nn.Module) -> dict[str, Any]:
    """Return the hooks of pruning and of torch's old `weight_norm` and `spectral_norm`, by the name of their weight."""
    kinds = (BasePruningMethod, SpectralNorm, WeightNorm)
    hooks = [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, kinds)]
    return {hook._tensor_name if isinstance(hook, BasePruningMethod) else hook.name: hook for hook in hooks}


def describe_setting(value: Any, depth: int = DEPTH) -> str:
    """Describe a setting in text that is equal for two objects with equal contents.

    The text holds names of functions, a digest of the code of lambdas and local functions, the class and public
    attributes of objects, and digests of constant tensors and arrays. Of other tensors, modules and everything deeper
    than `depth` it holds the class only.

    >>> describe_setting([1, {"gain": 2.0}]), describe_setting(len)
    ("[1, {'gain': 2.0}]", 'builtins.len')
    """
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, partial):
        parts = (value.func, value.args, value.keywords)
        return f"partial({', '.join(map(describe_setting, parts))})"
    if isinstance(value, Enum):
        return str(value)
    if name := getattr(value, "__qualname__", None):
        return f"{getattr(value, '__module__', '')}.{name}{_code(value, depth)}"
    kind = type(value).__name__
    if isinstance(value, Tensor):
        return kind if value.requires_grad or value.is_meta or value.layout is not torch.strided else _numbers(value)
    if not depth or isinstance(value, nn.Module):
        return kind
    if hasattr(value, "tobytes") and hasattr(value, "shape"):
        return f"{kind} {tuple(value.shape)} {value.dtype} {_digest(value.tobytes())}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {describe_setting(held, depth - 1)}" for key, held in value.items()) + "}"
    if isinstance(value, (list, tuple, set, frozenset)):
        held = [describe_setting(each, depth - 1) for each in value]
        held = held if isinstance(value, (list, tuple)) else sorted(held)
        return f"({', '.join(held)})" if isinstance(value, tuple) else f"[{', '.join(held)}]"
    if not hasattr(value, "__dict__"):  # a dtype, a device, a range, a path
        return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))
    public = {key: held for key, held in vars(value).items() if not key.startswith("_")}
    return f"{kind}({', '.join(f'{key}={describe_setting(held, depth - 1)}' for key, held in public.items())})"


def _code(function: Any, depth: int) -> str:
    """Return a digest of a lambda or local function, `{3.11:0a1b2c3d}`, and the values of its closure."""
    name = getattr(function, "__qualname__", "")
    if not isinstance(function, FunctionType) or not ("<lambda>" in name or "<locals>" in name):
        return ""
    digest = _digest(repr(_operations(function.__code__)).encode())
    held = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    closed = describe_setting([*held, *(function.__defaults__ or ())], depth - 1) if depth and held else ""
    return f"{{{sys.version_info[0]}.{sys.version_info[1]}:{digest}}}{closed}"


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _operations(code: CodeType) -> tuple[Any, ...]:
    constants = [_operations(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return code.co_code, code.co_names, constants


def _numbers(tensor: Tensor) -> str:
    values = tensor.detach().cpu().resolve_conj().contiguous().flatten().view(torch.uint8)
    some = bytes(values[:4096].tolist()) + str(values.sum(dtype=torch.int64).item()).encode()
    return f"Tensor {list(tensor.shape)} {tensor.dtype} {_digest(some)}"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:8]
