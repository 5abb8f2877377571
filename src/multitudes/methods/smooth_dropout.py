"""MC dropout of a smoothed network: Park & Kim, *Blurs behave like ensembles*, 2022, section 3."""

from __future__ import annotations

from torch import Tensor, nn

from multitudes.ensemble.multitude import Multitude
from multitudes.methods import dropout, smoothing
from multitudes.methods.registry import Method, Settings


def _build(network: nn.Module, example: Tensor, settings: Settings, seed: int) -> Multitude:
    own = {name: settings[name] for name in dropout.SETTINGS}
    smoothed = smoothing.smooth(network, **{name: settings[name] for name in smoothing.SETTINGS}, example=example)
    return dropout.kept_on_or_inserted(smoothed, example, own, seed)


ROWS = (
    Method(
        "smooth_dropout", _build, {**smoothing.SETTINGS, **dropout.SETTINGS},
        "As mc_dropout, and a small blur before each down-sampling.",
        "Pick it when you can make only a few draws: smoothing does the work of many.",
        place=120, feature_maps=True,
    ),
)  # fmt: skip
