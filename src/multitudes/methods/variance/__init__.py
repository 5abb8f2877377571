"""Variance networks: layers, conversion, objective and the phase transition (kappa)."""

from multitudes.methods.variance.conversion import ROWS, variance, variance_kl
from multitudes.methods.variance.transition import kappa, phase, sparsify

__all__ = ["ROWS", "kappa", "phase", "sparsify", "variance", "variance_kl"]
