"""The fitted part of an estimator: an encoder of rows, networks, and their calibration on held-out rows."""

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
"""Seed of stochastic networks, so that equal rows get equal predictions."""


@dataclass(frozen=True, eq=False)
class Learned:
    """Networks, with the encoder and preprocessing of their inputs.

    `outputs` is the number of network outputs; `center` and `scale` `[D]` standardise the targets, None for classes.
    `scaling` calibrates probabilities or variances, if that helps. `conformal` has the scores of the held-out rows,
    from unscaled predictions: apart from early stopping, nothing was fitted to these rows.
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

    def seen(self, columns: Mapping[str, Column]) -> Tensor:
        """Return the networks' inputs for rows, `[N, F]`."""
        return self.preprocessing(encoded(self.encoder, columns))

    def predictive(self, x: Tensor) -> Predictive:
        """Predict inputs with all members of all networks, before any scaling, on the CPU."""
        parts = [predicted(net, x) for net in self.exact]
        return replace(parts[0], predictions=torch.cat([part.predictions for part in parts], 0))

    @cached_property
    def exact(self) -> tuple[Multitude, ...]:
        """The networks in float64, if they support it.

        In float32, rounding would make predictions depend on the batch and the position in it.
        """
        return tuple(_in_float64(net, len(self.encoder.names)) for net in self.networks)

    def scaled(self, predictive: Predictive) -> Predictive:
        """Calibrate predictions if that helps."""
        return predictive if self.scaling is None else self.scaling(predictive)

    def read(self, columns: Mapping[str, Column], what: Callable[[Predictive], tuple[Tensor, ...]]) -> list[Any]:
        """Return quantities of the predictions of all rows, as arrays, computed in batches."""
        with torch.no_grad():
            parts = [what(self.predictive(x)) for x in self.seen(columns).split(ROWS)]
        return [torch.cat(own).double().numpy() if own[0].is_floating_point() else torch.cat(own).numpy()
                for own in zip(*parts, strict=True)]  # fmt: skip

    # -- units -------------------------------------------------------------------------------------------

    def standardised(self, y: Tensor, flat: bool) -> Tensor:
        """Return training targets: classes unchanged, numbers standardised; `[N]` if `flat`."""
        if self.center is None or self.scale is None:
            return y
        standard = ((y - self.center) / self.scale).float()
        return standard[:, 0] if flat else standard

    def in_units(self, values: Tensor) -> Tensor:
        """Convert predicted numbers to the units of the targets, `[N]` for a single target."""
        assert self.center is not None
        return self.spread_in_units(values) + self.center

    def spread_in_units(self, values: Tensor, power: int = 1) -> Tensor:
        """Convert deviations, or with a power of 2 variances, to the units of the targets."""
        assert self.scale is not None
        found = values.double() * self.scale**power
        return found[:, 0] if found.shape[1:] == (1,) else found

    def conformal_at(self, level: float) -> Conformal:
        """Return the scores for sets or intervals of a level between 0 and 1; warn if held-out rows are too few."""
        check_number("level", level, 0, above=True, below=1)
        if self.conformal is None:
            raise ValueError("sets and intervals need held-out rows: fit with validation=0.15, or with folds=5")
        if self.conformal.threshold(level) == np.inf:
            rows = round(float(self.conformal.shares.sum()))
            warnings.warn(
                f"{rows} held-out rows are too few for level={level:g}, so that nothing is excluded: use folds=5, "
                "more rows or a lower level", UserWarning, stacklevel=3,
            )  # fmt: skip
        return self.conformal

    # -- copies ------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Move networks to the CPU, for other machines."""
        networks = tuple(copy.deepcopy(net).cpu() for net in self.networks)
        return {name: value for name, value in vars(self).items() if name != "exact"} | {"networks": networks}


def _in_float64(net: Multitude, inputs: int) -> Multitude:
    """Return a copy in float64, or the network itself if its code needs float32."""
    exact = copy.deepcopy(net).double()
    try:
        predicted(exact, torch.zeros(1, inputs))
    except (RuntimeError, ValueError):
        return net
    return exact


def predicted(net: Multitude, x: Tensor) -> Predictive:
    """Predict inputs `[N, F]`; the predictions are on the CPU."""
    like = next((parameter for parameter in net.parameters()), x)
    return net.predict(x.to(like.device, like.dtype), seed=SEED).cpu()
