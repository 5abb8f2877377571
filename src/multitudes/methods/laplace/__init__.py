"""Last-layer Laplace: layers, curvature, prior, conversion and the row for studies."""

from multitudes.methods.laplace.conversion import ROWS, laplace
from multitudes.methods.laplace.prediction import Laplace, LaplaceMembers

__all__ = ["ROWS", "Laplace", "LaplaceMembers", "laplace"]
