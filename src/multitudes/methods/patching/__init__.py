"""Ensemble model patching: its layers, its conversion and objective, and its rows for studies."""

from multitudes.methods.patching.conversion import Overhead, Patched, family, patched, patching_kl
from multitudes.methods.patching.row import ROWS

__all__ = ["ROWS", "Overhead", "Patched", "family", "patched", "patching_kl"]
