"""Layers and multitudes of the methods, re-exported for building networks by hand and for `isinstance`.

Imports `methods`, where each class is defined in its method's file.
"""

from multitudes.methods.patching import Patched
from multitudes.methods.smoothing import Blur, Prob, Smooth
from multitudes.methods.subspace import Subspace
from multitudes.methods.temporal import Stream
from multitudes.methods.variance.layers import Absolute, VarianceConv1d, VarianceConv2d, VarianceConv3d, VarianceLinear

__all__ = [
    "Absolute",
    "Blur",
    "Patched",
    "Prob",
    "Smooth",
    "Stream",
    "Subspace",
    "VarianceConv1d",
    "VarianceConv2d",
    "VarianceConv3d",
    "VarianceLinear",
]
