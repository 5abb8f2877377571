"""`MultitudeClassifier`: classes, their probabilities, and sets of them that hold the right one."""

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

from multitudes.core.tasks.predictive import Predictive
from multitudes.sklearn.base import MultitudeEstimator


@dataclass(kw_only=True, eq=False, repr=False)
class MultitudeClassifier(ClassifierMixin, MultitudeEstimator):
    """A classifier of tables whose many members say how sure they are; by default TabM.

    Args:
        method: a method of the library, by the name that `multitudes methods` lists.
        members: how many members; by default the method's own number.
        module: a network, or a function or class that makes one of `(inputs, outputs)`, instead of the default for
            tables, `mt.models.tabular`. It maps features `[B, inputs]` to a logit for each class, `[B, outputs]`.
        settings: other settings of the method, by name.
        epochs: how many epochs at most; by default 200, and fewer of more than 10,000 rows.
        patience: after how many epochs without a better score of the held-out rows training ends; the best weights are
            kept. None trains all epochs, and the held-out rows are seen by the calibration alone.
        batch_size: rows in a batch; "auto" goes by the number of rows.
        lr, weight_decay: of AdamW.
        validation: the share of the rows that are held out, to end the training by and to calibrate on; None for none.
        folds: instead of that, train so many networks, each without a part of the rows, and predict by all of them:
            every row trains, and sets are calibrated on all rows, by the network that has not seen them.
        class_weight: None, "balanced", or the weight of each class.
        random_state: as of scikit-learn.
        n_jobs: how many threads, or with `folds` how many networks are trained side by side; None leaves it to torch.
        device: "auto" takes a GPU where there is one.
        verbose: whether to show progress; None does on a terminal, after two seconds.

    X may be an array of numbers or a frame of pandas, polars or Arrow, whose columns may hold numbers, texts,
    categories and dates. Missing values are filled in and flagged. What is fitted: `classes_`, `model_` (the encoder,
    the networks and their calibration), `history_` (the epochs of each network), `n_iter_`, `n_features_in_` and
    `feature_names_in_`.

    >>> X, y = np.array([[0.0], [0.1], [0.9], [1.0]] * 10), np.array(["no", "no", "yes", "yes"] * 10)
    >>> model = MultitudeClassifier("packed", epochs=20, random_state=0).fit(X, y)
    >>> model.predict([[0.05], [0.95]])
    array(['no', 'yes'], dtype='<U3')
    """

    class_weight: Mapping[Any, float] | str | None = None

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train on rows X `[N, F]` and their classes y `[N]`, each row with its weight."""
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
        """The most probable class of each row, `[N]`."""
        best = self.predict_proba(X).argmax(1)
        return self.classes_[best]

    def predict_proba(self, X: Any) -> Any:
        """The probabilities of all classes, `[N, C]`, in the order of `classes_`: the mean of the members'."""
        columns = self._columns(X)
        (probs,) = self._read(columns, lambda p: (self.model_.scaled(p).probs,))
        return probs / probs.sum(1, keepdims=True)  # exactly, in float64

    def predict_set(self, X: Any, level: float = 0.9) -> Any:
        """The classes that may be right, boolean `[N, C]`: the right one is among them with probability `level`.

        Split conformal prediction from the held-out rows, or with `folds` from all rows, each by the network that has
        not seen it (see `evaluation.conformal`).
        """
        columns, conformal = self._columns(X), self.model_.conformal_at(level)

        def read(p: Predictive) -> tuple[Any, ...]:
            return (conformal.set(p, level),)

        return self._read(columns, read)[0]

    def uncertainty(self, X: Any) -> dict[str, Any]:
        """Return the uncertainty of each row in nats: `total`, `aleatoric` and `epistemic`, `[N]` each.

        The total is the entropy of the members' mean, the aleatoric part the mean of their entropies, and the epistemic
        part the rest, the mutual information: what more data could remove.
        """
        names = ("total", "aleatoric", "epistemic")
        columns = self._columns(X)
        found = self._read(columns, lambda p: (p.entropy, p.expected_entropy, p.mutual_information))
        return dict(zip(names, found, strict=True))
