"""Ensemble model patching: layers, conversion, objective and rows for studies."""

from multitudes.methods.patching.conversion import ROWS, Patched, family, patched, patching_kl

__all__ = ["ROWS", "Patched", "family", "patched", "patching_kl"]
