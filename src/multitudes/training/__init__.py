"""`fit`, and what a training needs: schedules, optimizers, checkpoints, the recorder of weights, batch-norm statistics.

Imports `core` and `surgery`. A new schedule goes into `schedules.py`, a new optimizer by name into `optimizers.py`.
"""
