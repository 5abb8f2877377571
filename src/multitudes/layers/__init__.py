"""The layers and networks that the methods put into a network, for building with them by hand and for `isinstance`.

Imports `methods`, and declares nothing: each class is that of its method's own file. A newcomer adds a name here when
users need it.
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
