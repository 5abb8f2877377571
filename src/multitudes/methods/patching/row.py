"""Ensemble model patching in studies."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from multitudes.core.multitude import Multitude
from multitudes.methods.patching.conversion import patched
from multitudes.methods.patching.layers import NORMS
from multitudes.methods.registry import Method, Settings


def _build(network: nn.Module, example: Tensor, settings: Settings, seed: int, cross: bool = False) -> Multitude:
    """By default the norm and output layers are patched; where there is no norm layer, the output alone."""
    layers = settings["layers"]
    if layers is None:
        layers = "norm+output" if any(isinstance(layer, NORMS) for layer in network.modules()) else "output"
    return patched(network, **{**settings, "layers": layers}, cross=cross, example=example, seed=seed)


_SETTINGS = {"components": 5, "layers": None, "weight_precision": 1.0, "bias_precision": 1.0, "spread": 0.1}
_COSTS = "Some copies of small layers, norms and the output; a forward a draw."
ROWS = (
    Method(
        "patched", _build, _SETTINGS, _COSTS,
        "Pick it when the network has batch norm, which dropout harms.",
        place=80,
    ),
    Method(
        "cross_patched", partial(_build, cross=True), _SETTINGS, _COSTS,
        "Pick it in place of patched when draws shall differ more finely, each weight on its own.",
        place=90,
    ),
)  # fmt: skip
