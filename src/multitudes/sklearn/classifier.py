"""`MultitudeClassifier`: classes, their probabilities, and conformal sets of classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import ClassifierMixin
from sklearn.utils import check_consistent_length, column_or_1d, compute_sample_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import assert_all_finite

from multitudes.sklearn.base import MultitudeEstimator
from multitudes.tasks.predictive import Predictive


@dataclass(kw_only=True, eq=False, repr=False)
class MultitudeClassifier(ClassifierMixin, MultitudeEstimator):
    """A classifier for tables with many members that quantify its uncertainty; TabM by default.

    Args:
        method: a method of the library, by the name that `multitudes methods` lists.
        members: number of members; the default is the method's own.
        module: a network, or a function or class that builds one from `(inputs, outputs)`, instead of the default for
            tables, `mt.models.tabular`. It maps features `[B, inputs]` to one logit per class, `[B, outputs]`.
        settings: other settings of the method, by name.
        epochs: maximum number of epochs; the default is 200, and fewer above 10,000 rows.
        patience: epochs without a better score on the held-out rows before training stops; the best weights are kept.
            None trains all epochs, and the held-out rows are only used for calibration.
        batch_size: rows in a batch; "auto" depends on the number of rows.
        lr, weight_decay: of AdamW.
        validation: share of the rows held out for early stopping and calibration; None for none.
        folds: train this many networks instead, each without a part of the rows, and predict with all of them: every
            row is used for training, and sets are calibrated on all rows, each by the network not trained on it.
        class_weight: None, "balanced", or the weight of each class.
        random_state: as in scikit-learn.
        n_jobs: number of threads, or with `folds` of networks trained in parallel; None leaves it to torch.
        device: "auto" uses a GPU if there is one.
        verbose: whether to show progress; None does so on a terminal, after two seconds.

    X is an array of numbers or a frame of pandas, polars or Arrow, whose columns may hold numbers, texts, categories
    and dates. Missing values are filled in and flagged. Fitted attributes: `classes_`, `model_` (the encoder, the
    networks and their calibration), `history_` (the epochs of each network), `n_iter_`, `n_features_in_` and
    `feature_names_in_`.

    >>> X, y = np.array([[0.0], [0.1], [0.9], [1.0]] * 10), np.array(["no", "no", "yes", "yes"] * 10)
    >>> model = MultitudeClassifier("packed", epochs=20, random_state=0).fit(X, y)
    >>> model.predict([[0.05], [0.95]])
    array(['no', 'yes'], dtype='<U3')
    """

    class_weight: Mapping[Any, float] | str | None = None

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train on rows X `[N, F]` with classes y `[N]`, optionally weighted."""
        table = self._table(X, reset=True)
        labels = self._labels(y)
        check_consistent_length(next(iter(table.columns.values())).values, labels)
        self.classes_, numbers = np.unique(labels, return_inverse=True)
        weight = self._weights(sample_weight, len(labels))
        if self.class_weight is not None:
            own = torch.from_numpy(compute_sample_weight(self.class_weight, labels))
            weight = own if weight is None else own * weight
        target = torch.from_numpy(numbers)
        found = target if weight is None else target[weight > 0]
        if len(found.unique()) < 2:
            only = self.classes_.tolist()[int(found[0])]
            raise ValueError(f"y must hold 2 classes or more, got one class alone: {only!r}")
        recipe = self._recipe("classification", len(self.classes_))
        self._learn(table, target, target, weight, recipe)
        return self

    def _labels(self, y: Any) -> Any:
        if y is None:
            raise ValueError(f"{type(self).__name__} requires y to be passed, but the target y is None")
        labels = column_or_1d(y, warn=True)
        assert_all_finite(labels, input_name="y")
        check_classification_targets(labels)
        return labels

    # -- predictions -------------------------------------------------------------------------------------

    def predict(self, X: Any) -> Any:
        """Return the most probable class of each row, `[N]`."""
        best = self.predict_proba(X).argmax(1)
        return self.classes_[best]

    def predict_proba(self, X: Any) -> Any:
        """Return the probabilities of all classes, `[N, C]`, in the order of `classes_`: the mean over members."""
        columns = self._columns(X)
        (probs,) = self._read(columns, lambda p: (self.model_.scaled(p).probs,))
        return probs / probs.sum(1, keepdims=True)  # exactly, in float64

    def predict_set(self, X: Any, level: float = 0.9) -> Any:
        """Return sets of classes, boolean `[N, C]`, that contain the true class with probability `level`.

        Split conformal prediction on the held-out rows, or with `folds` on all rows, each predicted by the network not
        trained on it (see `evaluation.conformal`).
        """
        columns, conformal = self._columns(X), self.model_.conformal_at(level)

        def read(p: Predictive) -> tuple[Any, ...]:
            return (conformal.set(p, level),)

        return self._read(columns, read)[0]

    def uncertainty(self, X: Any) -> dict[str, Any]:
        """Return the uncertainty of each row in nats: `total`, `aleatoric` and `epistemic`, `[N]` each.

        The total is the entropy of the members' mean, the aleatoric part the mean of their entropies, and the epistemic
        part their difference, the mutual information: what more data could remove.
        """
        names = ("total", "aleatoric", "epistemic")
        columns = self._columns(X)
        found = self._read(columns, lambda p: (p.entropy, p.expected_entropy, p.mutual_information))
        return dict(zip(names, found, strict=True))
