"""The fitted model of an estimator: encoder of rows, networks, and their calibration on held-out rows."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from multitudes.base.checks import check_number
from multitudes.ensemble.multitude import Multitude
from multitudes.evaluation.calibrate import Calibration
from multitudes.evaluation.conformal import Conformal
from multitudes.lab.data.tables.columns import Column
from multitudes.lab.data.tables.table import TableEncoder
from multitudes.sklearn.frames import encoded
from multitudes.tasks.predictive import Predictive

ROWS = 1024
"""Rows predicted per batch."""
SEED = 0
"""Seed of draws: equal rows get equal predictions."""


@dataclass(frozen=True, eq=False)
class FittedModel:
    """Networks with the encoder and preprocessing of their inputs.

    `outputs` is the number of network outputs. `center` and `scale` `[D]` standardise the targets, and are None for
    classes. `scaling` calibrates probabilities or variances, if that helps. `conformal` has the scores of the held-out
    rows from unscaled predictions, because scaling was fitted to these rows.
    """

    encoder: TableEncoder
    preprocessing: nn.Module
    networks: tuple[Multitude, ...]
    outputs: int
    center: Tensor | None = None
    scale: Tensor | None = None
    scaling: Calibration | None = None
    conformal: Conformal | None = None

    # -- predictions -------------------------------------------------------------------------------------

    def inputs(self, columns: Mapping[str, Column]) -> Tensor:
        """Return the inputs of the networks, `[N, F]`."""
        return self.preprocessing(encoded(self.encoder, columns))

    def predictive(self, x: Tensor) -> Predictive:
        """Predict inputs with all members of all networks, without scaling, on the CPU."""
        parts = [predict_on_cpu(net, x) for net in self.exact]
        return replace(parts[0], predictions=torch.cat([part.predictions for part in parts], 0))

    @cached_property
    def exact(self) -> tuple[Multitude, ...]:
        """The networks in float64 if possible: in float32, predictions depend on the batch by rounding."""
        return tuple(_in_float64(net, len(self.encoder.names)) for net in self.networks)

    def scaled(self, predictive: Predictive) -> Predictive:
        """Apply the scaling, if any."""
        return predictive if self.scaling is None else self.scaling(predictive)

    def read(self, columns: Mapping[str, Column], what: Callable[[Predictive], tuple[Tensor, ...]]) -> list[Any]:
        """Return quantities of the predictions of all rows as arrays, computed in batches."""
        with torch.no_grad():
            parts = [what(self.predictive(x)) for x in self.inputs(columns).split(ROWS)]
        return [torch.cat(own).double().numpy() if own[0].is_floating_point() else torch.cat(own).numpy()
                for own in zip(*parts, strict=True)]  # fmt: skip

    # -- units -------------------------------------------------------------------------------------------

    def standardised(self, y: Tensor, flat: bool) -> Tensor:
        """Standardise targets that are numbers; `[N]` if `flat`."""
        if self.center is None or self.scale is None:
            return y
        standard = ((y - self.center) / self.scale).float()
        return standard[:, 0] if flat else standard

    def in_units(self, values: Tensor) -> Tensor:
        """Convert predicted numbers to the units of the targets; `[N]` for one target."""
        assert self.center is not None
        return self.spread_in_units(values) + self.center

    def spread_in_units(self, values: Tensor, power: int = 1) -> Tensor:
        """Convert deviations (power 1) or variances (power 2) to the units of the targets."""
        assert self.scale is not None
        found = values.double() * self.scale**power
        return found[:, 0] if found.shape[1:] == (1,) else found

    def conformal_at(self, level: float) -> Conformal:
        """Return the conformal calibration; warn if there are too few held-out rows for this level."""
        check_number("level", level, 0, above=True, below=1)
        if self.conformal is None:
            raise ValueError("sets and intervals require held-out rows: fit with validation=0.15 or folds=5")
        if self.conformal.threshold(level) == np.inf:
            rows = round(float(self.conformal.shares.sum()))
            warnings.warn(
                f"{rows} held-out rows are too few for level={level:g}, so sets and intervals exclude nothing: use "
                "folds=5, more rows or a lower level", UserWarning, stacklevel=3,
            )  # fmt: skip
        return self.conformal

    # -- copies ------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the networks on the CPU."""
        networks = tuple(copy.deepcopy(net).cpu() for net in self.networks)
        return {name: value for name, value in vars(self).items() if name != "exact"} | {"networks": networks}


def _in_float64(net: Multitude, inputs: int) -> Multitude:
    """Return a copy in float64, or the network itself if its code requires float32."""
    exact = copy.deepcopy(net).double()
    try:
        predict_on_cpu(exact, torch.zeros(1, inputs))
    except (RuntimeError, ValueError):
        return net
    return exact


def predict_on_cpu(net: Multitude, x: Tensor) -> Predictive:
    """Predict inputs `[N, F]`, and move the predictions to the CPU."""
    like = next((parameter for parameter in net.parameters()), x)
    return net.predict(x.to(like.device, like.dtype), seed=SEED).cpu()
