"""`fit`, and what a training needs: schedules, optimizers, validation, weights of classes, checkpoints, the recorder.

Imports `core` and `surgery`. A new schedule goes into `schedules.py`, a new optimizer by name into `optimizers.py`, and
what a network is validated by into `validation.py`.
"""
