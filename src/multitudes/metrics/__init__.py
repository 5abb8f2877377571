"""Metrics of predictions, each as a function of one batch and as a streaming `torchmetrics.Metric`.

Imports `tasks`, `ensemble` and, for weights during training, `training.recorder`. A metric is one declaration (see
`declare.py`) in a module of this folder. The modules are discovered, so `evaluate`, leaderboards and reports include
every metric. A module's `__all__` lists its public names besides the metrics.

`UNCERTAINTIES` maps names to the functions of `uncertainties.py`; `disagreement` here is the mean over all rows.
"""

from typing import Any

from multitudes.metrics.declare import discover

_public = discover(__name__, __path__)
globals().update(_public)
__all__ = sorted(_public)


def __getattr__(name: str) -> Any:  # for type checkers, which do not find the discovered names
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
