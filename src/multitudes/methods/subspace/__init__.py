"""Subspaces, SWA and SWAG: networks that draw their weights, their conversions, and their rows for studies."""

from multitudes.methods.subspace.conversion import KINDS, Subspace, subspace, swa, swag
from multitudes.methods.subspace.layers import Around
from multitudes.methods.subspace.row import ROWS

__all__ = ["KINDS", "ROWS", "Around", "Subspace", "subspace", "swa", "swag"]
