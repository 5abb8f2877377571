"""Read arrays, and frames of pandas, polars and Arrow, into columns."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from multitudes.base.checks import needed
from multitudes.lab.data.tables.column_types import number_of
from multitudes.lab.data.tables.columns import Column, from_arrow, from_cells, strip_cells
from multitudes.lab.data.tables.features import features_of
from multitudes.lab.data.tables.table import LoadOptions, TableEncoder


def is_frame(X: Any) -> bool:
    """Return True for a frame of pandas, polars or Arrow."""
    if _is(X, "polars", "LazyFrame"):
        raise ValueError("X must not be a polars LazyFrame: call X.collect() first")
    return _is(X, "pandas", "DataFrame") or _is(X, "polars", "DataFrame") or _is(X, "pyarrow", "Table")


def _is(X: Any, package: str, name: str) -> bool:
    module = sys.modules.get(package)  # if X is one of its objects, it is already imported
    return module is not None and hasattr(module, name) and isinstance(X, getattr(module, name))


def _names(frame: Any) -> list[str]:
    return list(map(str, getattr(frame, "column_names", None) or frame.columns))


def check_names(frame: Any) -> None:
    """Raise if two columns of a frame have the same name."""
    names = _names(frame)
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"X must have unique column names, got {twice!r} twice")


def python_number(value: Any) -> Any:
    """Convert a NumPy number, for example of a parameter grid, to a Python number."""
    return value.item() if isinstance(value, np.generic) else value


# -- columns -----------------------------------------------------------------------------------------------


def number_columns(values: Any, names: Sequence[str]) -> dict[str, Column]:
    """Return the columns of an array of numbers `[N, F]`, with NaN for missing values."""
    numbers = torch.from_numpy(np.array(values, dtype=np.float64, order="F"))
    return {name: Column("number", numbers[:, at]) for at, name in enumerate(names)}


def frame_columns(frame: Any) -> tuple[dict[str, Column], dict[str, str]]:
    """Return the columns of a frame, and the types of those with a categorical dtype."""
    pa = needed("pyarrow", "sklearn", "a frame with named columns")
    names = _names(frame)
    if isinstance(frame, pa.Table):
        arrays = {name: frame.column(at) for at, name in enumerate(names)}
    elif _is(frame, "polars", "DataFrame"):
        arrays = dict(zip(names, frame.to_arrow().columns, strict=True))
    else:
        arrays = {name: _from_pandas(pa, frame.iloc[:, at]) for at, name in enumerate(names)}
    read_as = {name: "category" for name, array in arrays.items() if _categorical(pa, array)}
    columns = {
        name: array if isinstance(array, Column) else from_arrow(pa.table({name: array}), {})[name]
        for name, array in arrays.items()
    }
    return columns, read_as


def _from_pandas(pa: Any, series: Any) -> Any:
    """Convert a column to Arrow; parse objects of mixed types as texts."""
    try:
        return pa.chunked_array([pa.array(series, from_pandas=True)])
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
        if series.dtype != object:
            raise
        texts = ["" if missing else str(value) for value, missing in zip(series, series.isna(), strict=True)]
        return from_cells(strip_cells(texts))


def _categorical(pa: Any, array: Any) -> bool:
    return not isinstance(array, Column) and pa.types.is_dictionary(array.type)


# -- the encoder -------------------------------------------------------------------------------------------


def fitted_encoder(
    columns: Mapping[str, Column], rows: torch.Tensor, read_as: Mapping[str, str], numbers: bool
) -> TableEncoder:
    """Fit an encoder to these rows; columns of an array are always `numbers`.

    A warning lists the columns of a frame that are dropped (ids, constants, distinct texts). If that would drop
    every column, only empty columns are dropped.
    """
    if numbers:
        known = {name: column.values[rows] for name, column in columns.items()}
        features = [number_of(name, values) for name, values in known.items() if not bool(values.isnan().all())]
        if not features:
            raise ValueError("X must hold numbers, got NaN in all training rows")
        return TableEncoder(tuple(features))
    try:
        encoder = TableEncoder.fitted(columns, rows, LoadOptions(read_as=read_as))
    except ValueError:
        encoder = TableEncoder.fitted(columns, rows, LoadOptions(columns=list(columns), read_as=read_as))
    if left_out := [f"{each.name!r} ({each.dropped})" for each in encoder.reading if each.dropped]:
        warnings.warn(f"columns of X are left out: {', '.join(left_out)}", UserWarning, stacklevel=5)
    return encoder


def encoded(encoder: TableEncoder, columns: Mapping[str, Column]) -> torch.Tensor:
    """Return the features of all rows, float32 `[N, F]`; raise if a column does not match training."""
    for name, column in columns.items():
        if column.numeric and bool(column.values.isinf().any()):
            row = int(column.values.isinf().nonzero()[0])
            raise ValueError(f"column {name!r} of X must hold finite numbers or NaN, got infinity in row {row}")
    raw = []
    for feature in encoder.features:
        try:
            raw.append(feature.raw(columns[feature.column]))
        except ValueError as error:
            raise ValueError(f"column {feature.column!r} of X {error}") from error
    return features_of(encoder.features, raw)
