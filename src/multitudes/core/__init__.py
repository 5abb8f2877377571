"""What a multitude is: how networks are called, what predictions say, members, draws and tasks.

Imports nothing from other rooms. A newcomer rarely changes anything here: a new task goes into `tasks.py` and
`predictive.py`, a faster layer for packed members into `packing/rules.py`.
"""
