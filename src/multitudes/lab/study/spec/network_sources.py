"""Networks for given data: a model of `multitudes.models`, a Hugging Face model, or a user's function."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from multitudes import models
from multitudes.lab.data.kinds import kind_of_shape, transformer_training
from multitudes.lab.data.parts import NETWORK_TASKS
from multitudes.lab.study.spec.hub_models import build_hub_model, is_hub
from multitudes.tasks import task_of

KEYS = ("name", "settings", "file", "sha256", "config", "kind", "weights")


def defaults(
    shape: tuple[int, ...], rows: int = 1000, kind: str | None = None, pretrained: bool | None = None
) -> dict[str, Any]:
    """Return the default `{"model": ..., "training": ...}` for an input shape and number of training rows, as JSON.

    >>> defaults((1, 8, 8))["model"]["name"], defaults((1, 8, 12))["model"]["name"], defaults((13,))["model"]["name"]
    ('small_cnn', 'resnet20', 'tabular')
    """
    suggested = kind_of_shape(shape, kind).defaults(shape, rows)
    if pretrained is not None:
        suggested["training"] |= transformer_training(rows, pretrained)
    return suggested


def network_names() -> list[str]:
    """List the names of available networks."""
    return sorted(name for name in models.__all__ if name.islower())


def outputs_of(task: str, outputs: int) -> int:
    """Return the number of network outputs: one per class; a mean and a raw variance per regression value."""
    return task_of(NETWORK_TASKS[task]).per_value * outputs


def build_network(
    model: Mapping[str, Any],
    shape: tuple[int, ...],
    outputs: int,
    directory: str | Path = ".",
    layout: Callable[..., Any] | None = None,
    kind: str | None = None,
) -> nn.Module:
    """Build a network from `{"name": "small_cnn", "settings": {...}}`, with weights drawn from torch's random state.

    `kind` names the kind of data if the shape is ambiguous. `layout` (see `Data`) describes the features to a network
    for tables. A Hugging Face model is described by the output of `HubModel.plain`.

    `{"file": "my_net.py", "name": "build"}` calls a user's function, `build(shape, outputs, **settings)`; a relative
    file is relative to `directory`. The file's code runs only if its SHA-256 matches the model's, if that has one.

    >>> net = build_network({"name": "mlp", "settings": {"hidden": [8]}}, (4,), 3)
    >>> net.fc
    Linear(in_features=8, out_features=3, bias=True)
    """
    for key in model:
        if key not in KEYS:
            raise ValueError(f"model has no key {key!r}; its keys are {', '.join(KEYS)}")
    name, settings = model.get("name"), dict(model.get("settings") or {})
    if not isinstance(name, str):
        raise ValueError(f"model must have a name, got {name!r}")
    if model.get("file") is not None:
        function = _load_function(Path(directory) / model["file"], name, model.get("sha256"))
        return _call(function, {"shape": shape, "outputs": outputs} | settings, f"{model['file']}:{name}")
    if is_hub(name):
        return build_hub_model(model, shape, outputs)
    if name not in network_names():
        raise ValueError(
            f"model must be one of {', '.join(network_names())}, FILE.py:FUNCTION or hf:FOLDER, got {name!r}"
        )
    function = getattr(models, name)
    taken = inspect.signature(function).parameters
    for setting in settings:
        if setting not in taken:
            raise ValueError(f"model {name!r} has no setting {setting!r}; its settings are {', '.join(taken)}")
    numbers = kind_of_shape(shape, kind).arguments(name, shape, outputs, taken)
    if "layout" in taken and layout is not None:
        numbers["layout"] = layout(settings.get("bins", taken["bins"].default))
    return _call(function, {key: value for key, value in numbers.items() if key in taken} | settings, name)


def _call(function: Callable[..., Any], arguments: dict[str, Any], what: str) -> nn.Module:
    try:
        network = function(**arguments)
    except TypeError as error:
        raise ValueError(f"model {what} cannot be built with {arguments}: {error}") from error
    if not isinstance(network, nn.Module):
        raise ValueError(f"model {what} must return an nn.Module, got {type(network).__name__}")
    return network


def code_of(text: str) -> tuple[str, str | None]:
    """Split FILE.py:FUNCTION, or FILE.py without a function.

    >>> code_of("nets/mine.py:build"), code_of("mine.py")
    (('nets/mine.py', 'build'), ('mine.py', None))
    """
    file, _, function = text.rpartition(":")
    return (text, None) if not file or text.endswith(".py") else (file, function)


def file_digest(path: str | Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _load_function(file: Path, name: str, digest: str | None) -> Callable[..., Any]:
    if not file.is_file():
        raise ValueError(f"model: the file {str(file)!r} does not exist")
    if digest is not None and file_digest(file) != digest:
        raise ValueError(f"model: the file {str(file)!r} was changed since the study was prepared; it is not executed")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise ValueError(f"model: {str(file)!r} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = getattr(module, name, None)
    if not callable(found):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise ValueError(f"model: {str(file)!r} has no function {name!r}; it has {', '.join(functions) or 'none'}")
    return found
