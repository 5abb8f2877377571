"""Save and load estimators: a safetensors file with a checksum; everything but tensors is in its header."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from multitudes.base.archives import join_parts, read_tensors, tensors_of_part, write_tensors
from multitudes.base.sealed_files import DamagedError
from multitudes.ensemble.multitude import Multitude
from multitudes.evaluation.conformal import Conformal, ConformalScore
from multitudes.files.save import check_path, from_parts, read_calibration, to_parts
from multitudes.lab.data.preprocessing import Preprocessing
from multitudes.lab.data.tables.column_types import ColumnReading
from multitudes.lab.data.tables.features import feature_of
from multitudes.lab.data.tables.table import TableEncoder
from multitudes.sklearn.fitted import FittedModel
from multitudes.sklearn.frames import python_number
from multitudes.sklearn.train import make_network
from multitudes.training.trainer import Epoch

ENTRY, FORMAT = "multitudes.sklearn", 1
OWN = ("classes_", "n_features_in_", "feature_names_in_", "n_iter_", "history_")
"""Fitted attributes besides the model."""


# -- saving ------------------------------------------------------------------------------------------------


def save(estimator: Any, path: str | os.PathLike[str]) -> Path:
    """Write a fitted estimator to a file; return its path."""
    path, model = check_path(path), estimator.model_
    networks = [to_parts(net) for net in model.networks]
    parts = {f"networks/{number}": own for number, (_, own) in enumerate(networks)}
    parts["preprocessing"] = model.preprocessing.state_dict()
    parts["target"] = {name: t for name in ("center", "scale") if (t := getattr(model, name)) is not None}
    about = {
        "format": FORMAT, "estimator": type(estimator).__name__, "params": _params(estimator),
        "own": {name: _encode(name, getattr(estimator, name)) for name in OWN if hasattr(estimator, name)},
        "features": [feature.plain() for feature in model.encoder.features],
        "reading": [reading.plain() for reading in model.encoder.reading],
        "networks": [header for header, _ in networks], "outputs": model.outputs,
    }  # fmt: skip
    if model.scaling is not None:
        about["scaling"] = model.scaling.settings
        parts["scaling"] = model.scaling.tensors
    if model.conformal is not None:
        about["score"] = asdict(model.conformal.score)
        parts["conformal"] = {name: getattr(model.conformal, name) for name in ("scores", "shares")}
    return write_tensors(path, join_parts(parts), ENTRY, about, "saving a model")


def _params(estimator: Any) -> dict[str, Any]:
    """Return the arguments for the file; None replaces those that cannot be saved."""
    found = estimator.get_params(deep=False)
    if isinstance(found.get("class_weight"), Mapping):
        found["class_weight"] = [
            [python_number(key), python_number(weight)] for key, weight in found["class_weight"].items()
        ]
    known = (bool, int, float, str, list, tuple, Mapping, np.generic)
    return {
        name: python_number(value) if isinstance(value, known) and name != "module" else None
        for name, value in found.items()
    }


def _encode(name: str, value: Any) -> Any:
    """Encode a fitted attribute as JSON."""
    if name == "history_":
        return [[asdict(epoch) for epoch in epochs] for epochs in value]
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.str if value.dtype != object else "object", "values": value.tolist()}
    return python_number(value)


# -- loading -----------------------------------------------------------------------------------------------


def load(cls: type, path: str | os.PathLike[str], module: Any = None) -> Any:
    """Load the estimator that `save` wrote."""
    path = Path(path)
    wrong = f"path must be a file written by {cls.__name__}.save, got {str(path)!r}, which"
    if not path.is_file():
        raise ValueError(f"{wrong} does not exist")
    try:
        tensors, about = read_tensors(path, ENTRY, "loading a model")
    except DamagedError as error:
        raise ValueError(f"{wrong} is damaged or of another kind: {error.what}") from error
    if about.get("format") != FORMAT or about.get("estimator") != cls.__name__:
        raise ValueError(f"{wrong} holds a {about.get('estimator')} of format {about.get('format')}")
    try:
        return _loaded(cls, about, tensors, module)
    except (LookupError, TypeError, AttributeError, AssertionError, RecursionError) as error:
        raise ValueError(f"{wrong} is damaged: its header does not fit its tensors ({error})") from error


def _loaded(cls: type, about: Mapping[str, Any], tensors: Mapping[str, Tensor], module: Any) -> Any:
    params = {**about["params"], "module": module}
    if isinstance(params.get("class_weight"), list):
        params["class_weight"] = dict(params["class_weight"])
    if isinstance(params.get("quantiles"), list):
        params["quantiles"] = tuple(params["quantiles"])
    estimator = cls(**params)
    for name, value in about["own"].items():
        setattr(estimator, name, _decode(name, value))
    encoder = TableEncoder(
        tuple(map(feature_of, about["features"])), tuple(ColumnReading(**each) for each in about["reading"])
    )
    own = None if module is None else make_network(module, len(encoder.names), about["outputs"])
    networks = []
    for number, header in enumerate(about["networks"]):
        net = from_parts(header, tensors_of_part(f"networks/{number}", tensors), own)
        assert isinstance(net, Multitude)
        networks.append(net.eval())
    scaling = conformal = None
    if "scaling" in about:
        scaling = read_calibration(about["scaling"], tensors_of_part("scaling", tensors))
    if "score" in about:
        conformal = Conformal(ConformalScore(**about["score"]), **tensors_of_part("conformal", tensors))
    estimator.model_ = FittedModel(
        encoder, Preprocessing(**tensors_of_part("preprocessing", tensors)), tuple(networks),
        about["outputs"], **tensors_of_part("target", tensors), scaling=scaling, conformal=conformal,
    )  # fmt: skip
    return estimator


def _decode(name: str, value: Any) -> Any:
    """Decode a fitted attribute from JSON."""
    if name == "history_":
        return [[Epoch(**epoch) for epoch in epochs] for epochs in value]
    return np.array(value["values"], dtype=value["dtype"]) if isinstance(value, dict) else value
