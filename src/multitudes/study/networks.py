"""Which network for which data: one of `multitudes.models` by name, or a function of the user's own."""

from __future__ import annotations

import importlib.util
import inspect
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from multitudes import models

__all__ = ["DEFAULTS", "build_network", "defaults", "kind_of", "network_names", "outputs_of"]

DEFAULTS: dict[str, dict[str, Any]] = {
    "small images": {
        "model": {"name": "small_cnn", "settings": {}},
        "training": {
            "epochs": 30, "batch_size": 64, "optimizer": "adam", "lr": 0.01, "momentum": 0.9, "weight_decay": 0.0,
            "schedule": "cosine", "warmup": 0, "augment": None, "precision": "float32", "channels_last": False,
            "compile": False, "clip": None,
        },
    },
    "medium images": {
        "model": {"name": "medium_cnn", "settings": {}},
        "training": {
            "epochs": 20, "batch_size": 128, "optimizer": "adam", "lr": 1.6e-3, "momentum": 0.9, "weight_decay": 0.0,
            "schedule": "cosine", "warmup": 0, "augment": "crop", "precision": "float32", "channels_last": False,
            "compile": False, "clip": None,
        },
    },
    "images": {
        "model": {"name": "resnet18", "settings": {}},
        "training": {
            "epochs": 75, "batch_size": 128, "optimizer": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 5e-4,
            "schedule": "cosine", "warmup": 1, "augment": "standard", "precision": "float32", "channels_last": False,
            "compile": False, "clip": None,
        },
    },
    "table": {
        "model": {"name": "mlp", "settings": {"hidden": [50]}},  # the UCI benchmark's, whose data are small
        "training": {
            "epochs": 40, "batch_size": 32, "optimizer": "adam", "lr": 0.01, "momentum": 0.9, "weight_decay": 0.0,
            "schedule": "cosine", "warmup": 0, "augment": None, "precision": "float32", "channels_last": False,
            "compile": False, "clip": 10.0,
        },
    },
}  # fmt: skip
"""Network and training by the kind of data; all values as JSON and TOML have them."""


def kind_of(shape: tuple[int, ...]) -> str:
    """The key of `DEFAULTS` for inputs of a shape, `(C, H, W)` or `(F,)`.

    >>> kind_of((1, 8, 8)), kind_of((1, 28, 28)), kind_of((3, 32, 32)), kind_of((13,))
    ('small images', 'medium images', 'images', 'table')
    """
    if len(shape) == 1:
        return "table"
    side = min(shape[1:])
    return "small images" if side <= 16 else "medium images" if side < 32 else "images"


def defaults(shape: tuple[int, ...]) -> dict[str, Any]:
    """`{"model": ..., "training": ...}` for inputs of a shape, a copy.

    The small networks read square images. Others that are as small get one that pools whatever is left of them.

    >>> defaults((1, 8, 8))["model"]["name"], defaults((1, 8, 12))["model"]["name"]
    ('small_cnn', 'resnet20')
    """
    found = DEFAULTS[kind_of(shape)]
    model = {"name": found["model"]["name"], "settings": dict(found["model"]["settings"])}
    if len(shape) == 3 and shape[1] != shape[2] and model["name"] != "resnet18":
        model = {"name": "resnet20", "settings": {}}
    return {"model": model, "training": dict(found["training"])}


def network_names() -> list[str]:
    """The names of the networks that there are."""
    return sorted(name for name in models.__all__ if inspect.isfunction(getattr(models, name)))


def outputs_of(task: str, outputs: int) -> int:
    """How many numbers a network answers with: one a class; for regression a mean and a raw variance each."""
    return outputs if task == "classification" else 2 * outputs


def build_network(
    model: Mapping[str, Any], shape: tuple[int, ...], outputs: int, directory: str | Path = "."
) -> nn.Module:
    """A network from `{"name": "small_cnn", "settings": {...}}`, for inputs of a shape and with so many outputs.

    `{"file": "my_net.py", "name": "build"}` takes a function of the user's own, `build(shape, outputs, **settings)`,
    which gives an `nn.Module`; a relative file is one relative to `directory`. Weights are drawn from torch's random
    state.

    >>> net = build_network({"name": "mlp", "settings": {"hidden": [8]}}, (4,), 3)
    >>> net.fc
    Linear(in_features=8, out_features=3, bias=True)
    """
    for key in model:
        if key not in ("name", "settings", "file"):
            raise ValueError(f"model has no key {key!r}; its keys are name, settings, file")
    name, settings = model.get("name"), dict(model.get("settings") or {})
    if not isinstance(name, str):
        raise ValueError(f"model must have a name, got {name!r}")
    if model.get("file") is not None:
        function = _users_own(Path(directory) / model["file"], name)
        return _made(function, {"shape": shape, "outputs": outputs} | settings, f"{model['file']}:{name}")
    if name not in network_names():
        raise ValueError(f"model must be one of {', '.join(network_names())}, or FILE.py:FUNCTION, got {name!r}")
    function = getattr(models, name)
    taken = inspect.signature(function).parameters
    for setting in settings:
        if setting not in taken:
            raise ValueError(f"model {name!r} has no setting {setting!r}; its settings are {', '.join(taken)}")
    fitting = {key: value for key, value in _fitting(name, shape, outputs, taken).items() if key in taken}
    return _made(function, fitting | settings, name)


def _fitting(name: str, shape: tuple[int, ...], outputs: int, taken: Mapping[str, Any]) -> dict[str, Any]:
    """What our networks call the numbers that the data decide."""
    if len(shape) == 1:
        if "inputs" not in taken:
            raise ValueError(f"model {name!r} is for images, and the inputs are rows of {shape[0]} numbers: take mlp")
        return {"inputs": shape[0], "outputs": outputs}
    channels, height, width = shape
    if "size" in taken and height != width:
        raise ValueError(f"model {name!r} needs square images, got {height} x {width}: take resnet20, or size= of data")
    stem = "imagenet" if min(height, width) >= 96 else "small"
    numbers = {"inputs": math.prod(shape), "outputs": outputs, "classes": outputs, "channels": channels}
    return {**numbers, "size": height, "stem": stem}


def _made(function: Callable[..., Any], arguments: dict[str, Any], what: str) -> nn.Module:
    try:
        network = function(**arguments)
    except TypeError as error:
        raise ValueError(f"model {what} cannot be built with {arguments}: {error}") from error
    if not isinstance(network, nn.Module):
        raise ValueError(f"model {what} must give an nn.Module, got {type(network).__name__}")
    return network


def _users_own(file: Path, name: str) -> Callable[..., Any]:
    if not file.is_file():
        raise ValueError(f"model: there is no file {str(file)!r}")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise ValueError(f"model: {str(file)!r} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = getattr(module, name, None)
    if not callable(found):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise ValueError(f"model: {str(file)!r} has no function {name!r}; it has {', '.join(functions) or 'none'}")
    return found
