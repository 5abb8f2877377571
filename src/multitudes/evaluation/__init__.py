"""After training: `predict` a data set, `evaluate` a network, `calibrate` it.

Imports `core`, `metrics` and `shift`. New scalings go into `temperature.py`, new conformal scores into `conformal.py`;
new metrics, declared in `metrics`, appear here automatically.
"""
