"""Numbers about predictions: each as a plain function of one batch, and as a `torchmetrics.Metric` that streams.

Imports core and, for weights along a training, `training.recorder`. A metric is one declaration (see `declare.py`) in a
module of this folder, old or new. The modules are found, and so `evaluate`, leaderboards and reports have the metric.
A module's `__all__` has what it offers beside its metrics.

`UNCERTAINTIES` are functions of `uncertainties.py` by name; `disagreement` here is the mean over all rows.
"""

from typing import Any

from multitudes.metrics.declare import offered

_offered = offered(__name__, __path__)
globals().update(_offered)
__all__ = sorted(_offered)


def __getattr__(name: str) -> Any:  # by which a type checker knows that there are more names than it sees
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
