"""Base class of both estimators: read a table, train on it, and read the predictions."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from joblib import effective_n_jobs
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.parallel import Parallel, delayed
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from multitudes.base.checks import check_count, check_number
from multitudes.ensemble.multitude import Multitude
from multitudes.evaluation.calibrate import helpful_scaling
from multitudes.evaluation.conformal import Conformal
from multitudes.lab.data.preprocessing import Preprocessing, layout_of, mean_std
from multitudes.lab.data.splits import fold_rows, spread
from multitudes.lab.data.tables.columns import Column
from multitudes.methods.registry import collect, method_named
from multitudes.networks.devices import device_of
from multitudes.networks.seeds import mixed
from multitudes.sklearn.fitted import SEED, FittedModel, predict_on_cpu
from multitudes.sklearn.frames import (
    check_names,
    encoded,
    fitted_encoder,
    frame_columns,
    is_frame,
    number_columns,
    python_number,
)
from multitudes.sklearn.train import FitSettings, torch_threads, train_network
from multitudes.tasks.predictive import Predictive
from multitudes.training.trainer import Epoch


@dataclass(eq=False, repr=False)
class MultitudeEstimator(BaseEstimator):
    """Base class of both estimators.

    One of scikit-learn's checks cannot pass: `check_sample_weight_equivalence_on_dense_data`. A duplicated row may be
    held out once, or be in two batches, so a weight of two is equivalent only on average.
    """

    method: str = "tabm"
    members: int | None = None
    _: KW_ONLY
    module: Any = None
    settings: Mapping[str, Any] | None = None
    epochs: int | None = None
    patience: int | None = 32
    batch_size: int | str = "auto"
    lr: float = 2e-3
    weight_decay: float = 3e-4
    validation: float | None = 0.15
    folds: int | None = None
    random_state: Any = None
    n_jobs: int | None = None
    device: str = "auto"
    verbose: bool | None = None

    # -- tables ------------------------------------------------------------------------------------------

    def _read_table(self, X: Any, reset: bool) -> InputTable:
        """Read a table as columns; `reset` learns their names and number, otherwise they are checked."""
        minimum = 2 if reset else 1
        if is_frame(X):
            check_names(X)
            validate_data(self, X, reset=reset, skip_check_array=True)
            if len(X) < minimum:
                raise ValueError(f"X must have {minimum} or more rows, got n_samples = {len(X)}")
            return InputTable(*frame_columns(X), numbers=False)
        try:
            values = validate_data(
                self, X, reset=reset, dtype="numeric", ensure_all_finite="allow-nan", ensure_min_samples=minimum
            )
        except ValueError as error:
            if "could not convert string" not in str(error) and "bytes/strings" not in str(error):
                raise
            raise ValueError(f"X must hold numbers or be a frame with named columns, got texts: {error}") from error
        names = getattr(self, "feature_names_in_", [f"x{at}" for at in range(values.shape[1])])
        return InputTable(number_columns(values, list(map(str, names))), {}, numbers=True)

    def _weights(self, sample_weight: Any, rows: int) -> Tensor | None:
        """Return the weights of rows `[N]`, or None."""
        if sample_weight is None:
            return None
        weight = _check_sample_weight(sample_weight, np.empty((rows, 1)), dtype=np.float64)
        if (weight < 0).any():
            at = int((weight < 0).argmax())
            raise ValueError(f"sample_weight must be 0 or more, got {weight[at]:g} in row {at}")
        return torch.tensor(weight)

    def _predict(self, X: Any, what: Callable[[Predictive], tuple[Tensor, ...]]) -> list[Any]:
        """Return quantities of the predictions of all rows, as arrays."""
        check_is_fitted(self)
        columns = self._read_table(X, reset=False).columns
        with torch_threads(self._count()):
            return self.model_.read(columns, what)

    def _count(self) -> int | None:
        return None if self.n_jobs is None else effective_n_jobs(self.n_jobs)

    # -- training ----------------------------------------------------------------------------------------

    def _fit_settings(self, task: str, outputs: int, quantiles: tuple[float, ...] | None = None) -> FitSettings:
        """Check the arguments and collect them."""
        given = {name: python_number(value) for name, value in self.get_params(deep=False).items()}
        method = method_named(given["method"], collect())
        if method.feature_maps:
            raise ValueError(f"method {method.name!r} smooths feature maps; rows of a table have none")
        if method.pretrained and not isinstance(given["module"], nn.Module):
            raise ValueError(f"method {method.name!r} requires a trained network: pass it as module=")
        own = {} if given["members"] is None else {"members": given["members"]}
        settings = method.complete({**(given["settings"] or {}), **own})
        for name in ("epochs", "patience"):
            if given[name] is not None:
                check_count(name, given[name])
        if given["batch_size"] != "auto":
            check_count("batch_size", given["batch_size"])
        check_number("lr", given["lr"], 0, above=True)
        check_number("weight_decay", given["weight_decay"], 0)
        return FitSettings(method, settings, task, outputs, quantiles, device_of(given["device"]), given)

    def _split(self, groups: Tensor, seed: int) -> list[tuple[Tensor, Tensor]]:
        """Split rows into training and held-out rows, once or per fold, stratified by group.

        A group is a class. The only row of a class is not held out.
        """
        every, folds, share = torch.arange(len(groups)), python_number(self.folds), python_number(self.validation)
        if folds is not None:
            if type(folds) is not int or not 2 <= folds <= len(groups):
                raise ValueError(
                    f"folds must be a whole number from 2 to the number of rows, {len(groups)}, got {folds!r}"
                )
            return [_split_off(every, fold_rows(groups, folds, fold, seed)) for fold in range(folds)]
        if share is None:
            return [(every, every[:0])]
        check_number("validation", share, 0, above=True, below=1)
        several = every[(groups.bincount()[groups] > 1)]
        count = min(max(1, round(share * len(groups))), len(several) - 1)
        held = several[spread(groups[several], count, seed)] if count > 0 else every[:0]
        return [_split_off(every, held)]

    def _learn(
        self, table: InputTable, y: Tensor, groups: Tensor, weight: Tensor | None, fit_settings: FitSettings
    ) -> None:
        """Train on a table, with targets that are classes `[N]` or numbers `[N, D]`."""
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        used = torch.arange(len(y)) if weight is None else weight.nonzero().flatten()
        parts = [(used[train], used[held]) for train, held in self._split(groups[used], seed)]
        fitted = used if len(parts) > 1 else parts[0][0]
        model = _fit_preprocessing(table, y, fitted, fit_settings.outputs)
        x = model.inputs(table.columns)
        if weight is not None:
            weight = (weight / weight[used].mean()).float()
        target = model.standardised(y, fit_settings.quantiles is not None)
        rows = TensorDataset(x, target) if weight is None else TensorDataset(x, target, weight)
        layout = layout_of(model.encoder.features, x[fitted])
        calls: list[tuple[Any, ...]] = []
        for number, (train, held) in enumerate(parts):
            validation = TensorDataset(*rows[held]) if len(held) else None
            calls.append((fit_settings, TensorDataset(*rows[train]), validation, layout, mixed(seed, number)))
        results = self._train(calls)
        networks = tuple(net for net, _ in results)
        self.history_ = [history for _, history in results]
        self.n_iter_ = max(map(len, self.history_))
        model = replace(model, networks=networks)
        tests = [(net, x[held], target[held]) for net, (_, held) in zip(model.exact, parts, strict=True) if len(held)]
        if tests:
            predictive = Predictive.concat(predict_on_cpu(net, own) for net, own, _ in tests)
            truth = torch.cat([own for _, _, own in tests])
            # Scaling would undo the effect of weights.
            scaling = helpful_scaling(predictive, truth, networks[0].members, SEED) if weight is None else None
            model = replace(model, scaling=scaling, conformal=Conformal.fit(predictive, truth))
        self.model_: FittedModel = model

    def _train(self, calls: list[tuple[Any, ...]]) -> list[tuple[Multitude, list[Epoch]]]:
        """Call `train_network` with each tuple of arguments, in parallel if `n_jobs` allows."""
        count = self._count()
        if count is not None and count > 1 and len(calls) > 1:
            return list(Parallel(n_jobs=count)(delayed(train_network)(*call) for call in calls))
        with torch_threads(count):
            return [train_network(*call) for call in calls]

    # -- files -------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Save the fitted estimator to a safetensors file with a checksum, without pickle.

        The file does not contain the code of your own `module`, a random state that is not a number, and objects of
        your own classes in `settings`.

        Args:
            path: File to write.

        Returns:
            The path.
        """
        from multitudes.sklearn.estimator_files import save

        check_is_fitted(self)
        return save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], module: Any = None) -> Self:
        """Load an estimator from a file written by `save`.

        Args:
            path: File to read.
            module: Your own `module`, if the estimator has one; files contain no code.

        Returns:
            The fitted estimator.
        """
        from multitudes.sklearn.estimator_files import load

        return load(cls, path, module)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags


@dataclass(frozen=True)
class InputTable:
    """Columns of a table, types set by the user, and whether the table is an array of numbers."""

    columns: dict[str, Column]
    read_as: Mapping[str, str]
    numbers: bool


def _fit_preprocessing(table: InputTable, y: Tensor, rows: Tensor, outputs: int) -> FittedModel:
    """Fit the preprocessing of inputs and targets to these rows."""
    encoder = fitted_encoder(table.columns, rows, table.read_as, table.numbers)
    x = encoded(encoder, table.columns)[rows]
    preprocessing = Preprocessing.fitted(x, [number for each in encoder.features for number in each.numeric])
    center, scale = mean_std(y[rows]) if y.is_floating_point() else (None, None)
    return FittedModel(encoder, preprocessing, (), outputs, center, scale)


def _split_off(every: Tensor, held: Tensor) -> tuple[Tensor, Tensor]:
    """Return the training rows and the held-out rows."""
    kept = torch.ones(len(every), dtype=torch.bool)
    kept[held] = False
    return every[kept], held
