"""Draws: random passes of one network, and frozen noise.

Imports `base`, `networks` and `tasks`. Stochastic layers derive from `Stochastic` in `networks/stochastic.py`.
"""
