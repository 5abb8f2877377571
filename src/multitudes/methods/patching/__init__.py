"""Ensemble model patching: its layers, its conversion and objective, and its rows for studies."""

from multitudes.methods.patching.conversion import ROWS, Patched, family, patched, patching_kl

__all__ = ["ROWS", "Patched", "family", "patched", "patching_kl"]
