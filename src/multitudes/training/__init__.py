"""`fit` and its parts: schedules, optimizers, validation, class weights, checkpoints, the recorder.

Imports `core` and `surgery`. New schedules go into `schedules.py`, new optimizers by name into `optimizers.py`, new
validation scores into `validation.py`.
"""
