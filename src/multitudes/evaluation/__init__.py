"""Use after training: `predict` a data set, `evaluate` a network, `calibrate` it.

Imports `ensemble`, `metrics` and `shift`. Scalings are in `temperature.py` and conformal scores in `conformal.py`.
Metrics that are declared in `metrics` appear here automatically.
"""
