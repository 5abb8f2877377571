"""After training: `predict` a data set, `evaluate` a network, `calibrate` it.

Imports `core`, `metrics` and `shift`. A new scaling goes into `temperature.py`, a new conformal score into
`conformal.py`; a new metric is declared in the room `metrics` and appears here by itself.
"""
