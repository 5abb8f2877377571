"""Subspaces, SWA and SWAG: networks that draw their weights, their conversions, and their rows for studies."""

from multitudes.methods.subspace.conversion import KINDS, ROWS, Subspace, subspace, swa, swag
from multitudes.methods.subspace.layers import Around

__all__ = ["KINDS", "ROWS", "Around", "Subspace", "subspace", "swa", "swag"]
