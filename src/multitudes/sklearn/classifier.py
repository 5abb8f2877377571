"""`MultitudeClassifier`: probabilities of classes, and conformal sets of classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import ClassifierMixin
from sklearn.utils import check_consistent_length, column_or_1d, compute_sample_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import assert_all_finite, check_is_fitted

from multitudes.sklearn.base import MultitudeEstimator
from multitudes.tasks.predictive import Predictive


@dataclass(kw_only=True, eq=False, repr=False)
class MultitudeClassifier(ClassifierMixin, MultitudeEstimator):
    """Classifier for tables with many members that quantify its uncertainty; TabM by default.

    X is an array of numbers, or a pandas, polars or Arrow frame with numbers, texts, categories and dates. Missing
    values are imputed and flagged.

    Args:
        method: Name of a method, as listed by `multitudes methods`.
        members: Number of members. Default: that of the method.
        module: Network that maps features `[B, inputs]` to one logit per class `[B, outputs]`, or a function or class
            that builds it from `(inputs, outputs)`. Default: `multitudes.models.tabular`.
        settings: Other settings of the method, by name.
        epochs: Maximum number of epochs. Default: 200, and fewer above 10,000 rows.
        patience: Number of epochs without a better validation score before training stops with the best weights. None
            trains all epochs, and uses the held-out rows only for calibration.
        batch_size: Number of rows in a batch; "auto" depends on the number of rows.
        lr: Learning rate of AdamW.
        weight_decay: Weight decay of AdamW.
        validation: Share of the rows that is held out for early stopping and calibration, or None.
        folds: Number of networks to train by cross-validation and to predict with, instead of one. All rows are used
            for training, and for calibration by the network that was not trained on them.
        class_weight: Weights by class, "balanced", or None.
        random_state: Seed, random state or None, as in scikit-learn.
        n_jobs: Number of threads, or of processes with `folds`. None uses torch's setting.
        device: Device for training; "auto" uses a GPU if there is one.
        verbose: Show progress. Default: on a terminal, after two seconds.

    Attributes:
        classes_: Classes in the order of probabilities.
        model_: Fitted encoder, networks and calibration.
        history_: Epochs of each network.
        n_iter_: Maximum number of epochs of a network.
        n_features_in_: Number of columns.
        feature_names_in_: Names of columns, if X is a frame.

    Example:
        >>> X, y = np.array([[0.0], [0.1], [0.9], [1.0]] * 10), np.array(["no", "no", "yes", "yes"] * 10)
        >>> model = MultitudeClassifier("packed", epochs=20, random_state=0).fit(X, y)
        >>> model.predict([[0.05], [0.95]])
        array(['no', 'yes'], dtype='<U3')
    """

    class_weight: Mapping[Any, float] | str | None = None

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train on rows X `[N, F]` with classes y `[N]` and optional weights `[N]`."""
        table = self._read_table(X, reset=True)
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
            raise ValueError(f"y must hold 2 or more classes, got only {only!r}")
        fit_settings = self._fit_settings("classification", len(self.classes_))
        self._learn(table, target, target, weight, fit_settings)
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
        """Return the mean probabilities of the members, `[N, C]`, in the order of `classes_`."""
        (probs,) = self._predict(X, lambda p: (self.model_.scaled(p).probs,))
        return probs / probs.sum(1, keepdims=True)  # exactly, in float64

    def predict_set(self, X: Any, level: float = 0.9) -> Any:
        """Return sets of classes that contain the true class with a given probability.

        The sets are conformal: they are calibrated on the held-out rows, or with `folds` on all rows.

        Args:
            X: Rows, `[N, F]`.
            level: Probability.

        Returns:
            Boolean array `[N, C]`, True for the classes in the set.
        """
        check_is_fitted(self)
        conformal = self.model_.conformal_at(level)

        def read(p: Predictive) -> tuple[Any, ...]:
            return (conformal.set(p, level),)

        return self._predict(X, read)[0]

    def uncertainty(self, X: Any) -> dict[str, Any]:
        """Return the uncertainty of each row in nats: "total", "aleatoric" and "epistemic", `[N]` each.

        The total is the entropy of the mean prediction. The aleatoric part is the mean entropy of the members. The
        epistemic part is the difference, the mutual information, which more data could remove.
        """
        names = ("total", "aleatoric", "epistemic")
        found = self._predict(X, lambda p: (p.entropy, p.expected_entropy, p.mutual_information))
        return dict(zip(names, found, strict=True))
