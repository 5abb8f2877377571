"""A study: many trainings, and which method is worth its price on the data at hand.

Imports every room but `report` and `cli`. From top to bottom: `execution` runs jobs, `worker` is one job, `planning`
turns a `spec` into jobs, `store` is the run directory, and `leaderboard` reads what is in it. A new key of `study.toml`
goes into `sections.py`, which makes it an option of the command line too.
"""
