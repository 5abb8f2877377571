"""Methods: one file per paper, or a folder for larger ones, with layers, conversion, objective and `ROWS`.

Imports `ensemble`, `surgery` and `training`; no method imports another. Studies and the command line read the `ROWS` at
the end of each file (see `registry.py`).
"""
