"""The base of both estimators: read a table, train on it, and read the predictions."""

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
from multitudes.sklearn.fitted import SEED, Learned, predicted
from multitudes.sklearn.frames import check_names, columns_of, encoded, fitted_encoder, is_frame, of_numbers, plain
from multitudes.sklearn.train import Recipe, threads, trained
from multitudes.tasks.predictive import Predictive
from multitudes.training.trainer import Epoch

Job = tuple[Recipe, TensorDataset, TensorDataset | None, Any, int]
"""Arguments of `trained`."""


@dataclass(eq=False, repr=False)
class MultitudeEstimator(BaseEstimator):
    """Base class of both estimators, independent of the kind of target.

    One of scikit-learn's checks (`check_estimator`) cannot pass: `check_sample_weight_equivalence_on_dense_data`. A
    duplicated row may be held out once and be in two batches, so a weight of two is equivalent only on average.
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

    def _table(self, X: Any, reset: bool) -> Table:
        """Read a table as columns; `reset` learns their names and number, otherwise they are checked."""
        fewest = 2 if reset else 1
        if is_frame(X):
            check_names(X)
            validate_data(self, X, reset=reset, skip_check_array=True)
            if len(X) < fewest:
                raise ValueError(f"X must hold {fewest} rows or more, got n_samples = {len(X)}")
            return Table(*columns_of(X), numbers=False)
        try:
            values = validate_data(
                self, X, reset=reset, dtype="numeric", ensure_all_finite="allow-nan", ensure_min_samples=fewest
            )
        except ValueError as error:
            if "could not convert string" not in str(error) and "bytes/strings" not in str(error):
                raise
            raise ValueError(f"X must hold numbers, or be a frame with named columns, got texts: {error}") from error
        names = getattr(self, "feature_names_in_", [f"x{at}" for at in range(values.shape[1])])
        return Table(of_numbers(values, list(map(str, names))), {}, numbers=True)

    def _columns(self, X: Any) -> dict[str, Column]:
        """Return the columns of rows to predict, which must be those of `fit`."""
        check_is_fitted(self)
        return self._table(X, reset=False).columns

    def _weights(self, sample_weight: Any, rows: int) -> Tensor | None:
        """Return the weights of rows, `[N]`; None if not given."""
        if sample_weight is None:
            return None
        weight = _check_sample_weight(sample_weight, np.empty((rows, 1)), dtype=np.float64)
        if (weight < 0).any():
            at = int((weight < 0).argmax())
            raise ValueError(f"sample_weight must be 0 or more, got {weight[at]:g} in row {at}")
        return torch.tensor(weight)

    def _read(self, columns: dict[str, Column], what: Callable[[Predictive], tuple[Tensor, ...]]) -> list[Any]:
        """Return quantities of the predictions of all rows, as arrays."""
        with threads(self._count()):
            return self.model_.read(columns, what)

    def _count(self) -> int | None:
        return None if self.n_jobs is None else effective_n_jobs(self.n_jobs)

    # -- training ----------------------------------------------------------------------------------------

    def _recipe(self, task: str, outputs: int, quantiles: tuple[float, ...] | None = None) -> Recipe:
        """Check the arguments and collect them in a recipe."""
        given = {name: plain(value) for name, value in self.get_params(deep=False).items()}
        method = method_named(given["method"], collect())
        if method.feature_maps:
            raise ValueError(f"method {method.name!r} smooths feature maps, and the inputs are rows of a table")
        if method.pretrained and not isinstance(given["module"], nn.Module):
            raise ValueError(f"method {method.name!r} is for networks that were trained before: pass one as module=")
        own = {} if given["members"] is None else {"members": given["members"]}
        settings = method.complete({**(given["settings"] or {}), **own})
        for name in ("epochs", "patience"):
            if given[name] is not None:
                check_count(name, given[name])
        if given["batch_size"] != "auto":
            check_count("batch_size", given["batch_size"])
        check_number("lr", given["lr"], 0, above=True)
        check_number("weight_decay", given["weight_decay"], 0)
        return Recipe(method, settings, task, outputs, quantiles, device_of(given["device"]), given)

    def _divided(self, groups: Tensor, seed: int) -> list[tuple[Tensor, Tensor]]:
        """Split rows into training and held-out ones, once or per fold.

        Splits are stratified by group, the rows of a class; from a class with one row, nothing is held out.
        """
        every, folds, share = torch.arange(len(groups)), plain(self.folds), plain(self.validation)
        if folds is not None:
            if type(folds) is not int or not 2 <= folds <= len(groups):
                raise ValueError(f"folds must be a whole number from 2 to the {len(groups)} rows, got {folds!r}")
            return [_apart(every, fold_rows(groups, folds, fold, seed)) for fold in range(folds)]
        if share is None:
            return [(every, every[:0])]
        check_number("validation", share, 0, above=True, below=1)
        several = every[(groups.bincount()[groups] > 1)]
        count = min(max(1, round(share * len(groups))), len(several) - 1)
        held = several[spread(groups[several], count, seed)] if count > 0 else every[:0]
        return [_apart(every, held)]

    def _learn(self, table: Table, y: Tensor, groups: Tensor, weight: Tensor | None, recipe: Recipe) -> None:
        """Train on a table, with targets as classes `[N]` or numbers `[N, D]`."""
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        used = torch.arange(len(y)) if weight is None else weight.nonzero().flatten()
        parts = [(used[train], used[held]) for train, held in self._divided(groups[used], seed)]
        fitted = used if len(parts) > 1 else parts[0][0]
        learned = _prepared(table, y, fitted, recipe.outputs)
        x = learned.seen(table.columns)
        if weight is not None:
            weight = (weight / weight[used].mean()).float()
        target = learned.standardised(y, recipe.quantiles is not None)
        rows = TensorDataset(x, target) if weight is None else TensorDataset(x, target, weight)
        layout = layout_of(learned.encoder.features, x[fitted])
        jobs: list[Job] = []
        for number, (train, held) in enumerate(parts):
            out = TensorDataset(*rows[held]) if len(held) else None
            jobs.append((recipe, TensorDataset(*rows[train]), out, layout, mixed(seed, number)))
        found = self._run(jobs)
        self.history_ = [history for _, history in found]
        self.n_iter_ = max(map(len, self.history_))
        learned = replace(learned, networks=tuple(net for net, _ in found))
        tested = [
            (net, x[held], target[held]) for net, (_, held) in zip(learned.exact, parts, strict=True) if len(held)
        ]
        if tested:
            predictive = Predictive.concat(predicted(net, own) for net, own, _ in tested)
            truth, members = torch.cat([own for _, _, own in tested]), learned.networks[0].members
            # Scaling would undo the effect of weights.
            scaling = helpful_scaling(predictive, truth, members, SEED) if weight is None else None
            learned = replace(learned, scaling=scaling, conformal=Conformal.fit(predictive, truth))
        self.model_: Learned = learned

    def _run(self, jobs: list[Job]) -> list[tuple[Multitude, list[Epoch]]]:
        """Train networks one after the other, or those of folds in parallel."""
        count = self._count()
        if count is not None and count > 1 and len(jobs) > 1:
            return list(Parallel(n_jobs=count)(delayed(trained)(*job) for job in jobs))
        with threads(count):
            return [trained(*job) for job in jobs]

    # -- files -------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the estimator to one file, without pickle; return its path.

        The file is safetensors, sealed by a checksum, with all settings in its header. It does not contain your own
        `module`, a random state that is no number, or objects of your own classes in `settings`.
        """
        from multitudes.sklearn.estimator_files import save

        check_is_fitted(self)
        return save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], module: Any = None) -> Self:
        """Load the estimator that `save` wrote; pass your own `module` again if it has one: files contain no code."""
        from multitudes.sklearn.estimator_files import load

        return load(cls, path, module)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags


@dataclass(frozen=True)
class Table:
    """The columns of a table, their forced kinds, and whether they are the numbers of an array."""

    columns: dict[str, Column]
    read_as: Mapping[str, str]
    numbers: bool


def _prepared(table: Table, y: Tensor, rows: Tensor, outputs: int) -> Learned:
    """Fit the preprocessing of inputs and targets to these rows."""
    encoder = fitted_encoder(table.columns, rows, table.read_as, table.numbers)
    x = encoded(encoder, table.columns)[rows]
    preprocessing = Preprocessing.fitted(x, [number for each in encoder.features for number in each.numeric])
    center, scale = mean_std(y[rows]) if y.is_floating_point() else (None, None)
    return Learned(encoder, preprocessing, (), outputs, center, scale)


def _apart(every: Tensor, held: Tensor) -> tuple[Tensor, Tensor]:
    """Return the training rows and the held-out ones."""
    kept = torch.ones(len(every), dtype=torch.bool)
    kept[held] = False
    return every[kept], held
