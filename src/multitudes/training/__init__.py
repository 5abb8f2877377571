"""`fit` and its parts: schedules, optimizers, validation, class weights, checkpoints, the recorder.

Imports `ensemble`, `tasks` and `networks`. To add a schedule, edit `schedules.py`; a named optimizer, `optimizers.py`;
a validation score, `validation.py`.
"""
