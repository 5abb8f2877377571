"""Draws: many random passes of one network, and noise that stays the same between passes.

Imports `base`, `networks` and `tasks`. Stochastic layers derive from `Stochastic` in `networks/stochastic.py`.
"""
